// For tests: counts of system calls, and the seam that makes one of them fail.
#include "bind/bind.h"
#include "io/system_calls.h"

namespace dcpx {

void bind_io(pybind11::module_& m) {
  namespace py = pybind11;
  m.def("call_counts", [] {
    py::dict counts;
    const auto values = io::call_counts();
    for (std::size_t i = 0; i < values.size(); ++i) {
      counts[io::call_name(static_cast<io::Call>(i))] = values[i];
    }
    return counts;
  });
  m.def(
      "arm_fault",
      [](std::int64_t nth, int sys_errno, const std::string& kind) {
        std::size_t number = 0;
        while (number < io::kCallKinds && kind != io::call_name(static_cast<io::Call>(number)))
          ++number;
        if (number == io::kCallKinds && !kind.empty())
          throw py::value_error("no system call of kind '" + kind + "'");
        io::arm_fault(nth, sys_errno, static_cast<io::Call>(number));
      },
      py::arg("nth"), py::arg("errno"), py::arg("kind") = "");
  m.def("disarm_fault", &io::disarm_fault);
}

}  // namespace dcpx
