// What a save hands to whoever uploads it: the bytes of its files, each file's in their order.
//
// A worker takes a slot, fills it with a segment and puts it here, in any order. An uploader takes
// the pieces of one file one after the other, without a copy, and lets each go when the store has
// it; only then its slot is free again. So memory is bounded, and workers wait for the store.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "common/mutex.h"
#include "common/worker_group.h"
#include "engine/job_slots.h"

namespace dcpx::engine {

inline constexpr int kNoSlot = -1;

// A run of bytes of a file. Its memory is a slot's, a tensor's, or its own.
struct UploadPiece {
  const std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  int slot = kNoSlot;  // taken until let_go(): where the bytes are, or only one fewer for others
  std::uint64_t payload_bytes = 0;
  std::vector<std::byte> owned;  // the bytes, where nobody else has them
};

// What pieces may own of memory, beside slots. A footer counts, but nobody waits to put it: its
// bytes were the file's index before.
struct OwnedLimit {
  std::uint64_t max_bytes = ~std::uint64_t{0};
  std::uint64_t piece_bytes = 0;  // the most that the segment in a slot may come to own
};

class UploadQueue {  // Thread-safe, but for allocate().
 public:
  // Whoever waits looks at its flag, or polls, once in `poll_interval`.
  explicit UploadQueue(
      std::chrono::milliseconds poll_interval = std::chrono::milliseconds(100)) noexcept
      : poll_interval_(poll_interval) {}

  // Makes the slots; a second call does nothing. `device`: as JobSlots. Throws Error (ENOMEM).
  // REQUIRES: a part that waits for more bytes owns no more than `owned` less one piece.
  void allocate(unsigned count, std::uint64_t slot_bytes, int device, const OwnedLimit& owned);
  std::uint64_t size_bytes() const noexcept { return slots_.size_bytes(); }
  std::byte* slot(int number) noexcept { return slots_.slot(static_cast<unsigned>(number)); }

  // Returns a free slot, once its segment may come to own a piece as well; kNoSlot once `stop` is
  // set or the queue has failed. Blocks. What has taken a slot puts it or gives it back, once.
  int take_slot(const StopFlag& stop);
  void give_back(int slot);
  // Waits until `is_done`, which is asked again after each notify(); false as take_slot().
  bool wait(const StopFlag& stop, const std::function<bool()>& is_done);
  void notify();

  void add_file();
  // Says how long a file will be, before its first piece; without it nobody knows until its end.
  void set_size(std::uint32_t file, std::uint64_t nbytes);
  // `from`: the slot that the piece's segment has taken, free from here on unless the piece has it.
  void put(std::uint32_t file, std::uint64_t offset, UploadPiece piece, int from = kNoSlot);
  void end(std::uint32_t file, std::uint64_t nbytes);

  // Returns how long the file will be, once it has a first piece; nullopt: not known yet. Blocks.
  // Throws as next().
  std::optional<std::uint64_t> size_of(std::uint32_t file, const PollFunction& poll);
  // Returns the next bytes of a file; nullopt behind its last ones. Blocks. Throws what `poll`
  // throws, and Error(kStorage, ECANCELED) once the queue has failed.
  std::optional<UploadPiece> next(std::uint32_t file, const PollFunction& poll);
  void let_go(const UploadPiece& piece) noexcept;
  std::uint64_t gone_bytes() const;  // payload bytes of what was let go

  // Throws Error(kStorage, ECANCELED) if the queue has failed.
  void check() const;
  // From here on nobody waits: the save is given up.
  void fail() noexcept;

 private:
  struct File {
    std::map<std::uint64_t, UploadPiece> waiting;  // by offset
    std::uint64_t next_offset = 0;
    std::optional<std::uint64_t> size;
    bool is_begun = false;
    bool is_whole = false;  // all has been put
  };

  File& file_at(std::uint32_t file) DCPX_HOLDS(mutex_);
  bool has_room() const DCPX_HOLDS(mutex_);

  const std::chrono::milliseconds poll_interval_;
  JobSlots slots_;
  mutable Mutex mutex_;
  std::condition_variable_any has_slot_;   // for workers: whoever is woken wakes the next
  std::condition_variable_any has_piece_;  // for uploaders
  std::condition_variable_any changed_;    // for workers, by notify()
  std::vector<int> free_ DCPX_GUARDED_BY(mutex_);
  std::vector<File> files_ DCPX_GUARDED_BY(mutex_);
  OwnedLimit limit_ DCPX_GUARDED_BY(mutex_);
  std::uint64_t owned_bytes_ DCPX_GUARDED_BY(mutex_) = 0;  // of pieces that are not let go
  std::uint64_t taken_slots_ DCPX_GUARDED_BY(mutex_) = 0;  // whose segments may come to own more
  std::uint64_t gone_bytes_ DCPX_GUARDED_BY(mutex_) = 0;
  bool is_allocated_ = false;
  bool has_failed_ DCPX_GUARDED_BY(mutex_) = false;
};

}  // namespace dcpx::engine
