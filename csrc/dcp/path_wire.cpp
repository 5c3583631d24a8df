// The paths of flattened names: most are the name cut at some of its dots, and so are sent.
#include <charconv>
#include <string>

#include "dcp/item_wire.h"
#include "dcp/python.h"

namespace dcpx {
namespace {

namespace py = pybind11;

constexpr std::uint64_t kIsInt = 1;    // of a part
constexpr std::uint64_t kIsApart = 1;  // of a path: its parts are not those of the name

bool is_path(PyObject* path) {
  if (PyTuple_CheckExact(path) == 0) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(path); ++i) {
    std::int64_t number = 0;
    PyObject* part = PyTuple_GET_ITEM(path, i);
    if (PyUnicode_CheckExact(part) == 0 && !to_plain_int(part, &number)) return false;
  }
  return true;
}

// The parts' bytes, and whether each is an int, where the dotted path is the name.
bool cut(std::string_view name, PyObject* path, std::vector<std::uint64_t>* parts) {
  parts->clear();
  const Py_ssize_t count = PyTuple_GET_SIZE(path);
  std::string storage;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* part = PyTuple_GET_ITEM(path, i);
    std::int64_t number = 0;
    const bool is_int = to_plain_int(part, &number);
    if (is_int) storage = std::to_string(number);
    const std::string_view text = is_int ? std::string_view(storage) : utf8_of(part, &storage);
    if (i > 0) {
      if (name.empty() || name.front() != '.') return false;
      name.remove_prefix(1);
    }
    if (name.substr(0, text.size()) != text) return false;
    name.remove_prefix(text.size());
    parts->push_back(text.size() << 1 | (is_int ? kIsInt : 0));
  }
  return name.empty();
}

py::object int_of(std::string_view text) {
  std::int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) {
    wire::refuse("a part of a path is no number");
  }
  return py::int_(number);
}

}  // namespace

bool pack_paths(WireWriter& out, const py::handle& paths) {
  if (PyDict_CheckExact(paths.ptr()) == 0) return false;
  PyObject* key = nullptr;
  PyObject* path = nullptr;
  Py_ssize_t at = 0;
  while (PyDict_Next(paths.ptr(), &at, &key, &path) != 0) {
    if (PyUnicode_CheckExact(key) == 0 || !is_path(path)) return false;
  }
  wire::Writer& column = out.column(kPaths);
  column.put(1);
  // A snapshot: what allocates may run code that changes the dict.
  const auto rows = py::reinterpret_steal<py::list>(PyDict_Items(paths.ptr()));
  if (!rows) throw py::error_already_set();
  std::vector<std::uint64_t> parts;
  std::string storage;
  for (const py::handle& row : rows) {
    key = PyTuple_GET_ITEM(row.ptr(), 0);
    path = PyTuple_GET_ITEM(row.ptr(), 1);
    out.put_name(key);
    const bool is_cut = cut(utf8_of(key, &storage), path, &parts);
    const auto count = static_cast<std::uint64_t>(PyTuple_GET_SIZE(path));
    column.put(count << 1 | (is_cut ? 0 : kIsApart));
    if (is_cut) {
      for (const std::uint64_t part : parts) column.put(part);
      continue;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(path); ++i) {
      std::int64_t number = 0;
      PyObject* part = PyTuple_GET_ITEM(path, i);
      const bool is_int = to_plain_int(part, &number);
      column.put(is_int ? kIsInt : 0);
      if (is_int) {
        out.column(kRest).put_signed(number);
      } else {
        out.put_name(part);
      }
    }
  }
  return true;
}

py::object unpack_paths(WireReader& in) {
  wire::Reader& column = in.column(kPaths);
  if (column.is_done()) return py::none();
  if (column.get() != 1) wire::refuse("paths of an unknown form");
  py::dict paths;
  while (!column.is_done()) {
    const std::size_t number = in.get_name();
    const std::uint64_t head = column.get();
    if (head >> 1 > column.left()) wire::refuse("a path is cut off");
    const auto count = static_cast<std::size_t>(head >> 1);
    py::tuple path(count);
    std::string_view rest = in.text(number);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint64_t part = column.get();
      if ((head & kIsApart) != 0) {
        path[i] = (part & kIsInt) != 0 ? py::object(py::int_(in.column(kRest).get_signed()))
                                       : in.name(in.get_name());
        continue;
      }
      const std::size_t dot = i > 0 ? 1 : 0;
      if (rest.size() < dot || part >> 1 > rest.size() - dot) {
        wire::refuse("a path is longer than its name");
      }
      const std::string_view text = rest.substr(dot, static_cast<std::size_t>(part >> 1));
      rest.remove_prefix(dot + text.size());
      path[i] = (part & kIsInt) != 0 ? int_of(text) : interned_text(text);
    }
    if (PyDict_SetItem(paths.ptr(), in.name(number).ptr(), path.ptr()) != 0) {
      throw py::error_already_set();
    }
  }
  return paths;
}

}  // namespace dcpx
