// Python's plain values out of the archives that object_zip makes: no zip parser, no unpickler.
// Whatever is not exactly such an archive around exactly such a pickle is left to others.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>

#include "bind/bind.h"
#include "common/bytes.h"
#include "dcp/python.h"
#include "format/zip_object.h"

namespace dcpx {
namespace {

namespace py = pybind11;

template <typename T>
T little(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

double big_endian_double(const std::byte* at) {
  double value = 0;
  const std::uint64_t bits = __builtin_bswap64(little<std::uint64_t>(at));
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// LONG1's number of up to 8 bytes, the highest of which holds the sign.
std::int64_t signed_number(const std::byte* at, std::size_t nbytes) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, at, nbytes);
  const unsigned unused = 64 - 8 * static_cast<unsigned>(nbytes);
  return static_cast<std::int64_t>(bits << unused) >> unused;
}

// Of an archive: to look at one takes a copy of it, and only texts are long.
constexpr std::uint64_t kMaxPlainBytes = 1 << 20;

// The value of a pickle of protocol 2 that says one number, truth, text or None; null for others,
// and an error of Python's where one is set.
PyObject* plain_value(const std::byte* pickle, std::uint64_t nbytes) {
  if (nbytes < 4 || little<std::uint16_t>(pickle) != 0x0280) return nullptr;
  if (pickle[nbytes - 1] != std::byte{'.'}) return nullptr;
  const std::byte* const operand = pickle + 3;
  const std::uint64_t left = nbytes - 4;
  switch (std::to_integer<unsigned>(pickle[2])) {
    case 'N':
      return left == 0 ? py::none().release().ptr() : nullptr;
    case 0x88:
      return left == 0 ? PyBool_FromLong(1) : nullptr;
    case 0x89:
      return left == 0 ? PyBool_FromLong(0) : nullptr;
    case 'K':
      return left == 1 ? PyLong_FromLong(little<std::uint8_t>(operand)) : nullptr;
    case 'M':
      return left == 2 ? PyLong_FromLong(little<std::uint16_t>(operand)) : nullptr;
    case 'J':
      return left == 4 ? PyLong_FromLong(little<std::int32_t>(operand)) : nullptr;
    case 0x8a: {
      const std::uint64_t count = left > 0 ? little<std::uint8_t>(operand) : 0;
      const bool is_known = count >= 1 && count <= 8 && left == 1 + count;
      if (!is_known) return nullptr;
      return PyLong_FromLongLong(signed_number(operand + 1, static_cast<std::size_t>(count)));
    }
    case 'G':
      return left == 8 ? PyFloat_FromDouble(big_endian_double(operand)) : nullptr;
    case 'X': {  // its length, the text, and BINPUT 0
      if (left < 6) return nullptr;
      const std::uint64_t count = little<std::uint32_t>(operand);
      const std::byte* const text = operand + 4;
      if (left != 4 + count + 2 || text[count] != std::byte{'q'} ||
          text[count + 1] != std::byte{0}) {
        return nullptr;
      }
      return PyUnicode_DecodeUTF8(reinterpret_cast<const char*>(text),
                                  static_cast<Py_ssize_t>(count), "surrogatepass");
    }
    default:
      return nullptr;
  }
}

// Throws what Python raises for a text that is none.
py::list plain_values(const py::list& archives) {
  const py::tuple items(archives);  // a buffer may run Python code
  py::list out(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    PinnedBuffers buffers;
    std::uint64_t nbytes = 0;
    const py::handle item = PyTuple_GET_ITEM(items.ptr(), static_cast<Py_ssize_t>(i));
    if (PyLong_Check(item.ptr())) throw py::type_error("an archive is a buffer, no address");
    const std::byte* const archive = buffers.add(item, /*is_writable=*/false, nbytes);
    std::uint64_t pickle_bytes = 0;
    const std::byte* const pickle =
        nbytes <= kMaxPlainBytes ? find_object_pickle(archive, nbytes, pickle_bytes) : nullptr;
    PyObject* const value = pickle == nullptr ? nullptr : plain_value(pickle, pickle_bytes);
    if (value == nullptr && PyErr_Occurred() != nullptr) PyErr_Clear();  // others will say why
    out[i] = value != nullptr ? py::reinterpret_steal<py::object>(value)
                              : py::reinterpret_borrow<py::object>(Py_NotImplemented);
  }
  return out;
}

}  // namespace

void bind_plain(py::module_& module) {
  module.def("plain_values", &plain_values, py::arg("archives"),
             "The number, truth, text or None in each archive that is framed as a PICKLE row's; "
             "NotImplemented for any other.");
}

}  // namespace dcpx
