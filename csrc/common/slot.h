// An aligned piece of memory that one worker owns: the unit in which the engines spend memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcpx {

// Page-aligned, from the system and straight back to it, so that the process does not grow by what
// a save used. Movable. Not thread-safe.
class Slot {
 public:
  Slot() = default;
  // `alignment` is a power of two, at least the page size. Throws Error (ENOMEM).
  explicit Slot(std::uint64_t nbytes, std::uint64_t alignment = 4096);
  Slot(Slot&& other) noexcept;
  Slot& operator=(Slot&& other) noexcept;
  Slot(const Slot&) = delete;
  ~Slot();

  std::byte* data() const noexcept { return data_; }
  std::uint64_t size_bytes() const noexcept { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

// Equal slots in one piece of memory, on huge pages where they fill some: one fault instead of 512,
// and one page to pin for direct I/O instead of 512 (1 GiB read by O_DIRECT into two slots of 1
// MiB: 0.34 s on huge pages, 0.7 to 1.0 s on small ones). Goes back to the system as Slot does.
class SlotArena {
 public:
  SlotArena() = default;
  // REQUIRES: `slot_bytes` is a multiple of the page size. Throws Error (ENOMEM).
  SlotArena(unsigned count, std::uint64_t slot_bytes);

  std::byte* slot(unsigned number) noexcept { return memory_.data() + number * slot_bytes_; }
  bool holds(unsigned count, std::uint64_t slot_bytes) const noexcept {
    return count <= count_ && slot_bytes <= slot_bytes_;
  }
  std::uint64_t size_bytes() const noexcept { return count_ * slot_bytes_; }

 private:
  Slot memory_{};
  unsigned count_ = 0;
  std::uint64_t slot_bytes_ = 0;
};

}  // namespace dcpx
