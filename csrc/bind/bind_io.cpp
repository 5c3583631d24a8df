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
  m.def("arm_fault", &io::arm_fault, py::arg("nth"), py::arg("errno"));
  m.def("disarm_fault", &io::disarm_fault);
}

}  // namespace dcpx
