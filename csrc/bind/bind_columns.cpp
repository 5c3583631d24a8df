// Lists of Python's numbers and texts as columns of int64, for metadata of a million objects.
// Exact types only: nothing that a class of the user's own could answer is ever asked, so no
// Python code runs while a list is walked.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bind/bind.h"
#include "dcp/python.h"
#include "format/column_checks.h"

namespace dcpx {
namespace {

namespace py = pybind11;

template <typename T>
py::bytes to_bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

[[noreturn]] void refuse(PyObject* found, const char* wanted) {
  throw py::type_error(std::string("a ") + Py_TYPE(found)->tp_name + " where " + wanted +
                       " belongs");
}

// Throws TypeError for anything but an exact int, OverflowError beyond int64.
std::int64_t to_int64(PyObject* value) {
  if (!PyLong_CheckExact(value)) refuse(value, "an int");
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

std::int64_t to_size(PyObject* value) {
  const std::int64_t number = to_int64(value);
  if (number < 0) throw py::value_error("a negative number where a size belongs");
  return number;
}

// The number of an exact str, the next one where it is new.
std::int64_t number_of(PyObject* text, const py::dict& numbers) {
  if (!PyUnicode_CheckExact(text)) refuse(text, "a str");
  PyObject* known = PyDict_GetItemWithError(numbers.ptr(), text);
  if (known != nullptr) return to_int64(known);
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  const auto number = static_cast<std::int64_t>(numbers.size());
  if (PyDict_SetItem(numbers.ptr(), text, py::int_(number).ptr()) != 0) {
    throw py::error_already_set();
  }
  return number;
}

py::bytes text_column(const py::list& texts, const py::dict& numbers) {
  std::vector<std::int64_t> column;
  column.reserve(texts.size());
  for (std::size_t at = 0; at < texts.size(); ++at) {
    column.push_back(number_of(PyList_GET_ITEM(texts.ptr(), static_cast<Py_ssize_t>(at)), numbers));
  }
  return to_bytes(column);
}

py::bytes size_column(const py::list& values, bool has_none) {
  std::vector<std::int64_t> column;
  column.reserve(values.size());
  for (std::size_t at = 0; at < values.size(); ++at) {
    PyObject* value = PyList_GET_ITEM(values.ptr(), static_cast<Py_ssize_t>(at));
    column.push_back(has_none && value == Py_None ? -1 : to_size(value));
  }
  return to_bytes(column);
}

py::tuple row_columns(const py::list& rows, bool has_none) {
  std::vector<std::int64_t> counts;
  std::vector<std::int64_t> flat;
  counts.reserve(rows.size());
  for (std::size_t at = 0; at < rows.size(); ++at) {
    PyObject* row = PyList_GET_ITEM(rows.ptr(), static_cast<Py_ssize_t>(at));
    if (has_none && row == Py_None) {
      counts.push_back(-1);
      continue;
    }
    if (!PyTuple_Check(row)) refuse(row, "a tuple");
    const Py_ssize_t count = PyTuple_GET_SIZE(row);
    counts.push_back(count);
    for (Py_ssize_t i = 0; i < count; ++i) flat.push_back(to_size(PyTuple_GET_ITEM(row, i)));
  }
  return py::make_tuple(to_bytes(counts), to_bytes(flat));
}

bool is_path(PyObject* path) {
  if (!PyTuple_CheckExact(path)) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(path); ++i) {
    PyObject* key = PyTuple_GET_ITEM(path, i);
    if (PyUnicode_CheckExact(key)) continue;
    int overflow = 0;
    if (!PyLong_CheckExact(key)) return false;
    PyLong_AsLongLongAndOverflow(key, &overflow);
    if (overflow != 0) return false;
  }
  return true;
}

py::object path_columns(const py::list& paths, const py::dict& numbers) {
  for (const py::handle& path : paths) {
    if (!is_path(path.ptr())) return py::none();
  }
  std::vector<std::int64_t> counts;
  std::vector<std::uint8_t> tags;
  std::vector<std::int64_t> values;
  counts.reserve(paths.size());
  for (const py::handle& path : paths) {
    const Py_ssize_t count = PyTuple_GET_SIZE(path.ptr());
    counts.push_back(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* key = PyTuple_GET_ITEM(path.ptr(), i);
      const bool is_int = PyLong_CheckExact(key);
      tags.push_back(is_int ? 1 : 0);
      values.push_back(is_int ? to_int64(key) : number_of(key, numbers));
    }
  }
  return py::make_tuple(to_bytes(counts), to_bytes(tags), to_bytes(values));
}

// An exported buffer, held as long as this lives.
class HeldColumn {
 public:
  explicit HeldColumn(const py::handle& source) {
    std::uint64_t nbytes = 0;
    column_.begin = buffers_.add(source, /*is_writable=*/false, nbytes);
    column_.nbytes = nbytes;
  }
  const RawColumn& column() const { return column_; }
  RawNumbers numbers() const { return RawNumbers(column_); }

