// ReadJob: what to find and where to put it comes in as rows; the reading runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "common/bytes.h"
#include "engine/read_job.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::LocatedItem;
using engine::ReadJob;
using engine::ReadRegion;

engine::StoredFileSpec to_file(const py::handle& row) {
  const auto [path, is_ours, file_bytes, file_id, footer_crc] =
      row.cast<std::tuple<std::string, bool, std::uint64_t, py::bytes, std::uint32_t>>();
  engine::StoredFileSpec spec;
  spec.path = path;
  spec.is_ours = is_ours;
  spec.file_bytes = file_bytes;
  spec.footer_crc = footer_crc;
  if (is_ours) {
    const std::string raw = file_id;
    DCPX_CHECK(raw.size() == spec.file_id.size(), "a file id has 16 bytes");
    std::memcpy(spec.file_id.data(), raw.data(), raw.size());
  }
  return spec;
}

const char* kind_name(engine::LocatedKind kind) {
  switch (kind) {
    case engine::LocatedKind::kPlain:
      return "plain";
    case engine::LocatedKind::kBytes:
      return "bytes";
    case engine::LocatedKind::kTorch:
      return "torch";
  }
  return "unknown";
}

py::tuple to_tuple(const std::vector<std::int64_t>& values) {
  py::tuple out(values.size());
  for (std::size_t i = 0; i < values.size(); ++i) out[i] = values[i];
  return out;
}

// The order of fields is that of torch_dcpx.read_table.Located.
py::tuple to_row(const LocatedItem& item) {
  return py::make_tuple(kind_name(item.kind), item.payload_offset, item.payload_bytes,
                        item.storage_offset, to_tuple(item.sizes), to_tuple(item.strides),
                        item.dtype, item.storage_name, item.dtype_name, item.is_big_endian);
}

std::vector<std::uint64_t> unsigned_tuple(const py::handle& values) {
  std::vector<std::uint64_t> out;
  for (const std::int64_t value : int_tuple(values)) {
    DCPX_CHECK(value >= 0, "a negative length or stride");
    out.push_back(static_cast<std::uint64_t>(value));
  }
  return out;
}

// The order of fields is that of torch_dcpx.read_table.ReadRow.
ReadRegion to_region(const py::handle& row, PinnedBuffers& buffers) {
  const auto fields = py::reinterpret_borrow<py::tuple>(row);
  if (fields.size() != 9) throw py::value_error("a read row has 9 fields");
  ReadRegion region;
  region.file = fields[0].cast<std::uint32_t>();
  region.src_offset = fields[1].cast<std::uint64_t>();
  region.region.elem_bytes = fields[2].cast<std::uint64_t>();
  region.region.lengths = unsigned_tuple(fields[3]);
  region.region.src_strides = unsigned_tuple(fields[4]);
  region.region.dst_strides = unsigned_tuple(fields[5]);
  const std::size_t dims = region.region.dims();
  DCPX_CHECK(region.region.src_strides.size() == dims && region.region.dst_strides.size() == dims,
             "lengths and strides of a region differ in number");
  // The last line of defence: where the destination is a buffer, its size is known here.
  const auto dest_bytes = fields[7].cast<std::uint64_t>();
  std::uint64_t available = dest_bytes;
  region.dest = buffers.add(fields[6], /*is_writable=*/true, available);
  DCPX_CHECK(plan::dst_span_bytes(region.region) <= std::min(available, dest_bytes),
             "a region reaches behind its destination");
  region.fqn = to_string(fields[8]);
  return region;
}

}  // namespace

void bind_read(py::module_& m) {
  py::class_<ReadJob>(m, "ReadJob")
      .def(py::init([](int dir_fd, std::string dir_path, unsigned workers, std::uint64_t slot_bytes,
                       bool use_direct, bool verify, std::uint32_t max_open_files) {
             return std::make_unique<ReadJob>(
                 dir_fd, std::move(dir_path),
                 engine::ReadOptions{workers, slot_bytes, use_direct, verify, max_open_files});
           }),
           py::kw_only(), py::arg("dir_fd"), py::arg("dir_path"), py::arg("workers"),
           py::arg("slot_bytes"), py::arg("use_direct"), py::arg("verify"),
           py::arg("max_open_files"))
      .def(
          "locate",
          [](ReadJob& job, const py::list& file_rows, const py::list& wanted_rows) {
            std::vector<engine::StoredFileSpec> files;
            for (const py::handle& row : file_rows) files.push_back(to_file(row));
            std::vector<engine::WantedItem> wanted;
            for (const py::handle& row : wanted_rows) {
              const auto [file, offset, nbytes, is_tensor] =
                  row.cast<std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, bool>>();
              wanted.push_back({file, offset, nbytes, is_tensor});
            }
            std::vector<LocatedItem> located;
            {
              const py::gil_scoped_release no_gil;
              located = job.locate(files, wanted, signal_poll());
            }
            py::list out(located.size());
            for (std::size_t i = 0; i < located.size(); ++i) out[i] = to_row(located[i]);
            return out;
          },
          py::arg("files"), py::arg("wanted"))
      .def(
          "read",
          [](ReadJob& job, const py::list& rows) {
            PinnedBuffers buffers;
            std::vector<ReadRegion> regions;
            regions.reserve(rows.size());
            for (const py::handle& row : rows) regions.push_back(to_region(row, buffers));
            const py::gil_scoped_release no_gil;
            job.read(regions, signal_poll());
          },
          py::arg("rows"))
      .def("close", &ReadJob::close)
      .def("touched", &ReadJob::touched)
      .def("report", [](const ReadJob& job) {
        const engine::ReadReport report = job.report();
        py::dict out;
        out["needed_bytes"] = report.needed_bytes;
        out["read_bytes"] = report.read_bytes;
        out["verified_bytes"] = report.verified_bytes;
        out["in_place_bytes"] = report.in_place_bytes;
        out["direct_bytes"] = report.direct_bytes;
        out["foreign_bytes"] = report.foreign_bytes;
        out["slot_bytes"] = report.slot_bytes;
        out["locate_ns"] = report.locate_ns;
        out["read_ns"] = report.read_ns;
        out["verify_ns"] = report.verify_ns;
        out["copy_ns"] = report.copy_ns;
        out["engine_ns"] = report.engine_ns;
        return out;
      });
}

}  // namespace dcpx
