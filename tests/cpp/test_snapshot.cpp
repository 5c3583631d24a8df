#include <cstring>
#include <numeric>
#include <random>

#include "check.h"
#include "common/arena.h"
#include "common/stream_copy.h"
#include "engine/snapshot.h"

namespace {

using dcpx::Arena;
using dcpx::ErrorCode;
using dcpx::engine::SnapshotRow;
using Bytes = std::vector<std::byte>;

Bytes random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 source(seed);
  Bytes out(count);
  for (std::byte& value : out) value = static_cast<std::byte>(source());
  return out;
}

SnapshotRow row_of(const std::byte* source, std::uint64_t elem_bytes,
                   std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides) {
  SnapshotRow row;
  row.source = source;
  row.elem_bytes = elem_bytes;
  row.sizes = std::move(sizes);
  row.strides = std::move(strides);
  dcpx::engine::describe(row);
  return row;
}

// The elements in C order, one by one.
Bytes elements_of(const std::byte* source, std::uint64_t elem_bytes,
                  const std::vector<std::int64_t>& sizes,
                  const std::vector<std::int64_t>& strides) {
  Bytes out;
  std::int64_t count = 1;
  for (const std::int64_t size : sizes) count *= size;
  for (std::int64_t i = 0; i < count; ++i) {
    std::int64_t rest = i;
    std::int64_t at = 0;
    for (std::size_t d = sizes.size(); d-- > 0;) {
      at += rest % sizes[d] * strides[d];
      rest /= sizes[d];
    }
    const std::byte* element = source + at * static_cast<std::int64_t>(elem_bytes);
    out.insert(out.end(), element, element + elem_bytes);
  }
  return out;
}

TEST(stream_copy_copies_every_byte_and_no_other_at_any_alignment) {
  const Bytes source = random_bytes(5000, 1);
  for (const std::uint64_t count : {0U, 1U, 63U, 64U, 65U, 127U, 1000U, 4096U}) {
    for (const std::uint64_t shift : {0U, 1U, 31U, 63U}) {
      Bytes target(5200, std::byte{0xee});
      dcpx::stream_copy(target.data() + 64 + shift, source.data() + 7, count);
      CHECK(std::memcmp(target.data() + 64 + shift, source.data() + 7, count) == 0);
      CHECK(target[63 + shift] == std::byte{0xee});
      CHECK(target[64 + shift + count] == std::byte{0xee});
    }
  }
}

TEST(snapshot_of_dense_and_strided_rows_is_what_an_element_wise_copy_gives) {
  const Bytes memory = random_bytes(9 << 20, 2);
  struct Case {
    std::uint64_t elem_bytes;
    std::vector<std::int64_t> sizes;
    std::vector<std::int64_t> strides;
  };
  const std::vector<Case> cases{
      {4, {}, {}},
      {4, {0, 7}, {7, 1}},
      {1, {9 << 20}, {1}},  // cut over all workers
      {4, {300, 500}, {500, 1}},
      {8, {300, 500}, {1, 300}},   // transposed: dense
      {4, {40, 30}, {120, 3}},     // gathered
      {16, {700, 500}, {501, 1}},  // gathered, in several pieces
      {3, {1000, 7}, {9, 1}},
      {2, {50, 7}, {0, 1}},              // expanded
      {4, {5, 1, 4}, {4, 12345678, 1}},  // the stride of one element says nothing
      {4, {2, 3, 4, 5}, {60, 1, 15, 3}},
  };
  std::vector<SnapshotRow> rows;
  for (const Case& c : cases) {
    rows.push_back(row_of(memory.data(), c.elem_bytes, c.sizes, c.strides));
  }
  Arena arena(dcpx::engine::lay_out(rows), false);
  for (const unsigned workers : {1U, 2U, 5U}) {
    std::memset(arena.data(), 0, arena.size_bytes());
    dcpx::engine::take_snapshot(rows, arena.data(), workers, {});
    for (std::size_t i = 0; i < cases.size(); ++i) {
      const SnapshotRow& row = rows[i];
      const Bytes wanted =
          elements_of(memory.data(), cases[i].elem_bytes, cases[i].sizes, cases[i].strides);
      CHECK_EQ(row.nbytes, wanted.size());
      CHECK(elements_of(arena.data() + row.offset, row.elem_bytes, row.sizes, row.strides) ==
            wanted);
    }
  }
}

