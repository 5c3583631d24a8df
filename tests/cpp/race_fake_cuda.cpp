// The fake CUDA driver itself, from several threads: what is ordered by events is no race.
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_cuda.h"

extern "C" {
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void**, int);
int cuCtxPushCurrent_v2(void*);
int cuCtxPopCurrent_v2(void**);
int cuStreamCreateWithPriority(void**, unsigned, int);
int cuStreamDestroy_v2(void*);
int cuStreamWaitEvent(void*, void*, unsigned);
int cuEventCreate(void**, unsigned);
int cuEventDestroy_v2(void*);
int cuEventRecord(void*, void*);
int cuEventSynchronize(void*);
int cuEventQuery(void*);
int cuMemHostRegister_v2(void*, std::size_t, unsigned);
int cuMemHostUnregister(void*);
int cuMemcpyDtoHAsync_v2(void*, unsigned long long, std::size_t, void*);
}

namespace {

constexpr std::size_t kBytes = 1 << 20;

std::string reports() {
  std::string text(fake_reports(nullptr, 0), '\0');
  fake_reports(text.data(), text.size());
  return text.c_str();
}

// One worker: its own stream and pinned memory, its copies behind the caller's event.
void copy_often(std::uint64_t source, void* context, void* caller_event, std::byte expected,
                bool& is_right) {
  std::vector<std::byte> host(kBytes);
  void* stream = nullptr;
  void* done = nullptr;
  cuCtxPushCurrent_v2(context);
  cuMemHostRegister_v2(host.data(), host.size(), 1);
  cuStreamCreateWithPriority(&stream, 1, 0);
  cuEventCreate(&done, 2);
  cuStreamWaitEvent(stream, caller_event, 0);
  is_right = true;
  for (int i = 0; i < 10; ++i) {
    host.assign(kBytes, std::byte{0});
    cuMemcpyDtoHAsync_v2(host.data(), source, kBytes, stream);
    cuEventRecord(done, stream);
    if (i % 2 == 0) {
      cuEventSynchronize(done);
    } else {
      while (cuEventQuery(done) == 600) std::this_thread::yield();
    }
    is_right = is_right && host.front() == expected && host[kBytes - 1] == expected;
  }
  cuEventDestroy_v2(done);
  cuStreamDestroy_v2(stream);
  cuMemHostUnregister(host.data());
  cuCtxPopCurrent_v2(nullptr);
}

TEST(copies_behind_an_event_see_the_callers_write_on_every_thread_without_a_race) {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    fake_reset(seed);
    CHECK_EQ(cuInit(0), 0);
    // A device that another test's job gave up keeps its stream.
    const std::int64_t live_streams = fake_count("live_streams");
    const std::int64_t live_registrations = fake_count("live_registrations");
    void* context = nullptr;
    CHECK_EQ(cuDevicePrimaryCtxRetain(&context, 0), 0);
    const std::uint64_t source = fake_alloc(0, kBytes, 0);
    const std::uint64_t caller = fake_make_stream(0, 1);
    const std::vector<std::byte> written(kBytes, std::byte{7});
    CHECK_EQ(fake_stream_write(0, caller, source, written.data(), kBytes), 0);
    CHECK_EQ(cuCtxPushCurrent_v2(context), 0);
    void* event = nullptr;
    CHECK_EQ(cuEventCreate(&event, 2), 0);
    CHECK_EQ(cuEventRecord(event, reinterpret_cast<void*>(caller)), 0);
    bool is_right[4] = {};
    std::vector<std::thread> threads;
    for (bool& right : is_right)
      threads.emplace_back(copy_often, source, context, event, std::byte{7}, std::ref(right));
    for (std::thread& thread : threads) thread.join();
    for (const bool right : is_right) CHECK(right);
    CHECK_EQ(cuEventDestroy_v2(event), 0);
    CHECK_EQ(cuCtxPopCurrent_v2(nullptr), 0);
    CHECK_EQ(reports(), "");
    CHECK_EQ(fake_count("live_streams"), live_streams);
    CHECK_EQ(fake_count("live_registrations"), live_registrations);
    CHECK_EQ(fake_count("bytes_to_host"), std::int64_t{4 * 10} * std::int64_t{kBytes});
  }
  fake_reset(0);
}

}  // namespace
