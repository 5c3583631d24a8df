// The pickle of `.metadata` for Python: columns in, bytes out.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "dcp/gil.h"
#include "dcp/python.h"
#include "format/metadata_pickle.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// Columns by name, their buffers held so that no owner can resize them while the GIL is released.
class ColumnBuffers {  // REQUIRES: the GIL to construct, to ask and to destroy.
 public:
  explicit ColumnBuffers(py::dict columns) : columns_(std::move(columns)) {}

  // Throws KeyError for a name that is missing, TypeError for values of another size.
  template <typename T>
  void find(const char* name, Column<T>& column) {
    const py::object found = columns_[name];
    buffers_.push_back(py::buffer(found).request());
    const py::buffer_info& buffer = buffers_.back();
    if (buffer.ndim != 1 || buffer.itemsize != static_cast<py::ssize_t>(sizeof(T)) ||
        buffer.strides[0] != buffer.itemsize) {
      throw py::type_error("the column '" + std::string(name) + "' has values of another size");
    }
    column = {static_cast<const T*>(buffer.ptr), static_cast<std::size_t>(buffer.size)};
  }

 private:
  py::dict columns_;
  std::vector<py::buffer_info> buffers_;
};

MetadataColumns find_columns(ColumnBuffers& buffers, bool has_planner) {
  MetadataColumns c;
  buffers.find("strings", c.strings);
  buffers.find("string_ends", c.string_ends);
  buffers.find("entry_fqn", c.entry_fqn);
  buffers.find("entry_kind", c.entry_kind);
  buffers.find("tensor_dtype", c.tensor_dtype);
  buffers.find("tensor_layout", c.tensor_layout);
  buffers.find("tensor_flags", c.tensor_flags);
  buffers.find("tensor_memory_format", c.tensor_memory_format);
  buffers.find("tensor_ndim", c.tensor_ndim);
  buffers.find("tensor_chunk_count", c.tensor_chunk_count);
  buffers.find("tensor_sizes", c.tensor_sizes);
  buffers.find("chunk_offsets", c.chunk_offsets);
  buffers.find("chunk_sizes", c.chunk_sizes);
  buffers.find("storage_fqn", c.storage_fqn);
  buffers.find("storage_ndim", c.storage_ndim);
  buffers.find("storage_hint", c.storage_hint);
  buffers.find("storage_path", c.storage_path);
  buffers.find("storage_descriptors", c.storage_descriptors);
  buffers.find("storage_offsets", c.storage_offsets);
  buffers.find("storage_offset", c.storage_offset);
  buffers.find("storage_bytes", c.storage_bytes);
  c.has_planner = has_planner;
  if (has_planner) {
    buffers.find("planner_fqn", c.planner_fqn);
    buffers.find("planner_len", c.planner_len);
    buffers.find("planner_tag", c.planner_tag);
    buffers.find("planner_value", c.planner_value);
  }
  return c;
}

std::vector<std::string> to_strings(const py::handle& texts) {
  std::vector<std::string> out;
  for (const py::handle& text : texts) out.push_back(to_string(text));
  return out;
}

std::optional<std::string> to_optional(const py::handle& text) {
  return text.is_none() ? std::nullopt : std::optional<std::string>(to_string(text));
}

// Bytes that Python looks at where C++ made them: a pickle of 150 MB is not copied.
struct Pickled {
  std::vector<std::byte> bytes;
};

py::memoryview py_pickle_metadata(const py::dict& columns, bool has_planner,
                                  const py::list& descriptors,
                                  const std::optional<py::tuple>& storage_meta,
                                  const py::object& version) {
  ColumnBuffers buffers(columns);
  const MetadataColumns found = find_columns(buffers, has_planner);
  MetadataRest rest;
  for (const py::handle& names : descriptors) rest.descriptors.push_back(to_strings(names));
  if (storage_meta) {
    const py::tuple& meta = *storage_meta;
    rest.storage_meta = {to_optional(meta[0]), to_optional(meta[1]), to_strings(meta[2])};
  }
  rest.version = to_optional(version);
  Pickled pickle;
  {
    const ReleasedGil unlocked;
    pickle.bytes = pickle_metadata(found, rest);
  }
  return py::memoryview(py::cast(std::move(pickle)));
}

}  // namespace

void bind_metadata(py::module_& module) {
  py::class_<Pickled>(module, "_Pickled", py::buffer_protocol()).def_buffer([](Pickled& pickle) {
    return py::buffer_info(reinterpret_cast<std::uint8_t*>(pickle.bytes.data()),
                           static_cast<py::ssize_t>(pickle.bytes.size()), /*readonly=*/true);
  });
  module.def("pickle_metadata", &py_pickle_metadata, py::arg("columns"), py::arg("has_planner"),
             py::arg("descriptors"), py::arg("storage_meta"), py::arg("version"),
             "Stock's pickle of what the columns of a `.metadata` file say.");
}

}  // namespace dcpx
