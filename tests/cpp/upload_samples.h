// Uploads the files of a streamed WriteJob to memory, and waits where obstore waits.
//
// A part takes slices of pieces until it is full: a piece at its border belongs to two parts, and
// is let go with the second. Full parts are in flight, at most so many a file, until a thread of
// the store has taken their bytes, in any order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/upload_queue.h"
#include "random_source.h"

// Ends waits that nothing would end: throws when for a minute nobody has done anything.
class Progress {  // Thread-safe.
 public:
  void made() noexcept { last_.store(now()); }
  void check() const {
    if (now() - last_.load() > kPatience.count()) throw std::runtime_error("all wait for all");
  }
  dcpx::PollFunction poll() const {
    return [this] { check(); };
  }

 private:
  static constexpr std::chrono::nanoseconds kPatience = std::chrono::minutes(1);
  static std::int64_t now() {
    return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  }
  std::atomic<std::int64_t> last_{now()};
};

// Bytes that pieces own, from when they are taken until they are let go.
class Meter {  // Thread-safe.
 public:
  void add(std::uint64_t nbytes) {
    const std::uint64_t sum = bytes_.fetch_add(nbytes) + nbytes;
    std::uint64_t peak = peak_.load();
    while (peak < sum && !peak_.compare_exchange_weak(peak, sum)) {
    }
  }
  void remove(std::uint64_t nbytes) { bytes_.fetch_sub(nbytes); }
  std::uint64_t peak() const { return peak_.load(); }

 private:
  std::atomic<std::uint64_t> bytes_{0};
  std::atomic<std::uint64_t> peak_{0};
};

using HeldPiece = std::shared_ptr<const dcpx::engine::UploadPiece>;

// Whoever drops the last copy lets the piece go. REQUIRES: `meter` and `progress` outlive it.
inline HeldPiece hold(std::shared_ptr<dcpx::engine::UploadQueue> queue,
                      dcpx::engine::UploadPiece taken, Meter& meter, Progress& progress) {
  meter.add(taken.owned.size());
  progress.made();
  return {new dcpx::engine::UploadPiece(std::move(taken)),
          [queue = std::move(queue), &meter, &progress](const dcpx::engine::UploadPiece* piece) {
            meter.remove(piece->owned.size());
            queue->let_go(*piece);
            delete piece;
            progress.made();
          }};
}

struct Slice {
  HeldPiece piece;
  std::uint64_t begin = 0;
  std::uint64_t nbytes = 0;
};

struct UploadOptions {
  unsigned threads = 4;            // each uploads a file
  std::uint64_t part_bytes = 0;    // of a file, but for its last one
  unsigned parts_at_once = 4;      // of a file
  bool is_pulled_ahead = false;    // the next piece is taken before there is room for a part
  std::function<void()> on_piece;  // after each piece that was taken; may throw
};

class Uploads {  // Threads that upload the files of a queue, in their order. Not thread-safe.
 public:
  Uploads(std::shared_ptr<dcpx::engine::UploadQueue> queue, std::size_t files,
          UploadOptions options, std::uint64_t seed)
      : queue_(std::move(queue)), options_(std::move(options)), objects_(files), sizes_(files) {
    for (std::uint64_t n = 0; n < 2; ++n) store_.emplace_back([=] { store_parts(seed + n); });
    for (unsigned n = 0; n < options_.threads; ++n) uploaders_.emplace_back([=] { run(); });
  }
  ~Uploads() {
    queue_->fail();
    join();
  }

  // Waits until all is uploaded, or one has failed.
  void join() {
    for (std::thread& thread : uploaders_) thread.join();
    uploaders_.clear();
    {
      const std::lock_guard lock(mutex_);
      is_ended_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : store_) thread.join();
    store_.clear();
  }
  // After join().
  void throw_first_error() const {
    if (error_) std::rethrow_exception(error_);
  }
  unsigned given_up() const { return given_up_; }  // uploaders that were told so
  const std::vector<std::byte>& object(std::size_t file) const { return objects_[file]; }
  // What the queue has said of the file's size before its first piece was taken.
  std::optional<std::uint64_t> announced_size(std::size_t file) const { return sizes_[file]; }

  Progress progress;
  Meter meter;

