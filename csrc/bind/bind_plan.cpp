// Boxes of many tensors in, offences out.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "dcp/gil.h"
#include "dcp/plan_items.h"
#include "dcp/python.h"
#include "plan/coverage.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// An exported buffer as int64 values. Destroy it with the GIL held.
class Column {
 public:
  explicit Column(const py::handle& source) {
    std::uint64_t nbytes = 0;
    const std::byte* data = buffers_.add(source, /*is_writable=*/false, nbytes);
    if (PyLong_Check(source.ptr())) throw py::type_error("a column is a buffer, no address");
    if (nbytes == 0) return;  // wherever an empty buffer points to
    if (nbytes % sizeof(std::int64_t) != 0 ||
        reinterpret_cast<std::uintptr_t>(data) % alignof(std::int64_t) != 0) {
      throw py::value_error("a column is no array of int64");
    }
    data_ = reinterpret_cast<const std::int64_t*>(data);
    count_ = static_cast<std::size_t>(nbytes / sizeof(std::int64_t));
  }
  const std::int64_t* data() const noexcept { return data_; }
  std::size_t count() const noexcept { return count_; }

 private:
  PinnedBuffers buffers_;
  const std::int64_t* data_ = nullptr;
  std::size_t count_ = 0;
};

py::list check_coverage(const py::object& ndims, const py::object& sizes,
                        const py::object& box_counts, const py::object& offsets,
                        const py::object& lengths) {
  const Column ndim(ndims);
  const Column size(sizes);
  const Column box_count(box_counts);
  const Column offset(offsets);
  const Column length(lengths);
  if (ndim.count() != box_count.count() || offset.count() != length.count()) {
    throw py::value_error("columns of boxes differ in length");
  }
  std::vector<plan::CoverageError> errors;
  {
    const ReleasedGil no_gil;
    errors = plan::check_coverage({ndim.data(), size.data(), box_count.data(), offset.data(),
                                   length.data(), ndim.count(), size.count(), offset.count()});
  }
  py::list rows;
  for (const plan::CoverageError& error : errors) {
    py::tuple point(error.point.size());
    for (std::size_t d = 0; d < error.point.size(); ++d) point[d] = error.point[d];
    rows.append(
        py::make_tuple(error.tensor, name_of(error.offence), error.box, error.other, point));
  }
  return rows;
}

}  // namespace

void bind_plan(py::module_& module) {
  module.def("check_coverage", &check_coverage, py::arg("ndims"), py::arg("sizes"),
             py::arg("box_counts"), py::arg("offsets"), py::arg("lengths"),
             "(tensor, offence, box, other, point) of every tensor whose boxes do not tile it.");
  bind_plan_items(module);
}

}  // namespace dcpx
