#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "common/arena.h"
#include "common/first_touch.h"

namespace {

using dcpx::Arena;
using dcpx::FirstTouch;

constexpr std::uint64_t kPieceBytes = 4 << 20;
constexpr std::uint64_t kArenaBytes = 12 * kPieceBytes + 4096;

// A field of the mapping around `address`, as /proc/self/smaps has it; empty: no such mapping.
std::string mapping_field(const std::byte* address, const std::string& field) {
  const auto at = reinterpret_cast<std::uintptr_t>(address);
  std::ifstream maps("/proc/self/smaps");
  bool is_inside = false;
  for (std::string line; std::getline(maps, line);) {
    const std::size_t dash = line.find('-');
    if (dash != std::string::npos && dash < line.find(' ')) {
      is_inside = std::stoull(line, nullptr, 16) <= at &&
                  at < std::stoull(line.substr(dash + 1), nullptr, 16);
    } else if (is_inside && line.rfind(field + ":", 0) == 0) {
      return line.substr(field.size() + 1);
    }
  }
  return {};
}

std::uint64_t mapping_bytes(const std::byte* address, const std::string& field) {
  return std::stoull(mapping_field(address, field)) << 10;
}

bool has_flag(const std::byte* address, const std::string& flag) {
  return mapping_field(address, "VmFlags").find(" " + flag) != std::string::npos;
}

// Some memory that nobody has touched.
class Mapping {
 public:
  Mapping(std::uint64_t nbytes, int protection) : nbytes_(nbytes) {
    void* const found = ::mmap(nullptr, nbytes, protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(found != MAP_FAILED);
    data_ = static_cast<std::byte*>(found);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { ::munmap(data_, nbytes_); }
  std::byte* data() const { return data_; }

 private:
  std::byte* data_ = nullptr;
  std::uint64_t nbytes_;
};

// Since Linux 5.14, and not in every container.
bool has_call() {
  const Mapping memory(4096, PROT_READ | PROT_WRITE);
  return FirstTouch(memory.data(), 0).take(0, 4096);
}

void take_all(FirstTouch& pages, unsigned workers) {
  std::atomic<std::uint64_t> next{0};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < workers; ++i)
    threads.emplace_back([&] {
      for (;;) {
        const std::uint64_t at = next.fetch_add(kPieceBytes);
        if (at >= kArenaBytes || !pages.take(at, std::min(at + kPieceBytes, kArenaBytes))) return;
      }
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(first_touch_takes_every_page_once_and_changes_no_byte) {
  if (!has_call()) return;
  for (const std::uint64_t limit_ns : {std::uint64_t{0}, UINT64_MAX}) {
    Arena arena(kArenaBytes, false);
    std::fill_n(arena.data() + kPieceBytes, kPieceBytes, std::byte{7});
    FirstTouch pages(arena.data(), arena.huge_bytes(), limit_ns);
    take_all(pages, 3);
    CHECK_EQ(pages.taken_bytes(), kArenaBytes);
    CHECK(arena.data()[kPieceBytes] == std::byte{7});
    CHECK(arena.data()[2 * kPieceBytes - 1] == std::byte{7});
    CHECK(arena.data()[2 * kPieceBytes] == std::byte{});
    CHECK_EQ(mapping_bytes(arena.data(), "Rss") + mapping_bytes(arena.data(), "Swap"),
             arena.huge_bytes());
  }
}

TEST(first_touch_goes_on_on_small_pages_where_huge_ones_cost_more) {
  if (!has_call()) return;
  Arena arena(kArenaBytes, false);
  FirstTouch pages(arena.data(), arena.huge_bytes(), 0);
  take_all(pages, 1);
  CHECK(pages.is_small());
  CHECK(!has_flag(arena.data(), "hg"));
  CHECK(mapping_bytes(arena.data(), "AnonHugePages") <= 8 << 20);  // what is tried
}

TEST(first_touch_stays_on_huge_pages_where_they_cost_less) {
  Arena arena(kArenaBytes, false);
  const bool is_advised = has_flag(arena.data(), "hg");  // unless the kernel has none
  FirstTouch pages(arena.data(), arena.huge_bytes(), UINT64_MAX);
  take_all(pages, 2);
  CHECK(!pages.is_small());
  CHECK_EQ(has_flag(arena.data(), "hg"), is_advised);
}

TEST(first_touch_leaves_the_advice_for_huge_pages_behind) {
  if (!has_call()) return;
  Arena arena(kArenaBytes, false);
  const bool is_advised = has_flag(arena.data(), "hg");
  {
    FirstTouch pages(arena.data(), arena.huge_bytes(), 0);
    take_all(pages, 2);
    CHECK(pages.is_small());
    CHECK(!has_flag(arena.data(), "hg"));
  }
  CHECK_EQ(has_flag(arena.data(), "hg"), is_advised);
}

TEST(memory_that_is_not_there_is_an_error_of_the_first_touch) {
  if (!has_call()) return;
  constexpr std::uint64_t kBytes = 4 << 20;
  const Mapping memory(kBytes, PROT_READ | PROT_WRITE);
  ::munmap(memory.data() + kBytes / 2, kBytes / 2);
  FirstTouch pages(memory.data(), 0);
  CHECK_THROWS(pages.take(kBytes / 2, kBytes), dcpx::ErrorCode::kStorage);
  CHECK_EQ(pages.taken_bytes(), 0U);
}

TEST(memory_that_the_call_cannot_take_is_left_to_whoever_writes_there) {
  const Mapping memory(4096, PROT_READ);  // EINVAL, as of a kernel without the call
  FirstTouch pages(memory.data(), 0);
  CHECK(!pages.take(0, 4096));
  CHECK_EQ(pages.taken_bytes(), 0U);
}

}  // namespace
