// csrc/format for Python: checksums for whole buffers, lists of a zip's records, scans of pickles.
// Used by the slow paths; the engines call the C++ directly.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <string>
#include <vector>

#include "bind/bind.h"
#include "dcp/gil.h"
#include "format/crc32.h"
#include "format/pickle_scan.h"
#include "format/zip_directory.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// The bytes of any contiguous object of the buffer protocol, read-only ones included. Holds the
// buffer, so that its owner can't resize it while the GIL is released.
class Bytes {  // REQUIRES: the GIL to construct and to destroy.
 public:
  explicit Bytes(const py::object& owner) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  ~Bytes() { PyBuffer_Release(&view_); }

  const std::byte* data() const { return static_cast<const std::byte*>(view_.buf); }
  std::size_t size() const { return static_cast<std::size_t>(view_.len); }

 private:
  Py_buffer view_{};
};

class BytesReader : public RangeReader {
 public:
  explicit BytesReader(const Bytes& bytes) : bytes_(bytes) {}
  void read(std::uint64_t offset, std::size_t nbytes, std::byte* into) override {
    std::copy_n(bytes_.data() + offset, nbytes, into);
  }

 private:
  const Bytes& bytes_;
};

std::uint32_t py_crc32(const py::object& buffer, std::uint32_t crc) {
  const Bytes bytes(buffer);
  const ReleasedGil unlocked;
  return crc32(crc, bytes.data(), bytes.size());
}

std::vector<std::string> implementation_names() {
  std::vector<std::string> names;
  for (const Crc32Implementation implementation : crc32_implementations()) {
    names.emplace_back(crc32_implementation_name(implementation));
  }
  return names;
}

py::list zip_records(const py::object& buffer) {
  const Bytes bytes(buffer);
  std::vector<ZipRecord> records;
  {
    const ReleasedGil unlocked;
    BytesReader reader(bytes);
    records = list_zip_records(reader, bytes.size());
  }
  py::list rows;
  for (const ZipRecord& record : records) {
    const py::str name(py::reinterpret_steal<py::object>(PyUnicode_DecodeUTF8(
        record.name.data(), static_cast<Py_ssize_t>(record.name.size()), "backslashreplace")));
    rows.append(py::make_tuple(name, record.method, record.offset, record.nbytes, record.crc));
  }
  return rows;
}

std::uint64_t py_scan_pickle(const py::object& buffer, bool allow_persid, std::uint32_t max_depth,
                             std::uint64_t max_ops, std::uint64_t max_bytes) {
  const Bytes bytes(buffer);
  PickleLimits limits;
  limits.allow_persid = allow_persid;
  limits.max_depth = max_depth;
  limits.max_ops = max_ops;
  limits.max_bytes = max_bytes;
  const ReleasedGil unlocked;
  return scan_pickle(bytes.data(), bytes.size(), limits).stop_bytes;
}

py::tuple py_scan_keys(const py::object& buffer, bool allow_persid, std::uint64_t base_cost,
                       std::uint64_t states_earn_per_byte, std::uint64_t storages,
                       std::uint64_t said_earn_per_byte) {
  const Bytes bytes(buffer);
  PickleLimits limits;
  limits.allow_persid = allow_persid;
  limits.base_cost = base_cost;
  limits.states_earn_per_byte = states_earn_per_byte;
  limits.storages = storages;
  limits.said_earn_per_byte = said_earn_per_byte;
  PickleScan found;
  {
    const ReleasedGil unlocked;
    found = scan_pickle(bytes.data(), bytes.size(), limits);
  }
  return py::make_tuple(found.stop_bytes, found.compound_keys);
}

}  // namespace

void bind_format(py::module_& module) {
  const PickleLimits limits;
  module.def("crc32", &py_crc32, py::arg("buffer"), py::arg("crc") = 0,
             "CRC-32 of `buffer` as `zlib.crc32` computes it, by the fastest implementation.");
  module.def("crc32_implementations", &implementation_names,
             "Names of the implementations that this CPU has, slowest first.");
  module.def("zip_records", &zip_records, py::arg("buffer"),
             "(name, method, offset, nbytes, crc) of every record, in the directory's order.");
  module.def("scan_pickle", &py_scan_pickle, py::arg("buffer"), py::arg("allow_persid") = false,
             py::arg("max_depth") = limits.max_depth, py::arg("max_ops") = limits.max_ops,
             py::arg("max_bytes") = limits.max_bytes,
             "Bytes up to and including STOP of a pickle that is safe to walk.");
  module.def("scan_keys", &py_scan_keys, py::arg("buffer"), py::arg("allow_persid") = false,
             py::arg("base_cost") = limits.base_cost, py::arg("states_earn_per_byte") = 0,
             py::arg("storages") = 0, py::arg("said_earn_per_byte") = limits.said_earn_per_byte,
             "The same, and how many keys of dicts and sets have a hash that a file can choose.");
}

}  // namespace dcpx
