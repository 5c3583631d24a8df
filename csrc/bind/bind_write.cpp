// WriteJob: rows of Python values become WriteItems; everything else runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "common/bytes.h"
#include "engine/write_job.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::WriteItem;
using engine::WriteJob;

FileId to_file_id(const py::bytes& raw) {
  const std::string text = raw;
  FileId id{};
  DCPX_CHECK(text.size() == id.size(), "a file id has 16 bytes");
  std::memcpy(id.data(), text.data(), id.size());
  return id;
}

std::uint64_t to_u64(const py::handle& value) {
  const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

std::vector<TensorFraming> to_framings(const py::list& rows) {
  std::vector<TensorFraming> framings;
  for (const py::handle& row : rows) {
    const auto [module, name, dtype] =
        row.cast<std::tuple<std::string, std::string, std::string>>();
    framings.push_back({module, name, dtype});
  }
  return framings;
}

// The order of fields is that of torch_dcpx.write_table.WriteRow.
WriteItem to_item(const py::tuple& row, const std::vector<TensorFraming>& framings,
                  PinnedBuffers& buffers) {
  if (row.size() != 17) throw py::value_error("a write row has 17 fields");
  WriteItem item;
  item.file = static_cast<std::uint32_t>(to_u64(row[0]));
  const std::uint64_t kind = to_u64(row[1]);
  DCPX_CHECK(kind <= static_cast<std::uint64_t>(ItemKind::kTorchTensor), "an unknown kind of item");
  item.row.kind = static_cast<ItemKind>(kind);
  item.row.payload_bytes = to_u64(row[3]);
  item.source = buffers.add(row[2], /*is_writable=*/false, item.row.payload_bytes);
  const bool is_tensor = item.row.kind == ItemKind::kTensor;
  item.elem_bytes = to_u64(row[5]);
  item.row.sizes = int_tuple(row[6]);
  item.row.strides = int_tuple(row[7]);
  DCPX_CHECK(item.row.sizes.size() == item.row.strides.size(),
             "sizes and strides differ in number");
  item.is_dense = row[8].cast<bool>();
  item.row.fqn = to_string(row[9]);
  item.row.global_sizes = int_tuple(row[10]);
  item.row.offsets = int_tuple(row[11]);
  item.row.flags = static_cast<std::uint8_t>(to_u64(row[12]));
  item.row.memory_format = static_cast<std::uint8_t>(to_u64(row[13]));
  item.row.dtype = to_string(row[14]);
  const auto names = row[15].cast<std::pair<std::string, std::string>>();
  item.row.prop_dtype = names.first;
  item.row.layout = names.second;
  item.row.path = to_string(row[16]);
  if (!is_tensor) return item;

  if (!item.is_dense) {
    // What is gathered is stored in C order; the row says what is stored, not where it came from.
    item.gather.elem_bytes = item.elem_bytes;
    std::uint64_t stride = 1;
    std::vector<std::int64_t> stored(item.row.sizes.size());
    for (std::size_t d = stored.size(); d-- > 0;) {
      stored[d] = static_cast<std::int64_t>(stride);
      stride = checked_mul(
          stride, static_cast<std::uint64_t>(std::max<std::int64_t>(item.row.sizes[d], 1)));
    }
    for (std::size_t d = 0; d < stored.size(); ++d) {
      item.gather.lengths.push_back(static_cast<std::uint64_t>(item.row.sizes[d]));
      item.gather.src_strides.push_back(
          checked_mul(static_cast<std::uint64_t>(item.row.strides[d]), item.elem_bytes));
      item.gather.dst_strides.push_back(0);
    }
    item.row.strides = std::move(stored);
  }
  const std::uint64_t framing = to_u64(row[4]);
  DCPX_CHECK(framing < framings.size(), "a row with an unknown framing");
  item.zip.emplace(ZipItemSpec{&framings[framing], item.row.sizes, item.row.strides,
                               item.row.payload_bytes, item.elem_bytes});
  return item;
}

py::list write(WriteJob& job, const py::list& rows, const py::list& framing_rows, bool is_final) {
  const std::vector<TensorFraming> framings = to_framings(framing_rows);
  PinnedBuffers buffers;
  std::vector<WriteItem> items;
  items.reserve(rows.size());
  for (const py::handle& row : rows) {
    items.push_back(to_item(py::reinterpret_borrow<py::tuple>(row), framings, buffers));
  }
  {
    const py::gil_scoped_release no_gil;
    job.write(items, is_final, signal_poll());
  }
  py::list placed(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    placed[i] = py::make_tuple(items[i].row.item_offset, items[i].row.item_bytes);
  }
  return placed;
}

}  // namespace

void bind_write(py::module_& m) {
  py::class_<WriteJob>(m, "WriteJob")
      .def(py::init([](int dir_fd, std::string dir_path, unsigned workers,
                       std::uint64_t segment_bytes, bool use_direct, bool is_durable,
                       unsigned files_at_once) {
             return std::make_unique<WriteJob>(
                 dir_fd, std::move(dir_path),
                 engine::WriteOptions{workers, segment_bytes, use_direct, is_durable,
                                      files_at_once});
           }),
           py::kw_only(), py::arg("dir_fd"), py::arg("dir_path"), py::arg("workers"),
           py::arg("segment_bytes"), py::arg("use_direct"), py::arg("is_durable"),
           py::arg("files_at_once") = 1)
      .def(
          "add_file",
          [](WriteJob& job, std::vector<std::string> names, const py::bytes& file_id,
             std::uint32_t rank) {
            return job.add_file({std::move(names), to_file_id(file_id), rank});
          },
          py::arg("names"), py::arg("file_id"), py::arg("rank"))
      .def("write", &write, py::arg("rows"), py::arg("framings"), py::arg("is_final"))
      .def("results",
           [](const WriteJob& job) {
             py::list out;
             for (const engine::FileResult& file : job.results()) {
               const auto* id = reinterpret_cast<const char*>(file.file_id.data());
               out.append(py::make_tuple(file.name, py::bytes(id, file.file_id.size()),
                                         file.file_bytes, file.footer_crc));
             }
             return out;
           })
      .def("abandon", &WriteJob::abandon)
      .def("created", &WriteJob::created)
      .def("report", [](const WriteJob& job) {
        const engine::WriteReport report = job.report();
        py::dict out;
        out["direct_bytes"] = report.direct_bytes;
        out["buffered_bytes"] = report.buffered_bytes;
        out["in_place_bytes"] = report.in_place_bytes;
        out["slot_bytes"] = report.slot_bytes;
        return out;
      });
}

}  // namespace dcpx
