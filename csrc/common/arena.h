// Memory that snapshots are staged in: one mapping of the system's, lent out in pieces.
#pragma once

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "common/first_touch.h"
#include "common/unique_fd.h"
#include "common/worker_group.h"

namespace dcpx {

// A mapping of its own, so that what was staged goes back to the system whole (a heap keeps it),
// on huge pages where the system gives them. Shared ones lie in a memfd: another process maps the
// same bytes by that descriptor. Forked children do not have the mapping, as every page staged
// after a fork would be copied for them. Thread-safe; whoever lends a piece keeps the arena alive.
class Arena {
 public:
  // The memory is taken from the system when it is first touched. Throws Error(kStorage).
  Arena(std::uint64_t nbytes, bool is_shared);
  // Maps the arena of another process; `fd` stays the caller's. Throws Error(kStorage), and
  // Error(kPlan) where the descriptor is of another size.
  static Arena attach(int fd, std::uint64_t nbytes);
  Arena(Arena&& other) noexcept;
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  ~Arena();

  std::byte* data() const noexcept { return data_; }
  std::uint64_t size_bytes() const noexcept { return nbytes_; }
  int fd() const noexcept { return fd_.get(); }  // -1 where it is not shared

  // Takes all memory from the system now, on `workers` threads. Blocks. Throws what `poll` throws,
  // and Error(kStorage) where there is not enough.
  void prefault(unsigned workers, const PollFunction& poll);

  // How many bytes from `data` on were touched, so that the next to fill them need take none; and
  // how many may lie on huge pages. Of whoever fills the arena, who is alone.
  std::uint64_t touched_bytes() const noexcept { return touched_bytes_; }
  void note_touched(std::uint64_t nbytes, const FirstTouch& pages) noexcept {
    touched_bytes_ = std::max(touched_bytes_, nbytes);
    taken_bytes_ += pages.taken_bytes();
  }
  std::uint64_t huge_bytes() const noexcept;
  // What all first touches have taken together, 0 where the system has no call for that.
  std::uint64_t taken_bytes() const noexcept { return taken_bytes_; }

  // Keeps something that must go before the mapping does, as a registration of its pages. A forked
  // child lets it be. Not thread-safe.
  void keep(std::shared_ptr<void> attached) noexcept { attached_ = std::move(attached); }
  void* kept() const noexcept { return attached_.get(); }

  // How many pieces are lent out: nobody reads the arena while it is 0.
  std::uint64_t lent() const noexcept { return lent_.load(std::memory_order_acquire); }
  void lend() noexcept { lent_.fetch_add(1, std::memory_order_relaxed); }
  void give_back() noexcept { lent_.fetch_sub(1, std::memory_order_release); }

  // How often somebody, in this process or another, has said that a save of what is staged here
  // has written all: what is lent is then about to come back.
  std::uint64_t written() const noexcept;
  void add_written() noexcept;

 private:
  Arena(UniqueFd fd, std::uint64_t nbytes);
  void map();

  UniqueFd fd_;
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
  std::uint64_t touched_bytes_ = 0;
  std::uint64_t taken_bytes_ = 0;
  ::pid_t owner_ = 0;
  std::shared_ptr<void> attached_;
  std::atomic<std::uint64_t> lent_{0};
  std::atomic<std::uint64_t>* written_ = nullptr;  // in the mapping, behind the bytes
};

}  // namespace dcpx
