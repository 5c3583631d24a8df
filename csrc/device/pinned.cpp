#include "device/pinned.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <set>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "device/cuda_driver.h"

#ifndef MADV_WIPEONFORK
#define MADV_WIPEONFORK 18  // Linux 4.14; older C libraries do not name them
#define MADV_KEEPONFORK 19
#endif

namespace dcpx::device {
namespace {

// What is registered now, by address. Never destroyed: a Pinned may live in a static object.
struct Registry {
  SharedMutex mutex;
  std::map<std::uint64_t, std::uint64_t> pieces DCPX_GUARDED_BY(mutex);  // begin -> end
  // Pieces that the driver would not take back, as their device was lost. It still sends copies
  // that name these addresses to the pages that lay there then.
  std::map<std::uint64_t, std::uint64_t> stale DCPX_GUARDED_BY(mutex);
  // Where pieces begin or end, or will: what is under way may register them at any moment.
  std::multiset<std::uint64_t> borders DCPX_GUARDED_BY(mutex);
};

Registry& registry() {
  static auto* const instance = new Registry;
  return *instance;
}

struct Warning {
  Mutex mutex;
  bool is_given DCPX_GUARDED_BY(mutex) = false;
  std::string text DCPX_GUARDED_BY(mutex);
};

Warning& warning() {
  static auto* const instance = new Warning;
  return *instance;
}

std::string memlock_limit() {
  struct ::rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return {};
  return " (RLIMIT_MEMLOCK is " + std::to_string(limit.rlim_cur) + " B)";
}

void warn_once(const std::string& reason) {
  Warning& kept = warning();
  const Lock lock(kept.mutex);
  if (kept.is_given) return;
  kept.is_given = true;
  kept.text =
      "host memory could not be pinned, so that copies from and to devices are slower: " + reason +
      memlock_limit();
}

bool unregister(Driver& driver, int device, std::uint64_t begin) noexcept {
  try {
    const ContextGuard guard(device);
    void* const data = reinterpret_cast<void*>(static_cast<std::uintptr_t>(begin));
    const Result result = driver.api().cuMemHostUnregister(data);
    return !is_lost(result) || result == kDeinitialized;
  } catch (const std::exception&) {
    return false;
  }
}

// Any device's context can take a portable registration back: tried in turn, as some may be lost.
// False where none could and there still is a driver, and while a device that was given up may
// still copy: the pages then stay with the driver, and the call might wait for that device.
bool unregister(std::uint64_t begin) noexcept {
  try {
    Driver& driver = Driver::get();
    if (driver.has_given_up()) return false;
    const std::vector<int> devices = driver.open_devices();
    return std::any_of(devices.begin(), devices.end(),
                       [&](int device) { return unregister(driver, device, begin); });
  } catch (const std::exception&) {  // no driver any more, or a forked child
    return true;
  }
}

}  // namespace

struct Pinned::State {
  std::byte* data = nullptr;
  std::uint64_t nbytes = 0;
  int device = 0;
  ::pid_t owner = 0;
  std::uint64_t planned = 0;  // bytes whose borders the registry knows
  std::atomic<bool> is_cancelled{false};
  std::atomic<std::uint64_t> pinned{0};  // bytes from `data` on
  mutable std::mutex join_mutex;
  mutable std::thread thread;

  ~State() {
    if (owner != ::getpid()) {  // a forked child has neither the thread nor the driver
      if (thread.joinable()) thread.detach();
      return;
    }
    is_cancelled.store(true, std::memory_order_relaxed);
    join();
    release();
    forget_plan();
  }

  void join() const {
    const std::lock_guard lock(join_mutex);
    if (thread.joinable()) thread.join();
  }

  void run() noexcept {
    try {
      register_pieces();
    } catch (const std::exception& error) {  // the memory stays pageable, which is as right
      warn_once(error.what());
    }
  }

  // A forked child that shared the pages would make the next write here one to a copy of the page,
  // while the device goes on with the old one: it gets empty pages of its own. (Shared mappings
  // refuse that and need it not.)
  void plan() {
    ::madvise(data, static_cast<std::size_t>(nbytes), MADV_WIPEONFORK);
    Registry& all = registry();
    const Lock lock(all.mutex);
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    for (; planned < nbytes; planned += std::min(kPinPieceBytes, nbytes - planned))
      all.borders.insert(begin + planned);
    all.borders.insert(begin + nbytes);
  }

  void forget_plan() noexcept {
    ::madvise(data, static_cast<std::size_t>(nbytes), MADV_KEEPONFORK);
    Registry& all = registry();
    const Lock lock(all.mutex);
    const auto begin = reinterpret_cast<std::uintptr_t>(data);
    const auto forget = [&all](std::uint64_t border) DCPX_HOLDS(all.mutex) {
      const auto found = all.borders.find(border);
      if (found != all.borders.end()) all.borders.erase(found);
    };
    for (std::uint64_t at = 0; at < planned; at += kPinPieceBytes) forget(begin + at);
    forget(begin + nbytes);
  }

  void register_pieces() {
    for (std::uint64_t at = 0; at < nbytes && !is_cancelled.load(std::memory_order_relaxed);) {
      const std::uint64_t count = std::min(kPinPieceBytes, nbytes - at);
      register_piece(data + at, count);
      const auto begin = reinterpret_cast<std::uintptr_t>(data + at);
      at += count;
      Registry& all = registry();
      const Lock lock(all.mutex);
      all.pieces[begin] = begin + count;
      pinned.store(at, std::memory_order_release);
    }
  }

