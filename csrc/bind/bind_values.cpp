// Addresses of tensors in, numbers out.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

#include "bind/bind.h"
#include "dcp/gil.h"
#include "engine/tensor_values.h"

namespace dcpx {
namespace {

namespace py = pybind11;

engine::NumberKind kind_of(const std::string& dtype) {
  const auto kind = engine::number_kind(dtype);
  if (!kind) throw py::value_error("no numbers have the dtype '" + dtype + "'");
  return *kind;
}

const std::byte* elements_at(std::uintptr_t address) {
  return reinterpret_cast<const std::byte*>(address);
}

py::tuple compare_values(const std::string& dtype_a, std::uintptr_t a, const std::string& dtype_b,
                         std::uintptr_t b, std::uint64_t count, double rtol, double atol) {
  const engine::NumberKind kind_a = kind_of(dtype_a);
  const engine::NumberKind kind_b = kind_of(dtype_b);
  engine::Differences found;
  {
    const ReleasedGil no_gil;
    found =
        engine::compare_values(kind_a, elements_at(a), kind_b, elements_at(b), count, rtol, atol);
  }
  return py::make_tuple(found.different, found.beyond, found.is_same_bits, found.max_abs,
                        found.norm, found.norm_a);
}

std::uint64_t unlike_elements(std::uintptr_t a, std::uintptr_t b, std::uint64_t count,
                              std::uint64_t elem_bytes) {
  const ReleasedGil no_gil;
  return engine::unlike_elements(elements_at(a), elements_at(b), count, elem_bytes);
}

py::int_ integer(engine::Wide value) {  // of 64 bits, with a sign or without one
  if (value < 0) return py::int_(static_cast<std::int64_t>(value));
  return py::int_(static_cast<std::uint64_t>(value));
}

py::tuple value_statistics(const std::string& dtype, std::uintptr_t data, std::uint64_t count) {
  const engine::NumberKind kind = kind_of(dtype);
  engine::Statistics found;
  {
    const ReleasedGil no_gil;
    found = engine::statistics(kind, elements_at(data), count);
  }
  py::object low = py::none();
  py::object high = py::none();
  py::object mean = py::none();
  if (found.finite > 0 && !engine::is_complex(kind)) {
    low = found.is_integer ? py::object(integer(found.min_integer)) : py::float_(found.min);
    high = found.is_integer ? py::object(integer(found.max_integer)) : py::float_(found.max);
    mean = py::float_(found.mean);
  }
  return py::make_tuple(found.finite, found.nan, found.infinite, low, high, mean, found.norm);
}

}  // namespace

void bind_values(py::module_& module) {
  module.def("has_numbers",
             [](const std::string& dtype) { return engine::number_kind(dtype).has_value(); });
  module.def("compare_values", &compare_values, py::arg("dtype_a"), py::arg("a"),
             py::arg("dtype_b"), py::arg("b"), py::arg("count"), py::arg("rtol") = 0.0,
             py::arg("atol") = 0.0,
             "(different, beyond tolerances, is same bits, max abs, norm of A - B, norm of A).");
  module.def("unlike_elements", &unlike_elements, py::arg("a"), py::arg("b"), py::arg("count"),
             py::arg("elem_bytes"), "How many elements have other bytes.");
  module.def("value_statistics", &value_statistics, py::arg("dtype"), py::arg("data"),
             py::arg("count"), "(finite, NaN, infinite, min, max, mean, norm) of the elements.");
}

}  // namespace dcpx
