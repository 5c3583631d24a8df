// What a save asks of each of its items in Python: rows before the write, results after it.
//
// Nearly all items of a state are contiguous tensors of the host that the plan takes whole. Their
// rows are made here; the others are left to Python (`WriteTable`), which says what is wrong with
// those that cannot be kept.
#include <pybind11/pybind11.h>

#include <cstdint>

#include "bind/bind.h"
#include "bind/fields.h"
#include "bind/objects.h"

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
             pin_memory = interned("pin_memory"), is_nested = interned("is_nested"),
             is_quantized = interned("is_quantized"), is_contiguous = interned("is_contiguous"),
             is_neg = interned("is_neg"), is_conj = interned("is_conj"), shape = interned("shape"),
             stride = interned("stride"), nbytes = interned("nbytes"),
             itemsize = interned("itemsize"), data_ptr = interned("data_ptr"),
             storage_offset = interned("storage_offset"),
             untyped_storage = interned("untyped_storage"),
             size_in_bytes = interned("size_in_bytes"), storage_data = interned("storage_data"),
             sizes = interned("sizes"), local = interned("_local_tensor"),
             relative_path = interned("relative_path"), length = interned("length"),
             transform_descriptors = interned("transform_descriptors");
};

py::object fast_sequence(const py::handle& values) {
  return checked(PySequence_Fast(values.ptr(), "a list is wanted"));
}

bool is_origin(const py::object& offset) {
  if (offset.is_none()) return true;
  if (PyTuple_Check(offset.ptr()) == 0) return false;
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(offset.ptr()); ++d) {
    const long long at = PyLong_AsLongLong(PyTuple_GET_ITEM(offset.ptr(), d));
    if (at == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (at != 0) return false;
  }
  return true;
}

class SaveRows {
 public:
  explicit SaveRows(const py::dict& classes)
      : tensor_(classes["Tensor"]),
        parameter_(classes["Parameter"]),
        dtensor_(classes["DTensor"]),
        strided_(classes["strided"]),
        byte_io_(classes["BYTE_IO"]),
        row_class_(classes["WriteRow"]),
        result_class_(classes["WriteResult"]),
        info_class_(classes["StorageInfo"]),
        hooks_(classes["hooks"].cast<py::tuple>()) {
    if (PyType_Check(row_class_.ptr()) == 0 ||
        PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(row_class_.ptr()), &PyTuple_Type) == 0) {
      throw py::type_error("WriteRow is no class of tuples");
    }
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
           !is_true(get_attr(tensor, names_.is_nested)) &&
           get_attr(tensor, names_.layout).is(strided_) &&
           is_true(call_method(tensor, names_.is_contiguous)) &&
           !is_true(call_method(tensor, names_.is_neg)) &&
           !is_true(call_method(tensor, names_.is_conj)) &&
           !is_true(get_attr(tensor, names_.is_quantized));
  }

  // Null where the tensor has no memory, not all of it, or other dimensions than the plan says.
  py::object row_of(const py::handle& file, const py::object& fqn, const py::object& tensor,
                    const py::object& about, const py::dict& paths, const py::dict& types,
                    const py::function& add_type) const {
    const py::object shape = get_attr(tensor, names_.shape);
    const py::object offsets = get_attr(get_attr(about, names_.chunk), names_.offsets);
    if (PyTuple_Check(shape.ptr()) == 0 || PyTuple_Check(offsets.ptr()) == 0 ||
        PyTuple_GET_SIZE(shape.ptr()) != PyTuple_GET_SIZE(offsets.ptr())) {
      return {};
    }
    const py::object address = call_method(tensor, names_.data_ptr);
    const py::object nbytes = get_attr(tensor, names_.nbytes);
    const py::object storage = call_method(tensor, names_.untyped_storage);
    const std::uint64_t begin = to_u64(call_method(tensor, names_.storage_offset));
    const std::uint64_t itemsize = to_u64(get_attr(tensor, names_.itemsize));
    const std::uint64_t held = to_u64(call_method(storage, names_.nbytes));
    if (!is_true(address) || begin * itemsize + to_u64(nbytes) > held) return {};
    const py::object type = type_of(get_attr(tensor, names_.dtype),
                                    get_attr(about, names_.properties), types, add_type);
    const py::handle path = find(paths, fqn);
    const py::tuple fields = py::make_tuple(
        file, kTensor, type, address, nbytes, shape, call_method(tensor, names_.stride), true, fqn,
        get_attr(about, names_.size), offsets, path ? path : py::none(), kHostMemory);
    const py::tuple arguments = py::make_tuple(fields);
    return checked(PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(row_class_.ptr()),
                                       arguments.ptr(), nullptr));
  }

  // By torch_dcpx.item_rows.type_key.
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
  py::object tensor_, parameter_, dtensor_, strided_, byte_io_, row_class_, result_class_,
      info_class_;
  py::tuple no_arguments_;
  py::tuple hooks_;  // names of attributes by which a tensor says itself what it is
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
