// Fields of the rows that Python gives. A hundred thousand rows come in one call, so fields are
// read by Python's own C functions and not through casts of pybind11, which cost ten times as much.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>

#include "common/error.h"

namespace dcpx {

inline pybind11::handle field(const pybind11::handle& tuple, Py_ssize_t index) {
  return PyTuple_GET_ITEM(tuple.ptr(), index);
}

inline void check_tuple(const pybind11::handle& value, Py_ssize_t size, const char* what) {
  if (PyTuple_Check(value.ptr()) == 0 || PyTuple_GET_SIZE(value.ptr()) != size)
    throw pybind11::value_error(what);
}

inline std::uint64_t to_u64(const pybind11::handle& value) {
  const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
  if (number == static_cast<unsigned long long>(-1) && PyErr_Occurred() != nullptr)
    throw pybind11::error_already_set();
  return number;
}

inline std::uint8_t to_u8(const pybind11::handle& value) {
  const std::uint64_t number = to_u64(value);
  DCPX_CHECK(number <= 0xff, "a row's flags have 8 bits");
  return static_cast<std::uint8_t>(number);
}

// A CUDA ordinal; -1 for host memory.
inline int to_device(const pybind11::handle& value) {
  const long number = PyLong_AsLong(value.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  DCPX_CHECK(number >= -1 && number < 1024, "a device is -1 or an ordinal");
  return static_cast<int>(number);
}

inline bool to_bool(const pybind11::handle& value) {
  if (PyBool_Check(value.ptr()) == 0) throw pybind11::type_error("a row says True or False");
  return value.ptr() == Py_True;
}

inline std::uint32_t to_u32(const pybind11::handle& value) {
  const std::uint64_t number = to_u64(value);
  DCPX_CHECK(number <= UINT32_MAX, "a number of 32 bits");
  return static_cast<std::uint32_t>(number);
}

// The id of a file or of a save; of none, b"" is zeros.
inline std::array<std::byte, 16> to_id(const pybind11::bytes& raw) {
  const std::string text = raw;
  std::array<std::byte, 16> id{};
  DCPX_CHECK(text.empty() || text.size() == id.size(), "an id has 16 bytes");
  std::memcpy(id.data(), text.data(), text.size());
  return id;
}

}  // namespace dcpx
