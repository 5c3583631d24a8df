// A directory that exists for one test, and a look at what this process has open and running.
#pragma once

#include <fcntl.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "common/unique_fd.h"

class ScratchDir {
 public:
  ScratchDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "dcpx-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("mkdtemp " + pattern);
    path_ = pattern;
    fd_ = dcpx::UniqueFd(::open(pattern.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  }
  ScratchDir(const ScratchDir&) = delete;
  ScratchDir& operator=(const ScratchDir&) = delete;
  ~ScratchDir() {
    std::error_code ignored;  // a leftover in /tmp must not hide the test's own result
    std::filesystem::remove_all(path_, ignored);
  }

  int fd() const { return fd_.get(); }
  const std::string& path() const { return path_; }

  std::vector<std::byte> content(const std::string& name) const {
    std::ifstream file(path_ + "/" + name, std::ios::binary);
    const std::vector<char> raw{std::istreambuf_iterator<char>(file), {}};
    const auto* first = reinterpret_cast<const std::byte*>(raw.data());
    return {first, first + raw.size()};
  }

  void flip_byte(const std::string& name, std::uint64_t offset) const {
    std::fstream file(path_ + "/" + name, std::ios::binary | std::ios::in | std::ios::out);
    file.seekg(static_cast<std::streamoff>(offset));
    const int old = file.get();
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(static_cast<char>(old ^ 0x10));
  }

 private:
  std::string path_;
  dcpx::UniqueFd fd_;
};

inline std::size_t count_of_open_files() {
  const std::filesystem::directory_iterator entries("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(entries), end(entries)));
}

// Whether all threads that were started since it was made have ended.
class ThreadCheck {
 public:
  ThreadCheck() {
    std::thread([] {}).join();  // the first thread also starts the sanitizer's own
    before_ = count();
  }

  // The kernel lists a joined thread a moment longer.
  bool holds() const {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(5);
    while (count() > before_) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

 private:
  static std::size_t count() {
    const std::filesystem::directory_iterator tasks("/proc/self/task");
    return static_cast<std::size_t>(std::distance(begin(tasks), end(tasks)));
  }
  std::size_t before_ = 0;
};
