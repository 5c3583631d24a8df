// A load's questions of the tensors that nearly all states consist of, whole ones of torch's own
// classes, asked of the metadata's columns: no entry of the metadata is made for them.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "dcp/plan_items.h"
#include "dcp/plan_state.h"
#include "dcp/python.h"
#include "dcp/stored_columns.h"

namespace dcpx {

namespace py = pybind11;

namespace {

// The number of the entry of a name; nothing where it was made, or there is none.
std::optional<std::int64_t> entry_number(const py::handle& entries, const py::handle& fqn) {
  if (PyUnicode_CheckExact(fqn.ptr()) == 0) return std::nullopt;
  const py::handle entry = find(entries, fqn);
  if (!entry || PyLong_CheckExact(entry.ptr()) == 0) return std::nullopt;
  return entry.cast<std::int64_t>();
}

bool is_size(const py::object& shape, const StoredTensor& stored) {
  if (PyTuple_Check(shape.ptr()) == 0) return false;
  std::vector<std::int64_t> sizes;
  append_ints(shape, &sizes);
  return std::equal(sizes.begin(), sizes.end(), stored.sizes, stored.sizes + stored.ndim);
}

}  // namespace

template <typename Take, typename Leave>
void StateReader::each_target(const py::dict& state, const py::handle& entries,
                              const StoredColumns& columns, const Take& take,
                              const Leave& leave) const {
  if (PyDict_Check(entries.ptr()) == 0) throw py::type_error("a dict of entries is wanted");
  // A list of its own: what a mode of torch's answers may change the state.
  const auto items = checked(PyDict_Items(state.ptr()));
  for (Py_ssize_t at = 0; at < PyList_GET_SIZE(items.ptr()); ++at) {
    const py::handle item = PyList_GET_ITEM(items.ptr(), at);
    const py::handle fqn = PyTuple_GET_ITEM(item.ptr(), 0);
    const py::handle target = PyTuple_GET_ITEM(item.ptr(), 1);
    if (is_plain_tensor(target)) {
      const auto number = entry_number(entries, fqn);
      if (number && columns.is_tensor(*number)) {
        const py::object shape = get_attr(target, shape_);
        if (is_size(shape, columns.tensor(*number))) {
          take(fqn, target, shape, *number);
          continue;
        }
      }
    }
    leave(fqn);
  }
}

py::list StateReader::unlike(const py::dict& state, const py::handle& entries,
                             const StoredColumns& columns, bool has_dtypes) const {
  py::list found;
  const auto leave = [&](const py::handle& fqn) { found.append(fqn); };
  each_target(
      state, entries, columns,
      [&](const py::handle& fqn, const py::handle& target, const py::object& /*shape*/,
          std::int64_t number) {
        if (has_dtypes && !get_attr(target, dtype_).is(columns.dtype(number))) leave(fqn);
      },
      leave);
  return found;
}

py::tuple StateReader::whole_rows(const py::dict& state, const py::handle& entries,
                                  const StoredColumns& columns) const {
  py::list rows;
  py::list others;
  each_target(
      state, entries, columns,
      [&](const py::handle& fqn, const py::handle& /*target*/, const py::object& shape,
          std::int64_t number) { rows.append(py::make_tuple(fqn, shape, number, shape)); },
      [&](const py::handle& fqn) {
        others.append(py::make_tuple(rows.size(), fqn));
        rows.append(py::none());
      });
  return py::make_tuple(rows, others);
}

}  // namespace dcpx
