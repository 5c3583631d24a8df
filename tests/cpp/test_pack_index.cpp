// The pack kernel's index arithmetic against brute force, lane by lane as a warp runs it.
#include <cstring>

#include "check.h"
#include "device/pack_kernel.h"
#include "region_samples.h"

namespace {

using dcpx::device::Box;
using dcpx::device::Direction;
using dcpx::device::kPackLanes;
using dcpx::device::kPackNoShape;
using dcpx::device::PackShape;
using dcpx::device::PackTask;

// What all lanes of the tasks move, byte by byte; fails where a move is not aligned.
BytePairs moved_by(const std::vector<PackTask>& tasks, const PackShape* shapes) {
  BytePairs pairs;
  for (const PackTask& task : tasks) {
    for (std::uint32_t lane = 0; lane < kPackLanes; ++lane) {
      dcpx::device::pack_lane(task, shapes, lane, kPackLanes,
                              [&](std::uint64_t dst, std::uint64_t src, std::uint32_t nbytes) {
                                CHECK(dst % nbytes == 0 && src % nbytes == 0);
                                for (std::uint32_t b = 0; b < nbytes; ++b)
                                  pairs.emplace_back(dst + b, src + b);
                              });
    }
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

// [0, units) in tasks of random length.
std::vector<PackTask> cut(const PackTask& whole, std::uint64_t units, RandomSource& random) {
  std::vector<PackTask> tasks;
  for (std::uint64_t at = 0; at < units;) {
    PackTask task = whole;
    task.begin = at;
    at = task.end = std::min(units, at + random.between(1, units));
    tasks.push_back(task);
  }
  return tasks;
}

TEST(lanes_of_runs_move_each_byte_once_at_any_alignment) {
  RandomSource random(1);
  for (int round = 0; round < 2000; ++round) {
    const std::uint64_t dst = 4096 + random.below(64);
    const std::uint64_t src = random.chance(2) ? dst + 16 * random.below(9) : random.below(64);
    const std::uint64_t nbytes = random.between(1, random.chance(2) ? 40 : 3000);
    BytePairs wanted;
    for (std::uint64_t b = 0; b < nbytes; ++b) wanted.emplace_back(dst + b, src + b);
    const auto tasks = cut({dst, src, 0, 0, kPackNoShape, 0}, nbytes, random);
    CHECK(moved_by(tasks, nullptr) == wanted);
  }
}

TEST(runs_of_like_alignment_move_in_words_of_16_bytes) {
  const dcpx::device::PackRun run = dcpx::device::pack_run(4096 + 5, 64 + 5, 1000);
  CHECK_EQ(run.grain, 16U);
  CHECK_EQ(run.head, 11U);
  CHECK_EQ(run.body, (1000U - 11) / 16);
  CHECK_EQ(dcpx::device::pack_run(4096, 2, 8).grain, 2U);
  CHECK_EQ(dcpx::device::pack_run(4096 + 1, 0, 8).grain, 1U);
}

TEST(lanes_of_boxes_move_each_element_once_as_the_region_says) {
  RandomSource random(2);
  int strided = 0;
  for (int round = 0; round < 2000; ++round) {
    Box box;
    box.region = dcpx::plan::simplify(random_region(random));
    box.dst = 1 << 20 | random.below(32);
    box.src = 1 << 24 | random.below(32);
    BytePairs wanted;
    append_pairs(box.region, box.src, box.dst, wanted);
    std::sort(wanted.begin(), wanted.end());
    if (box.region.dims() > 1) ++strided;
    const PackShape shape = dcpx::device::pack_shape(box);
    CHECK(moved_by(cut({box.dst, box.src, 0, 0, 0, 0}, wanted.size() / shape.grain_bytes, random),
                   &shape) == wanted);
  }
  CHECK(strided > 500);
}

TEST(boxes_of_aligned_rows_move_in_words_of_16_bytes) {
  Box box;
  box.region = {64, {10, 10}, {4096, 256}, {640, 64}};
  CHECK_EQ(dcpx::device::pack_shape(box).grain_bytes, 16U);
  box.src = 8;
  CHECK_EQ(dcpx::device::pack_shape(box).grain_bytes, 8U);
  CHECK_EQ(dcpx::device::pack_shape(box).grains_per_run, 8U);
}

}  // namespace
