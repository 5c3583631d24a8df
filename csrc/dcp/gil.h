// The GIL, released and taken again by threads that the interpreter may end before.
//
// Python < 3.14 ends a daemon thread that takes the GIL once the interpreter finalizes, by
// pthread_exit: a forced unwind. C++ frames must not see it. A `catch (...)` or `noexcept` makes an
// abort of it, and the workers still use what lies on the stack. So whoever takes the GIL here and
// cannot have it sleeps until the process ends, and so does who is in C++ when that is near.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "common/worker_group.h"

namespace dcpx {

// What becomes of a thread that has outlived the interpreter.
[[noreturn]] void sleep_for_ever();

// Returns what `call` does, which calls Python alone, throws nothing and keeps nothing of C++:
// Python code may release the GIL, and the interpreter end before it has it again. A destructor
// sees the forced unwind with every C++ runtime; a type to catch has only libstdc++.
template <typename Call>
auto in_python(const Call& call) {
  struct Guard {
    bool has_returned = false;
    ~Guard() {
      if (!has_returned) sleep_for_ever();
    }
  } guard;
  auto result = call();
  guard.has_returned = true;
  return result;
}

// The GIL is released while this lives. REQUIRES: the GIL is held, and this ends on its thread.
class ReleasedGil {
 public:
  ReleasedGil();
  ReleasedGil(const ReleasedGil&) = delete;
  ReleasedGil& operator=(const ReleasedGil&) = delete;
  ~ReleasedGil();  // Blocks; for ever as the interpreter ends.

 private:
  PyThreadState* state_;
  unsigned begun_at_;
};

// Lets go of what may be the last reference to much memory: giving it back takes the system 0.2 s a
// GiB, in which other threads of Python are to run. From any thread, with or without the GIL.
void let_go(std::shared_ptr<void> memory) noexcept;

// The GIL is held while this lives. REQUIRES: the thread has released it by a ReleasedGil.
class HeldGil {
 public:
  HeldGil();  // Blocks, as ~ReleasedGil.
  HeldGil(const HeldGil&) = delete;
  HeldGil& operator=(const HeldGil&) = delete;
  ~HeldGil();
};

// The GIL is held while this lives, on any thread: one of C++'s own, too.
class TakenGil {
 public:
  TakenGil();  // Blocks, as ~ReleasedGil.
  TakenGil(const TakenGil&) = delete;
  TakenGil& operator=(const TakenGil&) = delete;
  ~TakenGil();

 private:
  PyGILState_STATE state_{};
};

// For the thread that waits while workers run without the GIL: lets Python see its signals, and
// throws what a handler raised (KeyboardInterrupt), or Error(kStorage) as the interpreter ends.
// REQUIRES: the thread has released the GIL by a ReleasedGil.
PollFunction signal_poll();

// Calls what a user gave; throws what it raises. REQUIRES: the GIL.
void call_hook(const pybind11::object& hook, const pybind11::tuple& arguments);

}  // namespace dcpx
