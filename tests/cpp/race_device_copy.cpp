// CopyStream against the fake driver: the right bytes, in order behind the caller's streams, in the
// number of calls that was promised.
#include <thread>

#include "device_samples.h"
#include "region_samples.h"

namespace {

using dcpx::StopFlag;
using dcpx::device::CopyStream;
using dcpx::device::CopyStreams;
using dcpx::device::Count;
using dcpx::device::Direction;
using dcpx::device::SourceEvents;

constexpr std::uint64_t kKiB = 1 << 10;
const StopFlag kGoOn;

// One side of random copies: where each begins, with room between some.
struct Places {
  std::vector<std::uint64_t> dst;
  std::vector<std::uint64_t> src;
  std::vector<std::uint64_t> nbytes;
  std::uint64_t dst_end = 0;
  std::uint64_t src_end = 0;
};

Places random_places(RandomSource& random) {
  Places places;
  const std::uint64_t count = random.between(1, 60);
  for (std::uint64_t i = 0; i < count; ++i) {
    places.dst.push_back(places.dst_end);
    places.src.push_back(places.src_end);
    const std::uint64_t most = random.chance(3) ? 80 * kKiB : 2 * kKiB;
    places.nbytes.push_back(random.between(1, most));
    places.dst_end += places.nbytes.back() + (random.chance(3) ? random.below(100) : 0);
    places.src_end += places.nbytes.back() + (random.chance(3) ? random.below(100) : 0);
  }
  return places;
}

std::vector<std::byte> expected(const BytePairs& pairs, const std::vector<std::byte>& src,
                                std::uint64_t dst_bytes) {
  std::vector<std::byte> out(dst_bytes);
  for (const auto& [to, from] : pairs) out[to] = src[from];
  return out;
}

// Copies random pieces and boxes from one memory to another in one direction, behind a write that
// the caller's stream has queued, and compares every byte.
void copy_at_random(std::uint64_t seed, int device) {
  RandomSource random(seed);
  const Places places = random_places(random);
  BytePairs pairs;
  std::vector<std::pair<dcpx::plan::Region, std::pair<std::uint64_t, std::uint64_t>>> boxes;
  std::uint64_t dst_end = places.dst_end;
  std::uint64_t src_end = places.src_end;
  for (std::size_t i = 0; i < places.nbytes.size(); ++i)
    append_pairs({places.nbytes[i], {}, {}, {}}, places.src[i], places.dst[i], pairs);
  for (std::uint64_t i = random.below(12); i > 0; --i) {
    dcpx::plan::Region region = random_region(random, true);
    dst_end += random.below(16);
    src_end += random.below(16);
    boxes.push_back({region, {dst_end, src_end}});
    append_pairs(region, src_end, dst_end, pairs);
    dst_end += dcpx::plan::dst_span_bytes(region);
    src_end += dcpx::plan::src_span_bytes(region);
  }
  const bool is_to_host = random.chance(2);
  const auto direction = is_to_host ? Direction::kToHost : Direction::kToDevice;
  const std::vector<std::byte> bytes = random.bytes(src_end);
  HostMemory host(is_to_host ? dst_end : src_end, !random.chance(3), device);
  const DeviceMemory memory(device, is_to_host ? src_end : dst_end);
  const std::uint64_t stream = random.chance(3) ? 0 : fake_make_stream(device, random.chance(2));
  if (is_to_host) {
    CHECK_EQ(fake_stream_write(device, stream, memory.address(), bytes.data(), bytes.size()), 0);
  } else {
    std::copy(bytes.begin(), bytes.end(), host.data());
    const std::vector<std::byte> zeros(dst_end);  // what the load must not be overwritten by
    CHECK_EQ(fake_stream_write(device, stream, memory.address(), zeros.data(), dst_end), 0);
  }
  const std::uint64_t dst = is_to_host ? host.address() : memory.address();
  const std::uint64_t src = is_to_host ? memory.address() : host.address();
  {
    const SourceEvents after({{device, stream}});
    CopyStream copies(device, &after);
    std::size_t next_box = 0;
    for (std::size_t i = 0; i < places.nbytes.size(); ++i) {
      copies.copy(direction, dst + places.dst[i], src + places.src[i], places.nbytes[i]);
      if (random.chance(20)) copies.submit();
      if (next_box < boxes.size() && random.chance(8)) {
        const auto& [region, at] = boxes[next_box++];
        copies.copy_region(direction, region, dst + at.first, src + at.second);
      }
    }
    for (; next_box < boxes.size(); ++next_box) {
      const auto& [region, at] = boxes[next_box];
      copies.copy_region(direction, region, dst + at.first, src + at.second);
    }
    copies.finish(kGoOn, "random copies");
  }
  std::vector<std::byte> found = is_to_host ? host.read() : memory.read();
  found.resize(dst_end);
  CHECK(found == expected(pairs, bytes, dst_end));
}

TEST(random_copies_move_exactly_their_bytes_behind_the_callers_work) {
  constexpr int kVersions[] = {12040, 12080, 13000};
  for (std::uint64_t seed = 0; seed < seed_count(45); ++seed) {
    FakeDriver driver(seed, kVersions[seed % 3]);
    fake_refuse_fatbin(seed % 5 == 4);
    copy_at_random(seed, static_cast<int>(seed % 2));
    driver.check_clean();
  }
}

TEST(threads_with_own_streams_copy_beside_each_other) {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    FakeDriver driver(seed);
    std::vector<std::thread> threads;
    std::vector<std::string> errors(4);
    for (unsigned i = 0; i < errors.size(); ++i) {
      threads.emplace_back([&, i] {
        try {
          for (std::uint64_t round = 0; round < 3; ++round)
            copy_at_random(1000 + 100 * seed + 10 * round + i, static_cast<int>(i % 2));
          CHECK_EQ(fake_context_depth(), 0);
        } catch (const std::exception& error) {
          errors[i] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) CHECK_EQ(error, std::string());
    driver.check_clean();
  }
}

// ---- Numbers of calls ---------------------------------------------------------------------------

TEST(a_merged_run_is_one_copy) {
  FakeDriver driver(1);
  HostMemory host(1000 * kKiB, true);
  const DeviceMemory memory(0, 1000 * kKiB);
  CopyStream copies(0, nullptr);
  fake_clear_counts();
  for (std::uint64_t i = 0; i < 1000; ++i)
    copies.copy(Direction::kToHost, host.address() + i * kKiB, memory.address() + i * kKiB, kKiB);
  copies.finish(kGoOn, "a run");
  CHECK_EQ(fake_count("cuMemcpyDtoHAsync"), 1);
  CHECK_EQ(fake_count("cuLaunchKernel") + fake_count("cuMemcpyBatchAsync_v2"), 0);
  CHECK_EQ(fake_count("cuEventRecord"), 1);
  CHECK_EQ(counted(Count::kCopies1d), 1U);
  CHECK_EQ(counted(Count::kBytesToHost), 1000 * kKiB);
}

TEST(allocations_that_touch_are_copied_apart) {
  FakeDriver driver(2);
  HostMemory host(128 * kKiB, true);
  const DeviceMemory first(0, 64 * kKiB);
  const DeviceMemory second(0, 64 * kKiB, true);
  CHECK_EQ(second.address(), first.address() + 64 * kKiB);
  {
    CopyStream copies(0, nullptr);
    copies.copy(Direction::kToHost, host.address(), first.address(), 64 * kKiB);
    copies.copy(Direction::kToHost, host.address() + 64 * kKiB, second.address(), 64 * kKiB);
    copies.finish(kGoOn, "two allocations");
  }
  CHECK_EQ(counted(Count::kBatches), 1U);
  CHECK_EQ(counted(Count::kBatchPieces), 2U);
  CHECK_EQ(FakeDriver::text(fake_reports), std::string());
}

// 1000 pieces with gaps between them, in one finish().
void copy_many(std::uint64_t piece_bytes) {
  HostMemory host(2000 * piece_bytes, true);
  const DeviceMemory memory(0, 1000 * piece_bytes);
  CopyStream copies(0, nullptr);
  dcpx::device::clear_counters();
  for (std::uint64_t i = 0; i < 1000; ++i)
    copies.copy(Direction::kToDevice, memory.address() + i * piece_bytes,
                host.address() + 2 * i * piece_bytes, piece_bytes);
  copies.finish(kGoOn, "many pieces");
  CHECK_EQ(counted(Count::kBytesToDevice), 1000 * piece_bytes);
}

struct Calls {
  int version;
  bool has_kernel;
  std::uint64_t piece_bytes;
  Count count;           // of the calls that copy the pieces
  std::uint64_t number;  // of them
};

TEST(pieces_take_the_fewest_calls_that_their_size_and_the_driver_allow) {
  for (const Calls& one : {Calls{13000, true, 512, Count::kKernels, 1},
                           {12080, false, 512, Count::kBatches, 1},
                           {13000, false, 512, Count::kBatches, 1},
                           {12040, false, 512, Count::kCopies1d, 1000},
                           {13000, true, 40 * kKiB, Count::kBatches, 1}}) {
    FakeDriver driver(3, one.version);
    fake_refuse_fatbin(one.has_kernel ? 0 : 1);
    copy_many(one.piece_bytes);
    for (const Count count : {Count::kKernels, Count::kBatches, Count::kCopies1d})
      CHECK_EQ(counted(count), count == one.count ? one.number : 0U);
    CHECK_EQ(counted(Count::kKernelPieces) + counted(Count::kBatchPieces),
             one.number == 1 ? 1000U : 0U);
    const bool is_refused = dcpx::device::pack_refusal().find("cuModuleLoadData") == 0;
    CHECK(is_refused == !one.has_kernel || one.piece_bytes > 512);
  }
}

TEST(pieces_for_more_than_one_table_take_as_many_kernels_as_tables) {
  FakeDriver driver(4);
  HostMemory host(2 << 20, true);
  const DeviceMemory memory(0, 1 << 20);
  {
    CopyStream copies(0, nullptr);
    for (std::uint64_t i = 0; i < 20000; ++i)
      copies.copy(Direction::kToHost, host.address() + i * 48, memory.address() + i * 40, 40);
    copies.finish(kGoOn, "more pieces than the table has room for");
  }
  CHECK_EQ(counted(Count::kKernels), 2U);
  CHECK_EQ(counted(Count::kKernelPieces), 20000U);
  CHECK_EQ(counted(Count::kCopies1d) + counted(Count::kBatches), 0U);
}

TEST(a_device_that_refuses_batches_takes_single_copies_from_then_on) {
  FakeDriver driver(8);
  fake_fail("cuMemcpyBatchAsync_v2", 1, 801, 0);
  copy_many(40 * kKiB);
  copy_many(40 * kKiB);
  CHECK_EQ(counted(Count::kCopies1d), 1000U);
  CHECK_EQ(fake_count("cuMemcpyBatchAsync_v2"), 1);
}

TEST(narrow_rows_take_the_kernel_and_wide_ones_or_those_without_it_one_2d_copy) {
  for (const auto& [may_use_kernel, columns] :
       {std::pair(true, 16UL), {false, 16UL}, {true, 2048UL}}) {
    FakeDriver driver(10);
    fake_refuse_fatbin(may_use_kernel ? 0 : 1);
    const bool has_kernel = may_use_kernel && columns == 16;
    const std::uint64_t row_bytes = 4 * columns;
    HostMemory host(100 * row_bytes, true);
    const DeviceMemory memory(0, 400 * row_bytes);
    CopyStream copies(0, nullptr);
    const dcpx::plan::Region shard{4, {100, columns}, {4 * row_bytes, 4}, {row_bytes, 4}};
    copies.copy_region(Direction::kToHost, shard, host.address(), memory.address());
    copies.finish(kGoOn, "a shard");
    CHECK_EQ(counted(Count::kKernels), has_kernel ? 1U : 0U);
    CHECK_EQ(counted(Count::kCopies2d), has_kernel ? 0U : 1U);
    CHECK_EQ(counted(Count::kCopies1d) + counted(Count::kBatches), 0U);
  }
}

TEST(a_stream_without_copies_waits_for_nothing) {
  FakeDriver driver(11);
  CopyStreams streams(nullptr);
  CHECK(streams.empty());
  streams.finish_all(kGoOn, "nothing");
  CopyStream& copies = streams.on(1);
  fake_clear_counts();
  CHECK(copies.is_done());
  streams.finish_all(kGoOn, "nothing");
  CHECK_EQ(fake_count("cuEventRecord") + fake_count("cuEventQuery"), 0);
}

// ---- Order --------------------------------------------------------------------------------------

TEST(the_callers_stream_goes_on_behind_copies_that_hold_it_back) {
  for (std::uint64_t seed = 0; seed < seed_count(20); ++seed) {
    FakeDriver driver(seed);
    RandomSource random(seed);
    const std::vector<std::byte> bytes = random.bytes(100 * kKiB);
    HostMemory host(bytes.size(), true);
    std::copy(bytes.begin(), bytes.end(), host.data());
    const DeviceMemory memory(0, bytes.size());
    const std::uint64_t stream = fake_make_stream(0, 1);
    std::vector<std::byte> seen(bytes.size());
    {
      CopyStream copies(0, nullptr);
      copies.copy(Direction::kToDevice, memory.address(), host.address(), bytes.size());
      copies.submit();
      copies.hold_back(reinterpret_cast<dcpx::device::Stream>(stream));
      CHECK_EQ(fake_stream_read(0, stream, memory.address(), seen.data(), seen.size()), 0);
      fake_stream_sync(0, stream);
      CHECK(seen == bytes);
      copies.finish(kGoOn, "copies that hold back a stream");
    }
    CHECK_EQ(FakeDriver::text(fake_reports), std::string());
  }
}

TEST(a_stream_that_is_dropped_waits_for_what_it_has_queued) {
  for (std::uint64_t seed = 0; seed < seed_count(20); ++seed) {
    FakeDriver driver(seed);
    HostMemory host(64 * kKiB, true);
    const DeviceMemory memory(0, std::vector<std::byte>(64 * kKiB, std::byte{7}));
    {
      CopyStream copies(0, nullptr);
      copies.copy(Direction::kToHost, host.address(), memory.address(), 64 * kKiB);
      copies.submit();
    }
    CHECK(host.read() == memory.read());
  }
}

}  // namespace