TEST(layout_puts_large_rows_on_pages_small_ones_on_lines_and_none_over_another) {
  const Bytes memory = random_bytes(1 << 20, 3);
  std::vector<SnapshotRow> rows;
  for (std::int64_t i = 0; i < 200; ++i) {
    rows.push_back(row_of(memory.data() + i, 1, {i % 5 == 0 ? 70'000 + i : 1 + i}, {1}));
  }
  const std::uint64_t total = dcpx::engine::lay_out(rows);
  std::uint64_t end = 0;
  for (const SnapshotRow& row : rows) {
    CHECK(row.offset >= end);
    CHECK_EQ(row.offset % (row.nbytes >= 65536 ? 4096 : 64), 0U);
    end = row.offset + row.nbytes;
  }
  CHECK_EQ(total, end);
}

TEST(dense_rows_that_touch_on_a_device_touch_in_the_arena_in_the_order_of_addresses) {
  const auto at = [](std::uintptr_t address) {
    return reinterpret_cast<const std::byte*>(address);  // nobody follows it
  };
  const auto on = [&](int device, std::uintptr_t address, std::int64_t nbytes) {
    SnapshotRow row = row_of(at(address), 1, {nbytes}, {1});
    row.device = device;
    return row;
  };
  constexpr std::uintptr_t kBase = 0x7000'0000'0000;
  std::vector<SnapshotRow> rows;
  rows.push_back(on(0, kBase + 100, 200'000));     // 0: follows 2
  rows.push_back(on(1, kBase + 200'100, 64));      // 1: another device
  rows.push_back(on(0, kBase + 4, 96));            // 2: begins a run
  rows.push_back(on(0, kBase + 200'100, 5));       // 3: follows 0
  rows.push_back(on(0, kBase + 100, 200'000));     // 4: tied to 0
  rows.push_back(on(0, kBase + 300'017, 70'000));  // 5: a run of its own
  rows.push_back(row_of(at(kBase), 1, {3, 3}, {9, 2}));
  rows.back().device = 0;  // 6: gathered
  const std::uint64_t total = dcpx::engine::lay_out(rows);
  CHECK_EQ(rows[2].offset % 64, 4U);
  CHECK_EQ(rows[0].offset, rows[2].offset + 96);
  CHECK_EQ(rows[3].offset, rows[0].offset + 200'000);
  CHECK_EQ(rows[4].offset, rows[0].offset);
  CHECK_EQ(rows[4].copied_with, 0U);
  CHECK_EQ(rows[5].offset % 4096, (kBase + 300'017) % 4096);
  CHECK_EQ(rows[1].offset % 64, (kBase + 200'100) % 64);
  CHECK(rows[1].offset >= rows[5].offset + 70'000);
  CHECK_EQ(rows[6].offset, 0U);
  CHECK_EQ(total, rows[1].offset + 64);
}

TEST(rows_on_a_device_and_on_the_host_share_no_place_at_one_address) {
  const Bytes memory = random_bytes(4096, 5);
  std::vector<SnapshotRow> rows(2, row_of(memory.data(), 4, {100}, {1}));
  rows[1].device = 0;
  dcpx::engine::lay_out(rows);
  CHECK(rows[0].offset != rows[1].offset);
  CHECK_EQ(rows[1].copied_with, 1U);
}

TEST(arena_begins_on_a_huge_page_and_is_zero_before_it_is_filled) {
  for (const bool is_shared : {false, true}) {
    Arena arena((5 << 20) + 17, is_shared);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(arena.data()) % (2 << 20), 0U);
    CHECK_EQ(arena.size_bytes(), (5U << 20) + 17);
    CHECK_EQ(arena.fd() >= 0, is_shared);
    arena.prefault(3, {});
    for (std::uint64_t i = 0; i < arena.size_bytes(); ++i) CHECK(arena.data()[i] == std::byte{});
    arena.data()[arena.size_bytes() - 1] = std::byte{1};
    CHECK_EQ(arena.written(), 0U);
  }
}

}  // namespace
