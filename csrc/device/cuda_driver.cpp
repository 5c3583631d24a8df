#include "device/cuda_driver.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

namespace dcpx::device {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";
constexpr const char* kForked =
    "a forked child cannot use the CUDA driver of its parent: start the process by spawn";

// Never destroyed: threads may use the driver while the process ends.
struct Shared {
  Mutex mutex;  // one thread loads
  std::vector<std::unique_ptr<Driver>> drivers DCPX_GUARDED_BY(mutex);
  std::vector<std::unique_ptr<std::string>> failures DCPX_GUARDED_BY(mutex);
  std::atomic<Driver*> driver{nullptr};
  std::atomic<const std::string*> failure{nullptr};
  std::atomic<::pid_t> loader{0};  // who may hold the mutex: a forked child must not wait for it
};

Shared& shared() {
  static auto* const instance = new Shared;
  return *instance;
}

thread_local int current_device = -1;  // of the innermost ContextGuard

[[noreturn]] void fail(const std::string& message) { throw Error(ErrorCode::kStaging, message); }

}  // namespace

bool is_lost(Result result) noexcept {
  switch (result) {
    case kDeinitialized:
    case kDeviceUnavailable:
    case kEccUncorrectable:
    case kNvlinkUncorrectable:
    case kContained:
    case kIllegalAddress:
    case kLaunchTimeout:
    case kContextIsDestroyed:
    case kAssert:
    case kTensorMemoryLeak:
    case kExternalDevice:
      return true;
    default:
      return result >= kHardwareStackError && result <= kLaunchFailed;
  }
}

