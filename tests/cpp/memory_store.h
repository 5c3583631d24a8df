// Objects in memory that count what is asked for, change, and fail.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/error.h"
#include "io/object_store.h"

// One request for a range.
struct Request {
  std::string name;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;

  bool operator==(const Request& other) const {
    return name == other.name && offset == other.offset && nbytes == other.nbytes;
  }
  bool operator<(const Request& other) const {
    return std::tie(name, offset, nbytes) < std::tie(other.name, other.offset, other.nbytes);
  }
};

class MemoryStore : public dcpx::io::ObjectStore {
 public:
  // Puts an object, with another tag than all before.
  void put(const std::string& name, std::vector<std::byte> bytes) {
    const std::lock_guard lock(mutex_);
    objects_[name] = {std::move(bytes), "tag" + std::to_string(++puts_)};
  }
  void flip_byte(const std::string& name, std::uint64_t offset) {
    const std::lock_guard lock(mutex_);
    objects_.at(name).first.at(offset) ^= std::byte{0x10};
  }
  void remove(const std::string& name) {
    const std::lock_guard lock(mutex_);
    objects_.erase(name);
  }
  // The request after so many others fails, once.
  void fail_after(std::uint64_t requests) {
    const std::lock_guard lock(mutex_);
    fails_in_ = requests + 1;
  }
  // Of all answers of read() that somebody held at one time.
  std::uint64_t peak_bytes() const {
    const std::lock_guard lock(mutex_);
    return peak_bytes_;
  }

  // Of look(), and of read() in the order of names and offsets, since the last call.
  std::uint64_t take_looks() {
    const std::lock_guard lock(mutex_);
    return std::exchange(looks_, 0);
  }
  std::vector<Request> take_reads() {
    const std::lock_guard lock(mutex_);
    std::sort(reads_.begin(), reads_.end());
    return std::exchange(reads_, {});
  }

  Object look(const std::string& name, std::uint64_t nbytes) override {
    const std::lock_guard lock(mutex_);
    ++looks_;
    const auto& [bytes, tag] = find(name);
    const std::uint64_t count = std::min<std::uint64_t>(nbytes, bytes.size());
    return {bytes.size(), tag, {bytes.end() - static_cast<std::ptrdiff_t>(count), bytes.end()}};
  }
  Bytes read(const std::string& name, const std::string& tag, std::uint64_t offset,
             std::uint64_t nbytes) override {
    const std::lock_guard lock(mutex_);
    reads_.push_back({name, offset, nbytes});
    const auto& [bytes, found_tag] = find(name);
    if (tag != found_tag) throw dcpx::storage_error("get", name, ESTALE);
    if (nbytes == 0 || offset + nbytes > bytes.size()) {
      throw dcpx::Error(dcpx::ErrorCode::kPlan, "a range that no store serves");
    }
    // Exactly what was asked for: ASan sees a byte too many.
    const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(offset);
    const std::shared_ptr<const std::vector<std::byte>> answer(
        new std::vector<std::byte>(first, first + static_cast<std::ptrdiff_t>(nbytes)),
        [this](const std::vector<std::byte>* held) {
          const std::lock_guard own_lock(mutex_);
          held_bytes_ -= held->size();
          delete held;
        });
    held_bytes_ += nbytes;
    peak_bytes_ = std::max(peak_bytes_, held_bytes_);
    return {answer, answer->data()};
  }

 private:
  using Stored = std::pair<std::vector<std::byte>, std::string>;  // with its tag

  const Stored& find(const std::string& name) {
    if (fails_in_ > 0 && --fails_in_ == 0) throw dcpx::storage_error("get", name, EIO);
    const auto found = objects_.find(name);
    if (found == objects_.end()) throw dcpx::storage_error("get", name, ENOENT);
    return found->second;
  }

  mutable std::mutex mutex_;
  std::map<std::string, Stored> objects_;
  std::uint64_t puts_ = 0;
  std::uint64_t looks_ = 0;
  std::uint64_t fails_in_ = 0;
  std::uint64_t held_bytes_ = 0;
  std::uint64_t peak_bytes_ = 0;
  std::vector<Request> reads_;
};
