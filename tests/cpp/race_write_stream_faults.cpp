// A streamed save that is given up: whoever waits for slots, pieces or sizes ends, with the error
// that says so, and what was taken stays readable as long as it is held.
#include <future>
#include <numeric>

#include "check.h"
#include "engine/write_job.h"
#include "scratch_dir.h"
#include "stream_samples.h"
#include "upload_samples.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;

Calls large_calls(RandomSource& random, std::uint32_t files, int items) {
  Calls calls;
  for (std::uint32_t f = 0; f < files; ++f) {
    for (int i = 0; i < items; ++i) {
      calls.sources.push_back(plain_source(random, f, 900'000, calls.sources.size()));
      calls.is_lasting.push_back(random.chance(2));
    }
  }
  calls.ends = {calls.sources.size()};
  return calls;
}

template <typename Work>
bool is_canceled(const Work& work) {
  try {
    work();
  } catch (const dcpx::Error& error) {
    return error.code() == ErrorCode::kStorage && error.sys_errno == ECANCELED;
  } catch (const std::exception&) {  // of Progress: nothing has ended it
  }
  return false;
}

struct StoreRefused : std::exception {};

// No file is whole and far more than the budget is left when the store refuses: nobody is done.
TEST(refused_upload_ends_all_workers_and_uploaders) {
  const ThreadCheck threads_end;
  for (std::uint64_t round = 0; round < 12; ++round) {
    RandomSource random(460 + round);
    const Shape shape{4, random.pick<unsigned>({1, 2, 4}), InPlace::kAuto};
    Calls calls = large_calls(random, shape.files, 4);
    WriteJob job(-1, "s3://bucket", options_of(budget_of(kLeastBytes), shape, true));
    add_files(job, shape.files);
    std::atomic<std::uint64_t> taken{0};
    std::atomic<unsigned> refused{0};
    const std::uint64_t last = random.between(1, 8);
    UploadOptions options = random_uploads(random);
    options.part_bytes = budget_of(kLeastBytes).part_bytes;
    options.on_piece = [&, queue = job.queue()] {
      if (taken.fetch_add(1) + 1 < last) return;
      ++refused;
      queue->fail();
      throw StoreRefused();
    };
    Uploads uploads(job.queue(), shape.files, options, round);
    Saved saved;
    CHECK(is_canceled([&] { write_all(job, calls, uploads.progress.poll(), saved, false); }));
    uploads.join();
    CHECK_EQ(uploads.given_up() + refused.load(), options.threads);
    bool is_told = false;
    try {
      uploads.throw_first_error();
    } catch (const StoreRefused&) {
      is_told = true;
    }
    CHECK(is_told);
    CHECK(is_canceled([&] { job.queue()->check(); }));
  }
  CHECK(threads_end.holds());
}

TEST(failed_queue_ends_workers_without_slots_and_uploaders_without_pieces) {
  const ThreadCheck threads_end;
  for (const unsigned workers : {1U, 4U}) {
    RandomSource random(480);
    Calls calls = large_calls(random, 3, 4);
    WriteJob job(-1, "s3://bucket", options_of(budget_of(kLeastBytes), {3, workers}, true));
    add_files(job, 3);
    const std::shared_ptr<UploadQueue> queue = job.queue();
    Progress progress;
    std::atomic<bool> is_waiting{false};
    std::vector<UploadPiece> held;
    const auto start = [](auto work) { return std::async(std::launch::async, std::move(work)); };
    auto keeper = start([&] {
      return is_canceled([&] {
        while (auto piece = queue->next(0, progress.poll())) held.push_back(std::move(*piece));
      });
    });
    auto waiter =
        start([&] { return is_canceled([&] { return queue->size_of(2, progress.poll()); }); });
    auto stopper = start([&] {
      while (!is_waiting.load()) progress.check();
      queue->fail();
    });
    Saved saved;
    CHECK(is_canceled([&] {
      write_all(
          job, calls,
          [&] {
            progress.check();
            is_waiting = true;
          },
          saved, false);
    }));
    stopper.get();
    CHECK(keeper.get());
    CHECK(waiter.get());
    CHECK(!held.empty());
  }
  CHECK(threads_end.holds());
}

struct Interrupted : std::exception {};

// Nobody takes what is filled, or somebody does no more, until the caller of write() is told.
TEST(interrupted_write_ends_and_what_was_taken_stays_readable) {
  const ThreadCheck threads_end;
  for (const unsigned workers : {1U, 4U}) {
    RandomSource random(490);
    Calls calls = large_calls(random, 2, 4);
    std::vector<UploadPiece> held;
    std::shared_ptr<UploadQueue> queue;
    {
      WriteJob job(-1, "s3://bucket", options_of(budget_of(kLeastBytes), {2, workers}, true));
      add_files(job, 2);
      queue = job.queue();
      Progress progress;
      auto uploader = std::async(std::launch::async, [&] {
        for (int n = 0; n < 2; ++n) held.push_back(std::move(*queue->next(0, progress.poll())));
      });
      bool is_interrupted = false;
      int polls = 0;
      Saved saved;
      try {
        write_all(
            job, calls,
            [&] {
              progress.check();
              if (++polls == 2) throw Interrupted();
            },
            saved, false);
      } catch (const Interrupted&) {
        is_interrupted = true;
      }
      uploader.get();
      CHECK(is_interrupted);
      job.abandon();
      CHECK(is_canceled([&] { queue->next(0, progress.poll()); }));
    }
    std::uint64_t sum = 0;
    for (const UploadPiece& piece : held) {
      sum = std::accumulate(piece.data, piece.data + piece.nbytes, sum,
                            [](std::uint64_t a, std::byte b) { return a + std::uint64_t(b); });
      queue->let_go(piece);
    }
    CHECK(sum > 0);
  }
  CHECK(threads_end.holds());
}

}  // namespace
