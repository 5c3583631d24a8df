// What a save asks of each of its items in Python: rows before the write, results after it.
//
// Nearly all items of a state are contiguous tensors of the host that the plan takes whole. Their
// rows are made here; the others are left to Python (`WriteTable`), which says what is wrong with
// those that cannot be kept.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "dcp/dcp.h"
#include "dcp/fields.h"
#include "dcp/objects.h"
#include "dcp/tensor_fields.h"

namespace dcpx {
namespace {

namespace py = pybind11;

constexpr int kTensor = 0;       // ItemKind of csrc/format/file_footer.h
constexpr int kHostMemory = -1;  // in the place of a CUDA ordinal

struct Names {
  py::object index = interned("index"), type = interned("type"),
             tensor_data = interned("tensor_data"), fqn = interned("fqn"),
             offset = interned("offset"), chunk = interned("chunk"), offsets = interned("offsets"),
             properties = interned("properties"), size = interned("size"),
             dtype = interned("dtype"), layout = interned("layout"),
             requires_grad = interned("requires_grad"), memory_format = interned("memory_format"),
             pin_memory = interned("pin_memory"), shape = interned("shape"),
             stride = interned("stride"), nbytes = interned("nbytes"),
             size_in_bytes = interned("size_in_bytes"), storage_data = interned("storage_data"),
             sizes = interned("sizes"), local = interned("_local_tensor"),
             relative_path = interned("relative_path"), length = interned("length"),
             transform_descriptors = interned("transform_descriptors");
};

py::object fast_sequence(const py::handle& values) {
  return checked(PySequence_Fast(values.ptr(), "a list is wanted"));
}

class SaveRows {
 public:
  explicit SaveRows(const py::dict& classes)
      : tensor_(classes["Tensor"]),
        parameter_(classes["Parameter"]),
        dtensor_(classes["DTensor"]),
        byte_io_(classes["BYTE_IO"]),
        row_class_(classes["WriteRow"]),
        result_class_(classes["WriteResult"]),
        info_class_(classes["StorageInfo"]),
        hooks_(classes["hooks"].cast<py::tuple>()),
        fields_(classes["strided"]) {
    check_tuple_class(row_class_);
  }

  py::tuple plain_rows(const py::object& items, const py::object& files, const py::dict& state,
                       const py::dict& paths, const py::dict& types, const py::function& add_type,
                       const py::object& is_host) const {
    const py::object all = fast_sequence(items);
    const py::object its_files = fast_sequence(files);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(all.ptr());
    if (PySequence_Fast_GET_SIZE(its_files.ptr()) != count) {
      throw py::value_error("items and files differ in number");
    }
    py::list rows;
    py::list owners;
    py::list others;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const auto item = py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(all.ptr(), i));
      if (get_attr(item, names_.type).is(byte_io_)) {
        rows.append(py::none());
        continue;
      }
      const py::object index = get_attr(item, names_.index);
      const py::object fqn = get_attr(index, names_.fqn);
      const auto tensor = py::reinterpret_borrow<py::object>(find(state, fqn));
      const py::object about = get_attr(item, names_.tensor_data);
      py::object row;
      if (tensor && !about.is_none() && is_origin(get_attr(index, names_.offset)) &&
          is_plain(tensor, is_host)) {
        const py::handle file = PySequence_Fast_GET_ITEM(its_files.ptr(), i);
        row = row_of(file, fqn, tensor, about, paths, types, add_type);
      }
      if (row) {
        rows.append(row);
        owners.append(tensor);
      } else {
        rows.append(py::none());
        others.append(i);
      }
    }
    return py::make_tuple(rows, owners, others);
  }

