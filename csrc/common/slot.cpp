#include "common/slot.h"

#include <sys/mman.h>

#include <cerrno>
#include <utility>

#include "common/bytes.h"
#include "common/error.h"

namespace dcpx {

namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kHugePageBytes = 2 << 20;
constexpr const char* kName = "the workers' slots (fewer workers or smaller slots need less)";

}  // namespace

Slot::Slot(std::uint64_t nbytes, std::uint64_t alignment) : nbytes_(nbytes) {
  const std::uint64_t spare = alignment > kPageBytes ? alignment : 0;
  void* mapped = ::mmap(nullptr, static_cast<std::size_t>(nbytes + spare), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED)
    throw storage_error("mmap", kName, errno, -1, static_cast<std::int64_t>(nbytes + spare));
  auto* first = static_cast<std::byte*>(mapped);
  if (spare == 0) {
    data_ = first;
    return;
  }
  const std::uint64_t whole = align_up(nbytes, system_page_bytes());
  const std::uint64_t before = align_up(reinterpret_cast<std::uintptr_t>(first), alignment) -
                               reinterpret_cast<std::uintptr_t>(first);
  data_ = first + before;
  const std::uint64_t behind = align_up(nbytes + spare, system_page_bytes()) - before - whole;
  if (before > 0) ::munmap(first, static_cast<std::size_t>(before));
  if (behind > 0) ::munmap(data_ + whole, static_cast<std::size_t>(behind));
}

Slot::Slot(Slot&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

Slot& Slot::operator=(Slot&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(nbytes_, other.nbytes_);
  return *this;
}

Slot::~Slot() {
  if (data_ != nullptr) ::munmap(data_, static_cast<std::size_t>(nbytes_));
}

SlotArena::SlotArena(unsigned count, std::uint64_t slot_bytes)
    : memory_(count * slot_bytes,
              count * slot_bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes),
      count_(count),
      slot_bytes_(slot_bytes) {
  // Whole huge pages only: a small save must not clear 2 MiB for a few bytes. Advice, so a kernel
  // that refuses it costs time and nothing else.
  const std::uint64_t huge_bytes = align_down(size_bytes(), kHugePageBytes);
  if (huge_bytes > 0)
    ::madvise(memory_.data(), static_cast<std::size_t>(huge_bytes), MADV_HUGEPAGE);
}

}  // namespace dcpx