  void register_piece(std::byte* begin, std::uint64_t count) const {
    Driver& driver = Driver::get();  // first: it refuses forked children, where locks may be held
    driver.check_device(device);
    release_stale();
    const ContextGuard guard(device);  // a piece at a time: torch may wait for the driver
    const Api& api = driver.api();
    const auto try_it = [&] {
      return api.cuMemHostRegister(begin, static_cast<std::size_t>(count),
                                   kHostRegisterPortable | kHostRegisterDevicemap);
    };
    Result result = try_it();
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    if (result == kAlreadyRegistered && !is_stale_range(address, count)) {
      // The memory is our own, so the driver remembers what lay here before. Its pages are others:
      // copies would go there.
      api.cuMemHostUnregister(begin);
      result = try_it();
    }
    driver.check(result, "cuMemHostRegister", "pinning " + std::to_string(count) + " B");
  }

  void release() noexcept {
    const std::uint64_t end = pinned.load(std::memory_order_acquire);
    for (std::uint64_t at = 0; at < end; at += kPinPieceBytes) {
      const auto begin = reinterpret_cast<std::uintptr_t>(data + at);
      Registry& all = registry();
      {
        const Lock lock(all.mutex);
        all.pieces.erase(begin);
      }
      if (unregister(begin)) continue;
      const Lock lock(all.mutex);
      all.stale[begin] = begin + std::min(kPinPieceBytes, end - at);
    }
  }
};

Pinned::Pinned() noexcept = default;
Pinned::Pinned(std::unique_ptr<State> state) noexcept : state_(std::move(state)) {}
Pinned::Pinned(Pinned&& other) noexcept = default;
Pinned& Pinned::operator=(Pinned&& other) noexcept = default;
Pinned::~Pinned() = default;

Pinned Pinned::prepare(void* data, std::uint64_t nbytes, int device) {
  auto state = std::make_unique<State>();
  state->data = static_cast<std::byte*>(data);
  state->nbytes = nbytes;
  state->device = device;
  state->owner = ::getpid();
  state->plan();
  return Pinned(std::move(state));
}

Pinned Pinned::try_pin(void* data, std::uint64_t nbytes, int device) {
  Pinned pinned = prepare(data, nbytes, device);
  pinned.state_->run();
  return pinned;
}

Pinned Pinned::start(void* data, std::uint64_t nbytes, int device) {
  Pinned pinned = prepare(data, nbytes, device);
  State* const state = pinned.state_.get();
  try {
    state->thread = std::thread([state] { state->run(); });
  } catch (const std::system_error&) {  // no thread to be had
    state->run();
  }
  return pinned;
}

bool Pinned::is_pinned() const noexcept {
  return state_ != nullptr && state_->nbytes > 0 && pinned_bytes() == state_->nbytes;
}

std::uint64_t Pinned::pinned_bytes() const noexcept {
  return state_ == nullptr ? 0 : state_->pinned.load(std::memory_order_acquire);
}

void Pinned::wait() const {
  if (state_ != nullptr) state_->join();
}

bool is_pinned_range(std::uint64_t address, std::uint64_t nbytes) noexcept {
  while (nbytes > 0) {
    bool is_pinned = false;
    const std::uint64_t run = pin_run_bytes(address, nbytes, is_pinned);
    if (!is_pinned) return false;
    address += run;
    nbytes -= run;
  }
  return true;
}

std::uint64_t pin_run_bytes(std::uint64_t address, std::uint64_t nbytes, bool& is_pinned) noexcept {
  Registry& all = registry();
  const SharedLock lock(all.mutex);
  const auto next = all.pieces.upper_bound(address);
  if (next != all.pieces.begin()) {
    const std::uint64_t end = std::prev(next)->second;
    if (address < end) {
      is_pinned = true;
      return std::min(nbytes, end - address);
    }
  }
  is_pinned = false;
  const auto border = all.borders.upper_bound(address);
  return border == all.borders.end() ? nbytes : std::min(nbytes, *border - address);
}

bool is_stale_range(std::uint64_t address, std::uint64_t nbytes) noexcept {
  Registry& all = registry();
  const SharedLock lock(all.mutex);
  const auto next = all.stale.lower_bound(address + nbytes);
  return next != all.stale.begin() && std::prev(next)->second > address;
}

void release_stale() noexcept {
  Registry& all = registry();
  std::map<std::uint64_t, std::uint64_t> stale;
  {
    const Lock lock(all.mutex);
    stale.swap(all.stale);
  }
  for (auto it = stale.begin(); it != stale.end();)
    it = unregister(it->first) ? stale.erase(it) : std::next(it);
  if (stale.empty()) return;
  const Lock lock(all.mutex);
  all.stale.merge(stale);
}

std::string take_warning() {
  Warning& kept = warning();
  const Lock lock(kept.mutex);
  return std::exchange(kept.text, {});
}

void forget_warnings() {
  Warning& kept = warning();
  const Lock lock(kept.mutex);
  kept.is_given = false;
  kept.text.clear();
}

}  // namespace dcpx::device
