#include "engine/upload_queue.h"

#include <cerrno>
#include <utility>

#include "common/error.h"

namespace dcpx::engine {
namespace {

Error given_up() {
  Error error(ErrorCode::kStorage, "the save that is uploaded was given up");
  error.sys_errno = ECANCELED;
  return error;
}

}  // namespace

void UploadQueue::allocate(unsigned count, std::uint64_t slot_bytes, int device,
                           const OwnedLimit& owned) {
  if (is_allocated_) return;
  slots_ = JobSlots(count, slot_bytes, device);
  is_allocated_ = true;
  const Lock lock(mutex_);
  limit_ = owned;
  for (unsigned number = count; number-- > 0;) free_.push_back(static_cast<int>(number));
}

// A flag may poll, which takes the GIL: it is asked without the mutex.
bool UploadQueue::wait(const StopFlag& stop, const std::function<bool()>& is_done) {
  while (!stop.is_set()) {
    Lock lock(mutex_);
    if (has_failed_) return false;
    if (is_done()) return true;
    changed_.wait_for(lock, poll_interval_);
  }
  return false;
}

// Whoever has a slot may come to own a piece without a wait: so the one with the earliest turn
// never waits for memory that those behind it hold.
bool UploadQueue::has_room() const {
  const std::uint64_t own_bytes = owned_bytes_ + (taken_slots_ + 1) * limit_.piece_bytes;
  return !free_.empty() && own_bytes <= limit_.max_bytes;
}

int UploadQueue::take_slot(const StopFlag& stop) {
  while (!stop.is_set()) {
    Lock lock(mutex_);
    if (has_failed_) return kNoSlot;
    if (has_room()) {
      const int slot = free_.back();
      free_.pop_back();
      ++taken_slots_;
      // One piece that was let go may leave room for several workers, of which it wakes one.
      if (has_room()) has_slot_.notify_one();
      return slot;
    }
    has_slot_.wait_for(lock, poll_interval_);
  }
  return kNoSlot;
}

void UploadQueue::give_back(int slot) {
  if (slot == kNoSlot) return;
  {
    const Lock lock(mutex_);
    free_.push_back(slot);
    --taken_slots_;
  }
  has_slot_.notify_one();
}

void UploadQueue::notify() {
  {
    const Lock lock(mutex_);
  }  // whoever looks before it waits is not missed
  changed_.notify_all();
}

void UploadQueue::add_file() {
  const Lock lock(mutex_);
  files_.emplace_back();
}

UploadQueue::File& UploadQueue::file_at(std::uint32_t file) {
  DCPX_CHECK(file < files_.size(), "a piece of an unknown file");
  return files_[file];
}

void UploadQueue::set_size(std::uint32_t file, std::uint64_t nbytes) {
  const Lock lock(mutex_);
  file_at(file).size = nbytes;
}

void UploadQueue::put(std::uint32_t file, std::uint64_t offset, UploadPiece piece, int from) {
  bool is_next = false;
  {
    const Lock lock(mutex_);
    File& into = file_at(file);
    into.is_begun = true;
    owned_bytes_ += piece.owned.size();
    if (from != kNoSlot) --taken_slots_;
    if (from != kNoSlot && piece.slot == kNoSlot) free_.push_back(from);
    const bool is_new = into.waiting.emplace(offset, std::move(piece)).second;
    DCPX_CHECK(is_new && offset >= into.next_offset, "two pieces at one place of a file");
    is_next = offset == into.next_offset;  // else nobody can take it yet
  }
  if (from != kNoSlot) has_slot_.notify_one();
  if (is_next) has_piece_.notify_all();
}

void UploadQueue::end(std::uint32_t file, std::uint64_t nbytes) {
  {
    const Lock lock(mutex_);
    File& ended = file_at(file);
    ended.size = nbytes;
    ended.is_begun = ended.is_whole = true;
  }
  has_piece_.notify_all();
}

std::optional<std::uint64_t> UploadQueue::size_of(std::uint32_t file, const PollFunction& poll) {
  Lock lock(mutex_);
  while (!file_at(file).is_begun) {
    if (has_failed_) throw given_up();
    if (has_piece_.wait_for(lock, poll_interval_) == std::cv_status::no_timeout) continue;
    lock.unlock();
    poll();  // which takes the GIL: never with the mutex
    lock.lock();
  }
  return file_at(file).size;
}

std::optional<UploadPiece> UploadQueue::next(std::uint32_t file, const PollFunction& poll) {
  Lock lock(mutex_);
  while (!has_failed_) {
    File& from = file_at(file);
    const auto first = from.waiting.begin();
    if (first != from.waiting.end() && first->first == from.next_offset) {
      UploadPiece piece = std::move(first->second);
      from.waiting.erase(first);
      from.next_offset += piece.nbytes;
      return piece;
    }
    if (from.is_whole && from.waiting.empty()) {
      DCPX_CHECK(from.next_offset == from.size, "a file with a gap");
      return std::nullopt;
    }
    if (has_piece_.wait_for(lock, poll_interval_) == std::cv_status::no_timeout) continue;
    lock.unlock();
    poll();
    lock.lock();
  }
  throw given_up();
}

void UploadQueue::let_go(const UploadPiece& piece) noexcept {
  {
    const Lock lock(mutex_);
    gone_bytes_ += piece.payload_bytes;
    owned_bytes_ -= piece.owned.size();
    if (piece.slot != kNoSlot) free_.push_back(piece.slot);  // which has had its place before
  }
  has_slot_.notify_one();
}

std::uint64_t UploadQueue::gone_bytes() const {
  const Lock lock(mutex_);
  return gone_bytes_;
}

void UploadQueue::check() const {
  const Lock lock(mutex_);
  if (has_failed_) throw given_up();
}

void UploadQueue::fail() noexcept {
  {
    const Lock lock(mutex_);
    has_failed_ = true;
  }
  has_slot_.notify_all();
  has_piece_.notify_all();
  changed_.notify_all();
}

}  // namespace dcpx::engine
