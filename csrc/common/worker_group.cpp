#include "common/worker_group.h"

#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace dcpx {
namespace {

constexpr std::chrono::milliseconds kPollInterval(100);
thread_local unsigned worker_number = 0;

}  // namespace

unsigned current_worker() noexcept { return worker_number; }

void StopFlag::poll_inline(const PollFunction& poll) {
  if (!poll) return;
  inline_poll_ = &poll;
  next_poll_ = std::chrono::steady_clock::now() + kPollInterval;
}

void StopFlag::poll_sometimes() const {
  const auto now = std::chrono::steady_clock::now();
  if (now < next_poll_) return;
  (*inline_poll_)();
  next_poll_ = std::chrono::steady_clock::now() + kPollInterval;
}

void run_workers(unsigned count, const WorkFunction& work, const PollFunction& poll) {
  StopFlag stop;
  if (count == 1) {  // a few bytes are read in less time than a thread takes to start
    stop.poll_inline(poll);
    work(0, stop);
    return;
  }
  std::mutex mutex;
  std::condition_variable ended;
  unsigned running = 0;
  std::exception_ptr first_error;

  const auto keep_first = [&](std::exception_ptr error) {
    if (!first_error) first_error = std::move(error);
    stop.set();
  };
  const auto run = [&](unsigned worker) {
    std::exception_ptr error;
    worker_number = worker;
    try {
      work(worker, stop);
    } catch (...) {  // carried to the waiting thread, which throws it again
      error = std::current_exception();
    }
    const std::lock_guard lock(mutex);
    if (error) keep_first(std::move(error));
    --running;
    ended.notify_all();
  };

  std::vector<std::thread> threads;
  threads.reserve(count);
  for (unsigned worker = 0; worker < count; ++worker) {
    {
      const std::lock_guard lock(mutex);
      ++running;
    }
    try {
      threads.emplace_back(run, worker);
    } catch (const std::exception&) {  // no thread or memory for one: those that run do the work
      {
        const std::lock_guard lock(mutex);
        --running;
      }
      if (threads.empty()) {
        stop.poll_inline(poll);
        work(worker, stop);
        return;
      }
      break;
    }
  }

  std::unique_lock lock(mutex);
  bool is_polling = static_cast<bool>(poll);
  while (running > 0) {
    if (ended.wait_for(lock, kPollInterval, [&] { return running == 0; })) break;
    lock.unlock();
    std::exception_ptr error;
    try {
      if (is_polling) poll();
    } catch (...) {  // thrown again below, once no worker touches the caller's memory any more
      error = std::current_exception();
      is_polling = false;
    }
    lock.lock();
    if (error) keep_first(std::move(error));
  }
  lock.unlock();
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace dcpx
