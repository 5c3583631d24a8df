// A ReadJob whose caller leaves while four workers read: from then on its memory is the caller's.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/leaving.h"
#include "engine/read_job.h"
#include "job_samples.h"
#include "scratch_dir.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;

std::vector<ReadRegion> regions_of(const Saved& saved, const std::vector<LocatedItem>& located,
                                   std::vector<std::vector<std::byte>>& targets) {
  std::vector<ReadRegion> regions;
  targets.clear();
  for (std::size_t i = 0; i < saved.sources.size(); ++i) {
    targets.emplace_back(saved.sources[i].payload.size(), std::byte{0xA5});
    regions.push_back({saved.wanted[i].file,
                       located[i].payload_offset,
                       {located[i].payload_bytes, {}, {}, {}},
                       targets.back().data(),
                       saved.sources[i].fqn});
  }
  return regions;
}

ReadOptions leaving_options(bool use_direct) {
  ReadOptions options{4, kSegmentBytes, use_direct, true, 0};
  options.may_be_left = true;
  return options;
}

TEST(job_that_may_be_left_reads_everything_through_its_slots) {
  RandomSource random(700);
  const ScratchDir dir;
  const Saved saved = save_random(random, dir, 3, 2, true);
  for (const bool use_direct : {true, false}) {
    ReadJob job(dir.fd(), dir.path(), leaving_options(use_direct));
    const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
    std::vector<std::vector<std::byte>> targets;
    job.read(regions_of(saved, located, targets), {});
    for (std::size_t i = 0; i < targets.size(); ++i) CHECK(targets[i] == saved.sources[i].payload);
    CHECK_EQ(job.report().in_place_bytes, std::uint64_t{0});
    CHECK(job.moved() > 0);
  }
}

TEST(no_byte_reaches_a_target_once_its_caller_has_left) {
  RandomSource random(701);
  const ScratchDir dir;
  const Saved saved = save_random(random, dir, 4, 2, true);
  int left_early = 0;
  for (int round = 0; round < 30; ++round) {
    const ThreadCheck threads_end;
    ReadJob job(dir.fd(), dir.path(), leaving_options(round % 2 == 0));
    const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
    std::vector<std::vector<std::byte>> targets;
    const std::vector<ReadRegion> regions = regions_of(saved, located, targets);
    std::thread reader([&] {
      try {
        job.read(regions, {});
      } catch (const dcpx::Error& error) {
        CHECK(error.code() == ErrorCode::kStorage && error.sys_errno == ECANCELED);
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(random.below(2000)));
    job.leave();
    for (std::size_t i = 0; i < targets.size(); ++i) {
      if (targets[i] == saved.sources[i].payload) continue;
      ++left_early;
      break;
    }
    for (auto& target : targets) std::fill(target.begin(), target.end(), std::byte{0x5A});
    reader.join();
    for (const auto& target : targets)
      CHECK(target == std::vector<std::byte>(target.size(), std::byte{0x5A}));
    job.close();
    CHECK(threads_end.holds());
  }
  CHECK(left_early > 0);
}

TEST(who_stays_again_and_again_does_not_keep_the_caller) {
  constexpr int kStays = 200;
  Leaving leaving(true);
  std::atomic<int> begun{0};
  std::vector<std::thread> workers;
  for (int i = 0; i < 8; ++i) {
    workers.emplace_back([&] {
      for (int stay = 0; stay < kStays; ++stay) {
        const auto staying = leaving.stay();
        if (leaving.has_left()) return;
        begun.fetch_add(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // copies
      }
    });
  }
  while (begun.load() < 8) std::this_thread::yield();
  leaving.leave();
  const int copies = begun.load();
  for (auto& worker : workers) worker.join();
  CHECK_EQ(copies, begun.load());
  CHECK(copies < 8 * kStays / 2);
}

TEST(what_is_left_before_it_began_ends_with_the_first_poll) {
  RandomSource random(702);
  const ScratchDir dir;
  const Saved saved = save_random(random, dir, 2, 1, true);
  ReadOptions options = leaving_options(false);
  options.workers = 1;
  ReadJob job(dir.fd(), dir.path(), options);
  job.leave();
  const dcpx::PollFunction none;
  Leaving leaving(true);
  leaving.leave();
  CHECK(leaving.has_left());
  CHECK_THROWS(leaving.poll_with(none, "x")(), ErrorCode::kStorage);
  Leaving impossible(false);
  CHECK(!impossible.poll_with(none, "x"));
  CHECK_THROWS(impossible.leave(), ErrorCode::kPlan);
}

}  // namespace
