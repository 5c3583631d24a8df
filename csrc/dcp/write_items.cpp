// A rank's save plan in one call, as DCP's WriteItems.
#include <pybind11/pybind11.h>

#include "dcp/plan_items.h"

namespace dcpx {
namespace {

namespace py = pybind11;

py::object element(const py::handle& row, Py_ssize_t at) {
  return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(row.ptr(), at));
}

// (fqn, tensor): the whole of it.
py::object whole_tensor(ItemMaker& maker, const py::handle& row) {
  const py::object tensor = element(row, 1);
  const py::object sizes = maker.as_size(get_attr(tensor, maker.names.shape));
  const py::object origin = maker.zeros(static_cast<std::size_t>(PyTuple_GET_SIZE(sizes.ptr())));
  return maker.tensor_write(maker.metadata_index(element(row, 0), origin, py::none()),
                            /*is_shard=*/false, maker.chunk(origin, sizes),
                            maker.properties(tensor, py::object()), sizes);
}

// (fqn, local tensor, whether it requires a gradient, offsets, sizes, sizes of the whole).
py::object shard(ItemMaker& maker, const py::handle& row) {
  const py::object offsets = maker.as_size(element(row, 3));
  const py::object chunk = maker.chunk(offsets, maker.as_size(element(row, 4)));
  return maker.tensor_write(maker.metadata_index(element(row, 0), offsets, py::none()),
                            /*is_shard=*/true, chunk,
                            maker.properties(element(row, 1), element(row, 2)),
                            maker.as_size(element(row, 5)));
}

}  // namespace

py::list make_write_items(ItemMaker& maker, const py::list& rows) {
  py::list items;
  for (const py::handle& row : rows) {
    const Py_ssize_t fields = PyTuple_Check(row.ptr()) != 0 ? PyTuple_GET_SIZE(row.ptr()) : 0;
    if (PyList_Check(row.ptr()) != 0) {
      for (const py::handle& item : row) items.append(item);
    } else if (PyUnicode_Check(row.ptr()) != 0) {
      items.append(maker.byte_write(py::reinterpret_borrow<py::object>(row)));
    } else if (fields == 2) {
      items.append(whole_tensor(maker, row));
    } else if (fields == 6) {
      items.append(shard(maker, row));
    } else {
      throw py::value_error("a row is (fqn, tensor) or that of a shard");
    }
  }
  return items;
}

}  // namespace dcpx
