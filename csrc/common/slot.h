// An aligned piece of memory that one worker owns: the unit in which the engines spend memory.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcpx {

// Page-aligned, from the system and straight back to it, so that the process does not grow by what
// a save used. Movable. Not thread-safe.
class Slot {
 public:
  // Throws std::bad_alloc.
  explicit Slot(std::uint64_t nbytes);
  Slot(Slot&& other) noexcept;
  Slot& operator=(Slot&&) = delete;
  Slot(const Slot&) = delete;
  ~Slot();

  std::byte* data() const noexcept { return data_; }
  std::uint64_t size_bytes() const noexcept { return nbytes_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_ = 0;
};

}  // namespace dcpx