  // Numbers of the items that are not of what a state has: no such name, or a tensor of other sizes
  // or another dtype. Of a DTensor its part is looked at; what is neither is not looked at.
  py::list strangers(const py::object& items, const py::dict& state) const {
    const py::object all = fast_sequence(items);
    py::list found;
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(all.ptr()); ++i) {
      const py::handle item = PySequence_Fast_GET_ITEM(all.ptr(), i);
      auto value = py::reinterpret_borrow<py::object>(
          find(state, get_attr(get_attr(item, names_.index), names_.fqn)));
      const py::object about = get_attr(item, names_.tensor_data);
      const bool is_bytes = about.is_none();
      if (value && !is_bytes) {
        auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
        if (type == dtensor_.ptr()) {
          value = get_attr(value, names_.local);
        } else if (type != tensor_.ptr() && type != parameter_.ptr()) {
          continue;
        }
      }
      if (!value || (!is_bytes && !is_as_planned(value, about))) found.append(i);
    }
    return found;
  }

  py::list results(const py::object& items, const py::object& paths, const py::list& offsets,
                   const py::list& lengths, const py::object& descriptors) const {
    const py::object all = fast_sequence(items);
    const py::object its_paths = fast_sequence(paths);
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(all.ptr());
    if (PySequence_Fast_GET_SIZE(its_paths.ptr()) != count ||
        PyList_GET_SIZE(offsets.ptr()) != count || PyList_GET_SIZE(lengths.ptr()) != count) {
      throw py::value_error("items and their places differ in number");
    }
    py::list made;
    for (Py_ssize_t i = 0; i < count; ++i) {
      const py::handle length = PyList_GET_ITEM(lengths.ptr(), i);
      const py::object info = new_object(info_class_, no_arguments_);
      set_field(info, names_.relative_path, PySequence_Fast_GET_ITEM(its_paths.ptr(), i));
      set_field(info, names_.offset, PyList_GET_ITEM(offsets.ptr(), i));
      set_field(info, names_.length, length);
      set_field(info, names_.transform_descriptors, descriptors);
      const py::object result = new_object(result_class_, no_arguments_);
      set_field(result, names_.index,
                get_attr(PySequence_Fast_GET_ITEM(all.ptr(), i), names_.index));
      set_field(result, names_.size_in_bytes, length);
      set_field(result, names_.storage_data, info);
      made.append(result);
    }
    return made;
  }

 private:
  bool is_as_planned(const py::object& tensor, const py::object& about) const {
    const py::object dtype = get_attr(get_attr(about, names_.properties), names_.dtype);
    return get_attr(tensor, names_.dtype).is(dtype) &&
           get_attr(tensor, names_.shape)
               .equal(get_attr(get_attr(about, names_.chunk), names_.sizes));
  }

  // Whether an address says all of a tensor's values.
  bool is_plain(const py::object& tensor, const py::object& is_host) const {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()));
    return (type == tensor_.ptr() || type == parameter_.ptr()) && !has_own(tensor, hooks_) &&
           is_true(checked(PyObject_CallOneArg(is_host.ptr(), tensor.ptr()))) &&
           fields_.is_plain(tensor);
  }

  // Null where the tensor has no memory, not all of it, or another shape than the plan says.
  py::object row_of(const py::handle& file, const py::object& fqn, const py::object& tensor,
                    const py::object& about, const py::dict& paths, const py::dict& types,
                    const py::function& add_type) const {
    const py::object shape = get_attr(tensor, names_.shape);
    const py::object chunk = get_attr(about, names_.chunk);
    const py::object offsets = get_attr(chunk, names_.offsets);
    if (PyTuple_Check(shape.ptr()) == 0 || !shape.equal(get_attr(chunk, names_.sizes)) ||
        PyTuple_Check(offsets.ptr()) == 0 ||
        PyTuple_GET_SIZE(shape.ptr()) != PyTuple_GET_SIZE(offsets.ptr())) {
      return {};
    }
    const py::object nbytes = get_attr(tensor, names_.nbytes);
    const TensorFields::Memory memory = fields_.memory(tensor);
    if (memory.address == 0 || memory.storage_begin + to_u64(nbytes) > memory.storage_bytes) {
      return {};
    }
    const py::object type = type_of(get_attr(tensor, names_.dtype),
                                    get_attr(about, names_.properties), types, add_type);
    const py::handle path = find(paths, fqn);
    return new_tuple(row_class_, py::make_tuple(file, kTensor, type, memory.address, nbytes, shape,
                                                call_method(tensor, names_.stride), true, fqn,
                                                get_attr(about, names_.size), offsets,
                                                path ? path : py::none(), kHostMemory));
  }

  // By torch_dcpx.writer.rows.type_key.
  py::object type_of(const py::object& dtype, const py::object& properties, const py::dict& types,
                     const py::function& add_type) const {
    const py::tuple key = py::make_tuple(
        dtype, get_attr(properties, names_.dtype), get_attr(properties, names_.layout),
        get_attr(properties, names_.requires_grad), get_attr(properties, names_.memory_format),
        get_attr(properties, names_.pin_memory), true);
    const py::handle known = find(types, key);
    return known ? py::reinterpret_borrow<py::object>(known) : add_type(dtype, properties);
  }

  Names names_;
  py::object tensor_, parameter_, dtensor_, byte_io_, row_class_, result_class_, info_class_;
  py::tuple no_arguments_;
  py::tuple hooks_;  // names of attributes by which a tensor says itself what it is
  TensorFields fields_;
};

}  // namespace

void bind_save_rows(py::module_& module) {
  py::class_<SaveRows>(module, "SaveRows", "What a save makes in Python of each of its items.")
      .def(py::init<const py::dict&>(), py::arg("classes"))
      .def("plain_rows", &SaveRows::plain_rows, py::arg("items"), py::arg("files"),
           py::arg("state"), py::arg("paths"), py::arg("types"), py::arg("add_type"),
           py::arg("is_host"),
           "(rows, tensors of the rows, numbers of the tensor items without a row).")
      .def("strangers", &SaveRows::strangers, py::arg("items"), py::arg("state"),
           "Numbers of the items whose name, sizes or dtype are not those of the state's values.")
      .def("results", &SaveRows::results, py::arg("items"), py::arg("paths"), py::arg("offsets"),
           py::arg("lengths"), py::arg("descriptors"), "DCP's WriteResult of each item.");
}

}  // namespace dcpx
