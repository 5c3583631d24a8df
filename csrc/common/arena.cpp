#include "common/arena.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "common/bytes.h"

namespace dcpx {
namespace {

constexpr std::uint64_t kPageBytes = 4096;  // of the layout; a system's own may be larger
constexpr std::uint64_t kHugePageBytes = 2 << 20;
constexpr std::uint64_t kPrefaultBytes = 4 << 20;  // what a worker takes at once
constexpr const char* kName = "dcpx-arena";

using Counter = std::atomic<std::uint64_t>;
static_assert(Counter::is_always_lock_free, "two processes share it");

// The header follows the bytes, on a page of its own, so that they begin on a huge page.
std::uint64_t header_offset(std::uint64_t nbytes) { return align_up(nbytes, kPageBytes); }
std::uint64_t mapped_bytes(std::uint64_t nbytes) { return header_offset(nbytes) + kPageBytes; }

// Changes no byte: some may be staged there already.
void touch(std::byte* first, std::uint64_t nbytes) {
  for (std::uint64_t at = 0; at < nbytes; at += kPageBytes) {
    auto* page = reinterpret_cast<volatile unsigned char*>(first + at);
    const unsigned char byte = *page;
    *page = byte;
  }
}

}  // namespace

Arena::Arena(std::uint64_t nbytes, bool is_shared) : nbytes_(nbytes) {
  DCPX_CHECK(nbytes <= INT64_MAX / 2, "an arena of half the address space");
  if (is_shared) {
    fd_ = UniqueFd(above_standard_fds(::memfd_create(kName, MFD_CLOEXEC), true));
    if (!fd_.is_open()) throw storage_error("memfd_create", kName, errno);
    if (::ftruncate(fd_.get(), static_cast<::off_t>(mapped_bytes(nbytes))) != 0)
      throw storage_error("ftruncate", kName, errno, -1, static_cast<std::int64_t>(nbytes));
  }
  map();
}

Arena::Arena(UniqueFd fd, std::uint64_t nbytes) : fd_(std::move(fd)), nbytes_(nbytes) { map(); }

Arena Arena::attach(int fd, std::uint64_t nbytes) {
  DCPX_CHECK(nbytes <= INT64_MAX / 2, "an arena of half the address space");
  UniqueFd own = UniqueFd::copy_of(fd);
  if (!own.is_open()) throw storage_error("dup", kName, errno);
  struct ::stat status{};
  if (::fstat(own.get(), &status) != 0) throw storage_error("fstat", kName, errno);
  DCPX_CHECK(static_cast<std::uint64_t>(status.st_size) == mapped_bytes(nbytes),
             "a descriptor of an arena of another size");
  return Arena(std::move(own), nbytes);
}

Arena::Arena(Arena&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(other.nbytes_),
      touched_bytes_(other.touched_bytes_),
      taken_bytes_(other.taken_bytes_),
      owner_(other.owner_),
      attached_(std::move(other.attached_)),
      lent_(other.lent()),
      written_(std::exchange(other.written_, nullptr)) {}

Arena::~Arena() {
  if (data_ == nullptr) return;
  if (owner_ != ::getpid()) {
    // A forked child has something else there, if anything, and none of the threads that what is
    // attached may wait for.
    [[maybe_unused]] const auto* const left = new (std::nothrow) std::shared_ptr(attached_);
    return;
  }
  attached_.reset();
  ::munmap(data_, static_cast<std::size_t>(mapped_bytes(nbytes_)));
}

void Arena::map() {
  const std::uint64_t wanted = mapped_bytes(nbytes_);
  // A place on a border of huge pages: found by reserving more than is wanted.
  const std::uint64_t reserved = checked_add(wanted, kHugePageBytes);
  void* const found = ::mmap(nullptr, static_cast<std::size_t>(reserved), PROT_NONE,
                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (found == MAP_FAILED)
    throw storage_error("mmap", kName, errno, -1, static_cast<std::int64_t>(wanted));
  auto* const first = static_cast<std::byte*>(found);
  const std::uint64_t before = align_up(reinterpret_cast<std::uintptr_t>(first), kHugePageBytes) -
                               reinterpret_cast<std::uintptr_t>(first);
  std::byte* const place = first + before;
  const int flags = fd_.is_open() ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
  void* const mapped = ::mmap(place, static_cast<std::size_t>(wanted), PROT_READ | PROT_WRITE,
                              flags | MAP_FIXED, fd_.get(), 0);
  if (mapped == MAP_FAILED) {
    const int mmap_errno = errno;
    ::munmap(first, static_cast<std::size_t>(reserved));
    throw storage_error("mmap", kName, mmap_errno, -1, static_cast<std::int64_t>(wanted));
  }
  if (before > 0) ::munmap(first, static_cast<std::size_t>(before));
  // The system counts in its own pages, 64 KiB of some: the last one may be wanted in part.
  const std::uint64_t whole = align_up(wanted, system_page_bytes());
  const std::uint64_t behind = align_up(reserved, system_page_bytes()) - before;
  if (behind > whole) ::munmap(place + whole, static_cast<std::size_t>(behind - whole));
  data_ = place;
  owner_ = ::getpid();
  if (huge_bytes() > 0) ::madvise(data_, static_cast<std::size_t>(huge_bytes()), MADV_HUGEPAGE);
  ::madvise(data_, static_cast<std::size_t>(wanted), MADV_DONTFORK);
  // Of a new mapping it is 0, of an attached one what the other process has said.
  written_ = std::launder(reinterpret_cast<Counter*>(data_ + header_offset(nbytes_)));
}

std::uint64_t Arena::huge_bytes() const noexcept { return align_down(nbytes_, kHugePageBytes); }

void Arena::prefault(unsigned workers, const PollFunction& poll) {
  FirstTouch pages(data_, huge_bytes());
  std::atomic<std::uint64_t> next{0};
  const auto work = [&](unsigned, StopFlag& stop) {
    while (!stop.is_set()) {
      const std::uint64_t at = next.fetch_add(kPrefaultBytes, std::memory_order_relaxed);
      if (at >= nbytes_) return;
      const std::uint64_t end = std::min(at + kPrefaultBytes, align_up(nbytes_, kPageBytes));
      if (!pages.take(at, end)) touch(data_ + at, end - at);
    }
  };
  const std::uint64_t pieces = (nbytes_ + kPrefaultBytes - 1) / kPrefaultBytes;
  run_workers(static_cast<unsigned>(std::min<std::uint64_t>(workers, pieces)), work, poll);
  note_touched(nbytes_, pages);
}

std::uint64_t Arena::written() const noexcept { return written_->load(std::memory_order_acquire); }

void Arena::add_written() noexcept { written_->fetch_add(1, std::memory_order_release); }

}  // namespace dcpx
