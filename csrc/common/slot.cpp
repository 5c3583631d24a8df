#include "common/slot.h"

#include <sys/mman.h>

#include <new>
#include <utility>

namespace dcpx {

Slot::Slot(std::uint64_t nbytes) : nbytes_(nbytes) {
  void* memory = ::mmap(nullptr, static_cast<std::size_t>(nbytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<std::byte*>(memory);
}

Slot::Slot(Slot&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

Slot::~Slot() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(nbytes_));
}

}  // namespace dcpx
