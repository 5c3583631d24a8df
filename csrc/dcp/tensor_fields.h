// What a tensor says of itself and of its memory, by its attributes: no torch header.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "dcp/fields.h"
#include "dcp/objects.h"

namespace dcpx {

// Names of attributes, interned once. REQUIRES, everywhere: the GIL.
class TensorFields {
 public:
  // Where a tensor's elements are. Bytes.
  struct Memory {
    std::uint64_t address;        // of its first element; 0: it has none
    std::uint64_t storage_begin;  // of its first element in its storage
    std::uint64_t storage_bytes;
  };

  explicit TensorFields(const pybind11::object& strided) : strided_(strided) {}

  // Whether the tensor's bytes, in C order, are all of its values: no nested, sparse or quantized
  // one, none that is to be negated or conjugated when it is looked at.
  bool is_plain(const pybind11::handle& tensor) const {
    return !is_true(get_attr(tensor, is_nested_)) && get_attr(tensor, layout_).is(strided_) &&
           is_true(call_method(tensor, is_contiguous_)) && !is_true(call_method(tensor, is_neg_)) &&
           !is_true(call_method(tensor, is_conj_)) && !is_true(get_attr(tensor, is_quantized_));
  }

  std::uint64_t itemsize(const pybind11::handle& tensor) const {
    return to_u64(get_attr(tensor, itemsize_));
  }

  Memory memory(const pybind11::handle& tensor) const {
    return {to_u64(call_method(tensor, data_ptr_)),
            to_u64(call_method(tensor, storage_offset_)) * itemsize(tensor),
            to_u64(call_method(call_method(tensor, untyped_storage_), nbytes_))};
  }

 private:
  pybind11::object strided_;
  pybind11::object is_nested_ = interned("is_nested"), layout_ = interned("layout"),
                   is_contiguous_ = interned("is_contiguous"), is_neg_ = interned("is_neg"),
                   is_conj_ = interned("is_conj"), is_quantized_ = interned("is_quantized"),
                   itemsize_ = interned("itemsize"), data_ptr_ = interned("data_ptr"),
                   storage_offset_ = interned("storage_offset"),
                   untyped_storage_ = interned("untyped_storage"), nbytes_ = interned("nbytes");
};

// Whether an item's offset is None or that of the tensor's first element.
inline bool is_origin(const pybind11::object& offset) {
  if (offset.is_none()) return true;
  if (PyTuple_Check(offset.ptr()) == 0) return false;
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(offset.ptr()); ++d) {
    PyObject* at = PyTuple_GET_ITEM(offset.ptr(), d);
    int overflow = 0;
    if (PyLong_CheckExact(at) == 0 || PyLong_AsLongLongAndOverflow(at, &overflow) != 0) {
      return false;
    }
  }
  return true;
}

// An instance of a class of tuples, without its constructor. REQUIRES: `its_class` is one.
inline pybind11::object new_tuple(const pybind11::object& its_class,
                                  const pybind11::tuple& fields) {
  const pybind11::tuple arguments = pybind11::make_tuple(fields);
  return checked(PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(its_class.ptr()),
                                     arguments.ptr(), nullptr));
}

inline void check_tuple_class(const pybind11::object& its_class) {
  if (PyType_Check(its_class.ptr()) == 0 ||
      PyType_IsSubtype(reinterpret_cast<PyTypeObject*>(its_class.ptr()), &PyTuple_Type) == 0) {
    throw pybind11::type_error("a class of tuples is wanted");
  }
}

}  // namespace dcpx
