// CUDA: the caller's events, and what tests and reports ask of the driver.
#include <pybind11/stl.h>

#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/kept_objects.h"
#include "dcp/gil.h"
#include "device/copy_stream.h"
#include "device/counters.h"
#include "device/cuda_driver.h"
#include "device/pack_kernel.h"
#include "device/pinned.h"
#include "device/source_events.h"

namespace dcpx {
namespace {

namespace py = pybind11;

py::dict device_driver() {
  std::string failure;
  {
    const ReleasedGil release;  // a driver that starts takes a second
    failure = device::driver_failure();
  }
  const device::Driver* const driver = failure.empty() ? &device::Driver::get() : nullptr;
  py::dict out;
  out["version"] = driver != nullptr ? driver->version() : 0;
  out["devices"] = driver != nullptr ? driver->device_count() : 0;
  out["failure"] = failure;
  out["has_kernel"] = device::has_pack_image();
  out["kernel_refusal"] = device::pack_refusal();
  return out;
}

py::dict device_counters() {
  const auto values = device::counters();
  py::dict out;
  for (std::size_t i = 0; i < values.size(); ++i)
    out[device::count_name(static_cast<device::Count>(i))] = values[i];
  return out;
}

// Never destroyed: the interpreter may be gone first. Guarded by the GIL.
std::vector<py::object>& kept_objects() {
  static auto* const instance = new std::vector<py::object>;
  return *instance;
}

bool has_given_up() {
  const ReleasedGil release;
  return device::driver_failure().empty() && device::Driver::get().has_given_up();
}

std::unique_ptr<device::SourceEvents> source_events(
    const std::vector<device::CallerStream>& streams) {
  forget_copied();
  const ReleasedGil release;
  return std::make_unique<device::SourceEvents>(streams);
}

void set_pack_image(const py::object& image) {
  std::vector<std::byte> bytes;
  if (!image.is_none()) {
    const auto text = image.cast<std::string_view>();
    const auto* const first = reinterpret_cast<const std::byte*>(text.data());
    bytes.assign(first, first + text.size());
  }
  device::set_pack_image(std::move(bytes));
}

}  // namespace

void keep_while_copied(py::object object) {
  if (has_given_up()) kept_objects().push_back(std::move(object));
}

void forget_copied() {
  if (kept_objects().empty() || has_given_up()) return;
  const std::vector<py::object> unused = std::exchange(kept_objects(), {});
}

void bind_device(py::module_& m) {
  py::class_<device::SourceEvents>(m, "SourceEvents")
      .def(py::init(&source_events), py::arg("streams"))
      .def("devices", &device::SourceEvents::devices);
  m.def("device_driver", &device_driver);
  m.def("device_counters", &device_counters);
  m.def("clear_device_counters", &device::clear_counters);
  m.def("take_device_warning", &device::take_warning);
  m.def("keep_while_copied", &keep_while_copied, py::arg("owners"));
  m.def("set_copy_timeouts", &device::set_copy_timeouts, py::arg("copy_timeout_s"),
        py::arg("unwind_timeout_s"));
  m.def("set_pack_image", &set_pack_image, py::arg("image"));
  m.def("forget_device_driver", [] {
    device::set_pack_image({});
    device::forget_warnings();
    device::forget_driver();
  });
}

}  // namespace dcpx
