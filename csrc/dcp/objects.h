// Instances of Python classes, a hundred thousand in one call: by Python's own C functions and not
// through casts of pybind11, which cost ten times as much. REQUIRES, everywhere: the GIL.
#pragma once

#include <pybind11/pybind11.h>

namespace dcpx {

inline pybind11::object checked(PyObject* owned) {
  if (owned == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(owned);
}

inline pybind11::object interned(const char* name) {
  return checked(PyUnicode_InternFromString(name));
}

// Attribute of an object. Throws what Python raises.
inline pybind11::object get_attr(const pybind11::handle& object, const pybind11::object& name) {
  return checked(PyObject_GetAttr(object.ptr(), name.ptr()));
}

// Past a frozen dataclass's own __setattr__, as its constructor does.
inline void set_field(const pybind11::object& object, const pybind11::object& name,
                      const pybind11::handle& value) {
  if (PyObject_GenericSetAttr(object.ptr(), name.ptr(), value.ptr()) != 0) {
    throw pybind11::error_already_set();
  }
}

inline pybind11::object call_method(const pybind11::handle& object, const pybind11::object& name) {
  return checked(PyObject_CallMethodNoArgs(object.ptr(), name.ptr()));
}

// As `object.__new__` makes it, without its constructor.
inline pybind11::object new_object(const pybind11::object& its_class,
                                   const pybind11::tuple& no_arguments) {
  return checked(PyBaseObject_Type.tp_new(reinterpret_cast<PyTypeObject*>(its_class.ptr()),
                                          no_arguments.ptr(), nullptr));
}

inline bool is_true(const pybind11::object& value) {
  const int truth = PyObject_IsTrue(value.ptr());
  if (truth < 0) throw pybind11::error_already_set();
  return truth != 0;
}

// The value of an exact dict, or of a class derived from it, under a key; null where there is none.
inline pybind11::handle find(const pybind11::handle& dict, const pybind11::handle& key) {
  PyObject* found = PyDict_GetItemWithError(dict.ptr(), key.ptr());
  if (found == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return found;
}

// Whether an object's own __dict__, which its class does not speak for, has one of `names`.
inline bool has_own(const pybind11::handle& object, const pybind11::tuple& names) {
  const pybind11::object attributes = checked(PyObject_GenericGetDict(object.ptr(), nullptr));
  if (PyDict_GET_SIZE(attributes.ptr()) == 0) return false;
  for (const pybind11::handle& name : names) {
    if (find(attributes, name)) return true;
  }
  return false;
}

}  // namespace dcpx