struct DriverLoader {
  static std::unique_ptr<Driver> load() {
    const char* const named = std::getenv("DCPX_CUDA_DRIVER");
    const char* const path = named != nullptr && *named != '\0' ? named : kLibrary;
    void* const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const reason = ::dlerror();
      fail(std::string("no CUDA driver: ") + (reason != nullptr ? reason : path));
    }
    const auto find =
        reinterpret_cast<GetProcAddress12000>(::dlsym(library, "cuGetProcAddress_v2"));
    if (find == nullptr)
      fail(std::string("the CUDA driver '") + path + "' is older than 12.0, the oldest one served");
    std::unique_ptr<Driver> driver(new Driver);
    Api& api = driver->api_;
#define DCPX_FIND(name, version, arguments) \
  if (!find_entry(find, #name, version, api.name)) fail_without(path, #name, version);
    DCPX_CUDA_ENTRY_POINTS(DCPX_FIND)
#undef DCPX_FIND
    driver->owner_ = ::getpid();
    const auto start = [&](Result result, const char* call) {
      std::string doing = std::string("starting the CUDA driver '") + path + "'";
      if (result == kNotInitialized) doing += std::string("; ") + kForked;
      driver->check(result, call, doing);
    };
    start(api.cuInit(0), "cuInit");
    start(api.cuDriverGetVersion(&driver->version_), "cuDriverGetVersion");
    start(api.cuDeviceGetCount(&driver->device_count_), "cuDeviceGetCount");
    if (!find_entry(find, "cuMemcpyBatchAsync", 13000, api.batch_13000) ||
        driver->version_ < 13000) {
      api.batch_13000 = nullptr;
      if (!find_entry(find, "cuMemcpyBatchAsync", 12080, api.batch_12080) ||
          driver->version_ < 12080)
        api.batch_12080 = nullptr;
    }
    driver->has_batch_ = api.batch_12080 != nullptr || api.batch_13000 != nullptr;
    return driver;
  }

  template <class Entry>
  static bool find_entry(GetProcAddress12000 find, const char* name, int version, Entry& entry) {
    void* found = nullptr;
    ProcAddressStatus status = ProcAddressStatus::kNotFound;
    const Result result = find(name, &found, version, kLegacyStreamEntryPoints, &status);
    if (result != kSuccess || status != ProcAddressStatus::kFound) return false;
    entry = reinterpret_cast<Entry>(found);
    return found != nullptr;
  }

  [[noreturn]] static void fail_without(const char* path, const char* name, int version) {
    fail(std::string("the CUDA driver '") + path + "' has no " + name + " of version " +
         std::to_string(version));
  }
};

namespace {

// Leaves either a driver or a failure.
void load(Shared& all) DCPX_HOLDS(all.mutex) {
  try {
    all.drivers.push_back(DriverLoader::load());
    all.driver.store(all.drivers.back().get(), std::memory_order_release);
  } catch (const std::exception& error) {
    all.failures.push_back(std::make_unique<std::string>(error.what()));
    all.failure.store(all.failures.back().get(), std::memory_order_release);
  }
}

}  // namespace

Driver& Driver::get() {
  Shared& all = shared();
  const ::pid_t self = ::getpid();
  if (Driver* const driver = all.driver.load(std::memory_order_acquire)) {
    if (driver->owner_ != self) fail(kForked);
    return *driver;
  }
  if (const std::string* const failure = all.failure.load(std::memory_order_acquire))
    fail(*failure);
  const ::pid_t loader = all.loader.load(std::memory_order_acquire);
  if (loader != 0 && loader != self) fail(kForked);
  all.loader.store(self, std::memory_order_release);
  {
    const Lock lock(all.mutex);
    if (all.driver.load(std::memory_order_acquire) == nullptr &&
        all.failure.load(std::memory_order_acquire) == nullptr)
      load(all);
  }
  return get();
}

bool Driver::is_of_this_process() const noexcept { return owner_ == ::getpid(); }

int Driver::attribute(int device, int attribute, int otherwise) const noexcept {
  Device handle = 0;
  int value = 0;
  const bool is_known = api_.cuDeviceGet(&handle, device) == kSuccess &&
                        api_.cuDeviceGetAttribute(&value, attribute, handle) == kSuccess;
  return is_known ? value : otherwise;
}

std::string Driver::describe(Result result, const char* call, const std::string& doing) const {
  const char* name = nullptr;
  const char* meaning = nullptr;
  if (api_.cuGetErrorName(result, &name) != kSuccess || name == nullptr)
    name = "an error without a name";
  if (api_.cuGetErrorString(result, &meaning) != kSuccess || meaning == nullptr)
    meaning = "the driver has no description";
  return std::string(call) + ": " + name + " (" + std::to_string(result) + "): " + meaning + "; " +
         doing;
}

void Driver::check(Result result, const char* call, const std::string& doing) {
  if (result == kSuccess) return;
  std::string message = describe(result, call, doing);
  {
    const Lock lock(mutex_);
    std::string& first_loss = first_losses_[current_device];
    if (!first_loss.empty()) {
      message += "; an earlier error had lost the device: " + first_loss;
    } else if (is_lost(result)) {
      first_loss = message;
    }
  }
  fail(message);
}

void Driver::check_ordinal(int device) const {
  if (device >= 0 && device < device_count_) return;
  fail("device " + std::to_string(device) + " is none of the CUDA driver's " +
       std::to_string(device_count_));
}

void Driver::check_device(int device) {
  check_ordinal(device);
  std::vector<std::shared_ptr<void>> unused;  // goes after the lock
  const Lock lock(mutex_);
  unused = forget_ended();
  for (const GivenUp& one : given_up_) {
    if (one.device != device) continue;
    fail("device " + std::to_string(device) +
         " is not used until copies that took too long have ended: " + one.why);
  }
}

void Driver::give_up(int device, const std::string& why, Stream stream, Event event) noexcept {
  const Lock lock(mutex_);
  given_up_.push_back({device, why, stream, event});
}

void Driver::keep_while_used(std::shared_ptr<void> memory) noexcept {
  if (!has_given_up()) return;
  const Lock lock(mutex_);
  kept_.push_back(std::move(memory));  // for a moment too long where they have just ended
}

bool Driver::has_given_up() noexcept {
  std::vector<std::shared_ptr<void>> unused;  // goes after the lock
  const Lock lock(mutex_);
  unused = forget_ended();
  return !given_up_.empty();
}

// These calls need no current context; another thread's graph capture must not see them.
std::vector<std::shared_ptr<void>> Driver::forget_ended() {
  if (given_up_.empty()) return std::exchange(kept_, {});
  CaptureMode mode = CaptureMode::kRelaxed;
  api_.cuThreadExchangeStreamCaptureMode(&mode);
  const auto has_ended = [this](const GivenUp& one) {
    if (one.event == nullptr) return false;
    const Result result = api_.cuEventQuery(one.event);
    if (result != kSuccess && !is_lost(result)) return false;
    api_.cuEventDestroy(one.event);
    api_.cuStreamDestroy(one.stream);
    return true;
  };
  given_up_.erase(std::remove_if(given_up_.begin(), given_up_.end(), has_ended), given_up_.end());
  api_.cuThreadExchangeStreamCaptureMode(&mode);
  return given_up_.empty() ? std::exchange(kept_, {}) : std::vector<std::shared_ptr<void>>();
}

Context Driver::primary_context(int device) {
  check_ordinal(device);
  const Lock lock(mutex_);
  const auto found = contexts_.find(device);
  if (found != contexts_.end()) return found->second;
  const auto failed = [&](Result result, const char* call) {
    fail(describe(result, call, "opening the context of device " + std::to_string(device)));
  };
  Device handle = 0;
  Context context = nullptr;
  if (const Result r = api_.cuDeviceGet(&handle, device)) failed(r, "cuDeviceGet");
  if (const Result r = api_.cuDevicePrimaryCtxRetain(&context, handle))
    failed(r, "cuDevicePrimaryCtxRetain");
  contexts_[device] = context;
  return context;
}

std::vector<int> Driver::open_devices() {
  const Lock lock(mutex_);
  std::vector<int> devices;
  for (const auto& [device, context] : contexts_) devices.push_back(device);
  return devices;
}

void let_go_when_unused(std::shared_ptr<void> memory) noexcept {
  try {
    Driver::get().keep_while_used(std::move(memory));
  } catch (const Error&) {  // no driver of this process, so no copies
    return;
  }
}

std::string driver_failure() {
  try {
    Driver::get();
    return {};
  } catch (const Error& error) {
    return error.what();
  }
}

void forget_driver() {
  Shared& all = shared();
  const Lock lock(all.mutex);
  all.driver.store(nullptr, std::memory_order_release);
  all.failure.store(nullptr, std::memory_order_release);
}

ContextGuard::ContextGuard(int device)
    : driver_(Driver::get()), outer_device_(std::exchange(current_device, device)) {
  const Api& api = driver_.api();
  const std::string doing = "entering device " + std::to_string(device);
  bool is_relaxed = false;
  try {
    driver_.check(api.cuThreadExchangeStreamCaptureMode(&mode_),
                  "cuThreadExchangeStreamCaptureMode", doing);
    is_relaxed = true;
    driver_.check(api.cuCtxPushCurrent(driver_.primary_context(device)), "cuCtxPushCurrent", doing);
  } catch (const Error&) {
    if (is_relaxed) api.cuThreadExchangeStreamCaptureMode(&mode_);
    current_device = outer_device_;
    throw;
  }
}

ContextGuard::~ContextGuard() {
  Context ours = nullptr;
  driver_.api().cuCtxPopCurrent(&ours);  // results: nothing is left to do where the driver is gone
  driver_.api().cuThreadExchangeStreamCaptureMode(&mode_);
  current_device = outer_device_;
}

}  // namespace dcpx::device