 private:
  struct Part {
    std::size_t file = 0;
    std::uint64_t offset = 0;
    std::vector<Slice> slices;
  };
  struct File {  // that a thread uploads
    std::size_t number = 0;
    Part part{};
    std::uint64_t part_bytes = 0;
    std::atomic<unsigned> in_flight{0};
  };

  void run() {
    try {
      for (std::size_t f = next_.fetch_add(1); f < objects_.size(); f = next_.fetch_add(1)) {
        upload(f);
      }
    } catch (const dcpx::Error& error) {
      const bool is_told =
          error.code() == dcpx::ErrorCode::kStorage && error.sys_errno == ECANCELED;
      keep_error(is_told ? nullptr : std::current_exception());
    } catch (...) {
      keep_error(std::current_exception());
    }
  }

  void keep_error(const std::exception_ptr& error) {
    if (error) queue_->fail();
    const std::lock_guard lock(mutex_);
    if (!error) ++given_up_;
    if (error && !error_) error_ = error;
  }

  void upload(std::size_t number) {
    const auto file = static_cast<std::uint32_t>(number);
    const auto poll = progress.poll();
    File upload{number};
    upload.part.file = number;
    try {
      sizes_[number] = queue_->size_of(file, poll);
      while (true) {
        if (!options_.is_pulled_ahead) wait(upload, options_.parts_at_once);
        std::optional<dcpx::engine::UploadPiece> taken = queue_->next(file, poll);
        if (!taken) break;
        const HeldPiece piece = hold(queue_, std::move(*taken), meter, progress);
        if (options_.on_piece) options_.on_piece();
        if (options_.is_pulled_ahead) wait(upload, options_.parts_at_once);
        add(upload, piece);
      }
    } catch (...) {  // aborted: what is in flight still ends
      wait(upload, 1);
      throw;
    }
    if (upload.part_bytes > 0) send(upload);
    wait(upload, 1);
  }

  void add(File& upload, const HeldPiece& piece) {
    for (std::uint64_t begin = 0; begin < piece->nbytes;) {
      const std::uint64_t nbytes =
          std::min(piece->nbytes - begin, options_.part_bytes - upload.part_bytes);
      upload.part.slices.push_back({piece, begin, nbytes});
      upload.part_bytes += nbytes;
      begin += nbytes;
      if (upload.part_bytes == options_.part_bytes) send(upload);
    }
  }

  void send(File& upload) {
    const std::uint64_t end = upload.part.offset + upload.part_bytes;
    upload.in_flight.fetch_add(1);
    {
      const std::lock_guard lock(mutex_);
      parts_.emplace_back(std::move(upload.part), &upload);
    }
    changed_.notify_all();
    upload.part = {upload.number, end, {}};
    upload.part_bytes = 0;
  }

  // Waits until fewer than so many parts of the file are in flight.
  void wait(const File& upload, unsigned parts) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return upload.in_flight.load() < parts; });
  }

  void store_parts(std::uint64_t seed) {
    RandomSource random(seed);
    while (true) {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return !parts_.empty() || is_ended_; });
      if (parts_.empty()) return;
      std::swap(parts_[random.below(parts_.size())], parts_.back());
      auto [part, upload] = std::move(parts_.back());
      parts_.pop_back();
      lock.unlock();
      for (std::uint64_t n = random.below(300); n > 0; --n) std::this_thread::yield();
      std::vector<std::byte> bytes;
      for (const Slice& slice : part.slices) {
        const std::byte* from = slice.piece->data + slice.begin;
        bytes.insert(bytes.end(), from, from + slice.nbytes);
      }
      part.slices.clear();
      lock.lock();
      std::vector<std::byte>& object = objects_[part.file];
      object.resize(std::max(object.size(), part.offset + bytes.size()));
      std::copy(bytes.begin(), bytes.end(),
                object.begin() + static_cast<std::ptrdiff_t>(part.offset));
      upload->in_flight.fetch_sub(1);
      lock.unlock();
      changed_.notify_all();
    }
  }

  std::shared_ptr<dcpx::engine::UploadQueue> queue_;
  UploadOptions options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::vector<std::byte>> objects_;
  std::vector<std::optional<std::uint64_t>> sizes_;
  std::vector<std::pair<Part, File*>> parts_;  // in flight
  std::atomic<std::size_t> next_{0};
  unsigned given_up_ = 0;
  std::exception_ptr error_;
  bool is_ended_ = false;
  std::vector<std::thread> store_, uploaders_;
};
