#include <cstring>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "common/arena.h"
#include "engine/snapshot.h"
#include "scratch_dir.h"

namespace {

using dcpx::Arena;
using dcpx::FirstTouch;
using dcpx::engine::SnapshotRow;

std::vector<SnapshotRow> rows_over(const std::vector<std::byte>& memory, std::int64_t small) {
  std::vector<SnapshotRow> rows;
  SnapshotRow large;
  large.source = memory.data();
  large.sizes = {static_cast<std::int64_t>(memory.size())};
  large.strides = {1};
  rows.push_back(large);
  for (std::int64_t i = 0; i < small; ++i) {
    SnapshotRow row;
    row.source = memory.data() + i;
    row.sizes = {100, 5};
    row.strides = {7, 1};
    rows.push_back(row);
  }
  for (SnapshotRow& row : rows) dcpx::engine::describe(row);
  return rows;
}

TEST(workers_of_one_snapshot_share_the_rows_without_a_race) {
  const ThreadCheck threads_end;
  const std::vector<std::byte> memory(20 << 20, std::byte{3});
  std::vector<SnapshotRow> rows = rows_over(memory, 3000);
  Arena arena(dcpx::engine::lay_out(rows), false);
  FirstTouch pages(arena.data(), arena.huge_bytes(), 0);  // small from the first 8 MiB on
  dcpx::engine::take_snapshot(rows, arena.data(), 4, {}, nullptr, &pages);
  for (const SnapshotRow& row : rows) {
    CHECK(arena.data()[row.offset] == std::byte{3});
    CHECK(arena.data()[row.offset + row.nbytes - 1] == std::byte{3});
  }
  CHECK(threads_end.holds());
}

TEST(interrupted_snapshot_throws_what_poll_threw_and_leaves_no_thread) {
  const ThreadCheck threads_end;
  const std::vector<std::byte> memory(1 << 20, std::byte{3});
  std::vector<SnapshotRow> rows = rows_over(memory, 0);
  rows.resize(400'000, rows[0]);  // all to one place, by one worker: for minutes, if nobody asks
  for (std::size_t i = 0; i < rows.size(); ++i) rows[i].copied_with = i;
  Arena arena(memory.size(), false);
  FirstTouch pages(arena.data(), arena.huge_bytes());
  bool has_thrown = false;
  try {
    dcpx::engine::take_snapshot(
        rows, arena.data(), 1, [] { throw std::runtime_error("interrupted"); }, nullptr, &pages);
  } catch (const std::runtime_error&) {
    has_thrown = true;
  }
  CHECK(has_thrown);
  CHECK(threads_end.holds());
}

TEST(lending_and_giving_back_on_many_threads_counts_right) {
  Arena arena(4096, true);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        arena.lend();
        arena.add_written();
        arena.give_back();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(arena.lent(), 0U);
  CHECK_EQ(arena.written(), 4000U);
}

}  // namespace
