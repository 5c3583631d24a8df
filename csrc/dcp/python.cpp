#include "dcp/python.h"

#include "common/error.h"
#include "dcp/fields.h"

namespace dcpx {

std::string to_string(const pybind11::handle& value) {
  Py_ssize_t nbytes = 0;
  const char* text = PyUnicode_AsUTF8AndSize(value.ptr(), &nbytes);
  if (text != nullptr) return {text, static_cast<std::size_t>(nbytes)};
  if (PyErr_ExceptionMatches(PyExc_UnicodeEncodeError) == 0) throw pybind11::error_already_set();
  PyErr_Clear();
  PyObject* raw = PyUnicode_AsEncodedString(value.ptr(), "utf-8", "surrogatepass");
  if (raw == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::bytes>(raw);
}

std::size_t append_ints(const pybind11::handle& values, std::vector<std::int64_t>* out) {
  // A tuple, which no number's own code can change meanwhile; of its own class as it is.
  const auto ints = pybind11::reinterpret_steal<pybind11::object>(
      PyTuple_Check(values.ptr()) != 0 ? values.inc_ref().ptr() : PySequence_Tuple(values.ptr()));
  if (!ints) throw pybind11::error_already_set();
  const Py_ssize_t count = PyTuple_GET_SIZE(ints.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(ints.ptr(), i));
    if (value == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    out->push_back(value);
  }
  return static_cast<std::size_t>(count);
}

std::vector<std::int64_t> int_tuple(const pybind11::handle& values) {
  std::vector<std::int64_t> out;
  if (PyTuple_Check(values.ptr()) != 0) {
    out.reserve(static_cast<std::size_t>(PyTuple_GET_SIZE(values.ptr())));
  }
  append_ints(values, &out);
  return out;
}

std::vector<std::uint64_t> unsigned_tuple(const pybind11::handle& values) {
  std::vector<std::uint64_t> out;
  for (const std::int64_t value : int_tuple(values)) {
    DCPX_CHECK(value >= 0, "a negative length or stride");
    out.push_back(static_cast<std::uint64_t>(value));
  }
  return out;
}

plan::Region row_region(const pybind11::handle& row) {
  plan::Region region{to_u64(field(row, 2)), unsigned_tuple(field(row, 3)),
                      unsigned_tuple(field(row, 4)), unsigned_tuple(field(row, 5))};
  DCPX_CHECK(
      region.src_strides.size() == region.dims() && region.dst_strides.size() == region.dims(),
      "lengths and strides of a region differ in number");
  return region;
}

pybind11::tuple to_tuple(const std::vector<std::int64_t>& values) {
  pybind11::tuple out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = values[i];
  return out;
}

PinnedBuffers::~PinnedBuffers() {
  for (Py_buffer& view : views_) PyBuffer_Release(&view);
}

std::byte* PinnedBuffers::add(const pybind11::handle& source, bool is_writable,
                              std::uint64_t& nbytes) {
  if (PyLong_Check(source.ptr())) {
    const unsigned long long address = PyLong_AsUnsignedLongLong(source.ptr());
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
  }
  Py_buffer view{};
  const int flags = is_writable ? PyBUF_CONTIG : PyBUF_CONTIG_RO;
  if (PyObject_GetBuffer(source.ptr(), &view, flags) != 0) throw pybind11::error_already_set();
  views_.push_back(view);
  nbytes = static_cast<std::uint64_t>(view.len);
  return static_cast<std::byte*>(view.buf);
}

}  // namespace dcpx
