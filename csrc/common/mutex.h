// Mutexes that clang's -Wthread-safety knows (`make lint`): whoever reads or writes a member that
// is DCPX_GUARDED_BY one without holding it is named at compile time. Other compilers see nothing.
#pragma once

#include <mutex>
#include <shared_mutex>

#if defined(__clang__)
#define DCPX_THREAD_SAFETY(attribute) __attribute__((attribute))
#else
#define DCPX_THREAD_SAFETY(attribute)
#endif
#define DCPX_GUARDED_BY(mutex) DCPX_THREAD_SAFETY(guarded_by(mutex))
#define DCPX_HOLDS(mutex) DCPX_THREAD_SAFETY(requires_capability(mutex))  // what a caller has

namespace dcpx {

class DCPX_THREAD_SAFETY(capability("mutex")) Mutex {
 public:
  void lock() DCPX_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() DCPX_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }

 private:
  std::mutex mutex_;
};

class DCPX_THREAD_SAFETY(capability("mutex")) SharedMutex {
 public:
  void lock() DCPX_THREAD_SAFETY(acquire_capability()) { mutex_.lock(); }
  void unlock() DCPX_THREAD_SAFETY(release_capability()) { mutex_.unlock(); }
  void lock_shared() DCPX_THREAD_SAFETY(acquire_shared_capability()) { mutex_.lock_shared(); }
  void unlock_shared() DCPX_THREAD_SAFETY(release_shared_capability()) { mutex_.unlock_shared(); }

 private:
  std::shared_mutex mutex_;
};

// Holds a mutex while it lives, but between unlock() and lock().
template <typename M>
class DCPX_THREAD_SAFETY(scoped_lockable) Lock {
 public:
  explicit Lock(M& mutex) DCPX_THREAD_SAFETY(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;
  ~Lock() DCPX_THREAD_SAFETY(release_capability()) {
    if (is_held_) mutex_.unlock();
  }
  void lock() DCPX_THREAD_SAFETY(acquire_capability()) {
    mutex_.lock();
    is_held_ = true;
  }
  void unlock() DCPX_THREAD_SAFETY(release_capability()) {
    is_held_ = false;
    mutex_.unlock();
  }

 private:
  M& mutex_;
  bool is_held_ = true;
};

class DCPX_THREAD_SAFETY(scoped_lockable) SharedLock {
 public:
  explicit SharedLock(SharedMutex& mutex) DCPX_THREAD_SAFETY(acquire_shared_capability(mutex))
      : mutex_(mutex) {
    mutex_.lock_shared();
  }
  SharedLock(const SharedLock&) = delete;
  SharedLock& operator=(const SharedLock&) = delete;
  ~SharedLock() DCPX_THREAD_SAFETY(release_capability()) { mutex_.unlock_shared(); }

 private:
  SharedMutex& mutex_;
};

}  // namespace dcpx
