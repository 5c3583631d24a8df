#include <pthread.h>

#include <chrono>
#include <future>
#include <mutex>
#include <set>
#include <thread>

#include "check.h"
#include "common/worker_group.h"
#include "scratch_dir.h"

namespace {

using dcpx::run_workers;
using dcpx::StopFlag;

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// What run_workers threw, or "".
std::string failure_of(unsigned count, const dcpx::WorkFunction& work,
                       const dcpx::PollFunction& poll = {}) {
  try {
    run_workers(count, work, poll);
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

// Waits for the flag without a sleep of its own: the group or the test's limit ends it.
void wait_for(const StopFlag& stop) {
  while (!stop.is_set()) std::this_thread::yield();
}

TEST(first_error_wins_and_stops_the_others) {
  const ThreadCheck threads_end;
  for (unsigned first = 0; first < 4; ++first) {
    std::atomic<int> stopped{0};
    const std::string what = failure_of(4, [&](unsigned worker, StopFlag& stop) {
      if (worker == first) throw Failure("first");
      wait_for(stop);  // set by the first error, so whatever follows is not the first
      ++stopped;
      throw Failure("late");
    });
    CHECK_EQ(what, "first");
    CHECK_EQ(stopped.load(), 3);
    CHECK(threads_end.holds());
  }
}

TEST(many_errors_at_once_bring_exactly_one_of_them) {
  for (int round = 0; round < 50; ++round) {
    std::atomic<int> ended{0};
    const std::string what = failure_of(6, [&](unsigned worker, StopFlag&) {
      ++ended;
      throw Failure(std::to_string(worker));
    });
    CHECK(what.size() == 1 && what[0] >= '0' && what[0] <= '5');
    CHECK_EQ(ended.load(), 6);
  }
}

TEST(error_of_poll_stops_the_workers_and_is_thrown_after_they_ended) {
  const ThreadCheck threads_end;
  const auto caller = std::this_thread::get_id();
  std::atomic<int> ended{0};
  const std::string what = failure_of(
      3,
      [&](unsigned, StopFlag& stop) {
        wait_for(stop);
        ++ended;
      },
      [&] {
        CHECK(std::this_thread::get_id() == caller);
        throw Failure("interrupted");
      });
  CHECK_EQ(what, "interrupted");
  CHECK_EQ(ended.load(), 3);
  CHECK(threads_end.holds());
}

TEST(error_of_a_worker_is_not_replaced_by_one_of_poll) {
  std::atomic<int> polls{0};
  const std::string what = failure_of(
      2,
      [&](unsigned worker, StopFlag& stop) {
        if (worker == 0) throw Failure("worker");
        wait_for(stop);
        while (polls.load() == 0) std::this_thread::yield();
      },
      [&] {
        ++polls;
        throw Failure("poll");
      });
  CHECK_EQ(what, "worker");
}

TEST(poll_that_threw_is_not_called_again) {
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::milliseconds(400);
  std::atomic<int> polls{0};
  const std::string what = failure_of(
      2,
      [&](unsigned, StopFlag&) {
        while (polls.load() < 2 && std::chrono::steady_clock::now() < give_up) {
          std::this_thread::yield();
        }
      },
      [&] {
        ++polls;
        throw Failure("interrupted");
      });
  CHECK_EQ(what, "interrupted");
  CHECK_EQ(polls.load(), 1);
}

TEST(one_worker_is_the_caller_and_polls) {
  const ThreadCheck threads_end;
  const auto caller = std::this_thread::get_id();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  const std::string what = failure_of(
      1,
      [&](unsigned worker, StopFlag& stop) {
        CHECK_EQ(worker, 0U);
        CHECK(std::this_thread::get_id() == caller);
        while (!stop.is_set() && std::chrono::steady_clock::now() < give_up) {
        }
      },
      [] { throw Failure("interrupted"); });
  CHECK_EQ(what, "interrupted");
  CHECK_EQ(failure_of(1, [](unsigned, StopFlag&) { throw Failure("worker"); }), "worker");
  CHECK(threads_end.holds());
}

// While it lives, no thread can be made: none gets a stack of that size.
class NoThreads {
 public:
  NoThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 47);
    pthread_setattr_default_np(&huge);
    pthread_attr_destroy(&huge);
  }
  NoThreads(const NoThreads&) = delete;
  ~NoThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }

 private:
  pthread_attr_t before_{};
};

TEST(without_threads_the_caller_works_and_polls) {
  const NoThreads no_threads;
  const auto caller = std::this_thread::get_id();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  int runs = 0;
  const std::string what = failure_of(
      4,
      [&](unsigned worker, StopFlag& stop) {
        CHECK_EQ(worker, 0U);
        CHECK(std::this_thread::get_id() == caller);
        ++runs;
        while (!stop.is_set() && std::chrono::steady_clock::now() < give_up) {
        }
      },
      [] { throw Failure("interrupted"); });
  CHECK_EQ(what, "interrupted");
  CHECK_EQ(runs, 1);
}

TEST(writes_of_workers_are_seen_after_the_call) {
  std::vector<int> squares(64, 0);
  std::atomic<std::size_t> next{0};
  run_workers(4,
              [&](unsigned, StopFlag&) {
                for (std::size_t i = next.fetch_add(1); i < squares.size(); i = next.fetch_add(1)) {
                  squares[i] = static_cast<int>(i * i);
                }
              },
              {});
  for (std::size_t i = 0; i < squares.size(); ++i) CHECK_EQ(squares[i], static_cast<int>(i * i));
}

}  // namespace
