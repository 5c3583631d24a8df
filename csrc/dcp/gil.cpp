#include "dcp/gil.h"

#include <pybind11/stl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "common/error.h"
#include "dcp/dcp.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kLook(1);

std::atomic<unsigned> stops{0};        // calls of stop_jobs()
std::atomic<int> released{0};          // threads within a ReleasedGil
std::atomic<bool> is_stopping{false};  // from stop_jobs() to let_jobs_begin()
thread_local bool is_ending = false;   // this thread has called stop_jobs()

// Python's idents of the threads that were stopped. Never destroyed: they outlive everything.
struct Asleep {
  std::mutex mutex;
  std::vector<unsigned long> idents;
};
Asleep& asleep() {
  static auto* const instance = new Asleep;
  return *instance;
}
thread_local PyThreadState* its_state = nullptr;  // of the thread's last ReleasedGil

void take_gil(PyThreadState* state) {
  in_python([&] {
    PyEval_RestoreThread(state);
    return true;
  });
}

}  // namespace

void sleep_for_ever() {
  for (;;) ::pause();
}

namespace {

void sleep_if_stopped(unsigned begun_at) {
  if (is_ending || (begun_at == stops.load() && !is_stopping.load())) return;
  {
    const std::lock_guard lock(asleep().mutex);
    asleep().idents.push_back(PyThread_get_thread_ident());
  }
  sleep_for_ever();
}

}  // namespace

ReleasedGil::ReleasedGil() : state_(PyEval_SaveThread()), begun_at_(stops.load()) {
  sleep_if_stopped(begun_at_);
  its_state = state_;
  released.fetch_add(1);
}

ReleasedGil::~ReleasedGil() {
  released.fetch_sub(1);
  sleep_if_stopped(begun_at_);
  take_gil(state_);
}

void let_go(std::shared_ptr<void> memory) noexcept {
  // Without an interpreter PyGILState_Check() says that the GIL is held.
  if (memory.use_count() != 1 || Py_IsInitialized() == 0 || PyGILState_Check() == 0) return;
  const ReleasedGil no_gil;
  memory.reset();
}

HeldGil::HeldGil() { take_gil(its_state); }

HeldGil::~HeldGil() { PyEval_SaveThread(); }

TakenGil::TakenGil() {
  in_python([&] {
    state_ = PyGILState_Ensure();
    return true;
  });
}

TakenGil::~TakenGil() { PyGILState_Release(state_); }

PollFunction signal_poll() {
  return [begun_at = stops.load()] {
    if (stops.load() != begun_at) {
      Error error(ErrorCode::kStorage, "stopped: the process ends");
      error.sys_errno = ECANCELED;
      throw error;
    }
    const HeldGil gil;
    if (in_python([] { return PyErr_CheckSignals(); }) != 0) throw py::error_already_set();
  };
}

void call_hook(const py::object& hook, const py::tuple& arguments) {
  const bool has_returned = in_python([&] {
    PyObject* const owned = PyObject_CallObject(hook.ptr(), arguments.ptr());
    Py_XDECREF(owned);
    return owned != nullptr;
  });
  if (!has_returned) throw py::error_already_set();
}

namespace {

// The interpreter is about to end: what other threads do without the GIL is stopped by their polls
// and never comes back. (In Python they would go on while it finalizes, through torch's C++ too,
// which cannot be unwound either.) Waits until their workers have ended, at most `timeout_s`;
// returns how many threads still have some. What begins after let_jobs_begin() is not stopped.
int stop_jobs(double timeout_s) {
  is_ending = true;
  is_stopping.store(true);
  stops.fetch_add(1);
  const ReleasedGil own;
  const auto end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                      std::chrono::duration<double>(std::max(timeout_s, 0.0)));
  while (released.load() > 1 && Clock::now() < end) std::this_thread::sleep_for(kLook);
  return std::max(released.load() - 1, 0);
}

}  // namespace

void bind_gil(py::module_& m) {
  m.def("stop_jobs", &stop_jobs, py::arg("timeout_s"));
  m.def("let_jobs_begin", [] { is_stopping.store(false); });
  m.def("stopped_threads", [] {
    const std::lock_guard lock(asleep().mutex);
    return asleep().idents;
  });
  // For whoever has imported nothing that calls it before.
  py::module_::import("atexit").attr("register")(
      py::cpp_function([] { py::module_::import("torch_dcpx._last_jobs").attr("stop")(); }));
  py::module_::import("os").attr("register_at_fork")(  // a child has none of the other threads
      py::arg("after_in_child") = py::cpp_function([] { released.store(0); }));
}

}  // namespace dcpx