 private:
  PinnedBuffers buffers_;
  RawColumn column_;
};

bool py_have_ends(const py::buffer& begins, const py::buffer& lengths) {
  const HeldColumn a(begins);
  const HeldColumn b(lengths);
  if (a.numbers().count() != b.numbers().count()) {
    throw py::value_error("as many begins as lengths are wanted");
  }
  return have_ends(a.numbers(), b.numbers());
}

bool py_are_within(const py::buffer& values, std::int64_t low, std::int64_t high) {
  return are_within(HeldColumn(values).numbers(), low, high);
}

int py_highest(const py::buffer& values) { return highest(HeldColumn(values).column()); }

std::uint64_t py_total(const py::buffer& values, const py::object& widths) {
  const HeldColumn counts(values);
  if (widths.is_none()) return total(counts.numbers(), nullptr);
  const HeldColumn held(widths);
  const RawNumbers each = held.numbers();
  if (each.count() != counts.numbers().count()) {
    throw py::value_error("as many widths as values are wanted");
  }
  return total(counts.numbers(), &each);
}

void check_tags(const HeldColumn& tags, const HeldColumn& values) {
  if (values.numbers().count() != tags.column().nbytes) {
    throw py::value_error("as many tags as values are wanted");
  }
}

bool py_are_keys(const py::buffer& tags, const py::buffer& values, std::int64_t strings) {
  const HeldColumn tag(tags);
  const HeldColumn held(values);
  check_tags(tag, held);
  return are_keys(tag.column(), held.numbers(), strings);
}

std::uint64_t py_longest_list(const py::buffer& tags, const py::buffer& values) {
  const HeldColumn tag(tags);
  const HeldColumn held(values);
  check_tags(tag, held);
  return longest_list(tag.column(), held.numbers());
}

}  // namespace

void bind_columns(py::module_& module) {
  module.def("text_column", &text_column, py::arg("texts"), py::arg("numbers"),
             "The numbers of texts by `numbers`, which new ones are added to.");
  module.def("size_column", &size_column, py::arg("values"), py::arg("has_none"),
             "Ints in [0, 2**63); None is -1 where it may be.");
  module.def("row_columns", &row_columns, py::arg("rows"), py::arg("has_none"),
             "Lengths (-1: None, where it may be) and all values of tuples of such ints.");
  module.def("path_columns", &path_columns, py::arg("paths"), py::arg("numbers"),
             "Lengths, tags (1: int) and values or numbers of tuples of str and int64; None, and "
             "no text added, where one is anything else.");
  module.def("have_ends", &py_have_ends, py::arg("begins"), py::arg("lengths"),
             "Whether no sum of two int64 columns leaves int64.");
  module.def("are_within", &py_are_within, py::arg("values"), py::arg("low"), py::arg("high"),
             "Whether all numbers of an int64 column are in [low, high].");
  module.def("highest", &py_highest, py::arg("values"), "The highest byte, 0 of none.");
  module.def("total", &py_total, py::arg("values"), py::arg("widths") = py::none(),
             "The sum of what is positive in an int64 column, each times its width; 2**63 where "
             "it is that or more.");
  module.def("are_keys", &py_are_keys, py::arg("tags"), py::arg("values"), py::arg("strings"),
             "Whether each value with tag 0 numbers one of so many strings.");
  module.def("longest_list", &py_longest_list, py::arg("tags"), py::arg("values"),
             "The length of the longest list that values with another tag index; 2**63 where one "
             "is negative.");
}

}  // namespace dcpx
