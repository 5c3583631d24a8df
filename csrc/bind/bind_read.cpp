// ReadJob: what to find and where to put it comes in as rows; the reading runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <tuple>

#include "bind/bind.h"
#include "bind/job_spans.h"
#include "common/bytes.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/python.h"
#include "dcp/python_objects.h"
#include "engine/read_job.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::LocatedItem;
using engine::ReadJob;
using engine::ReadRegion;

engine::StoredFileSpec to_file(const py::handle& row) {
  const auto [path, is_ours, file_bytes, file_id, footer_crc, save_id] =
      row.cast<std::tuple<std::string, bool, std::uint64_t, py::bytes, std::uint32_t, py::bytes>>();
  engine::StoredFileSpec spec;
  spec.path = path;
  spec.is_ours = is_ours;
  spec.file_bytes = file_bytes;
  spec.footer_crc = footer_crc;
  spec.file_id = to_id(file_id);
  spec.save_id = to_id(save_id);
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

bool is_same_form(const LocatedItem& a, const LocatedItem& b) {
  return a.kind == b.kind && a.is_big_endian == b.is_big_endian && a.sizes == b.sizes &&
         a.strides == b.strides && a.dtype == b.dtype && a.storage_name == b.storage_name &&
         a.dtype_name == b.dtype_name;
}

// What items share is given once: a hundred thousand of them have a few dozen forms.
class Forms {
 public:
  // Returns the number of an item's form. REQUIRES: `item` outlives this.
  std::size_t number(const LocatedItem& item) {
    if (!numbers_.empty() && is_same_form(item, *last_->first)) return last_->second;
    last_ = numbers_.try_emplace(&item, numbers_.size()).first;
    if (last_->second == rows_.size()) rows_.append(to_form(item));
    return last_->second;
  }
  const py::list& rows() const { return rows_; }

 private:
  struct Less {
    static auto key(const LocatedItem& item) {
      return std::tie(item.sizes, item.dtype, item.strides, item.kind, item.storage_name,
                      item.dtype_name, item.is_big_endian);
    }
    bool operator()(const LocatedItem* a, const LocatedItem* b) const { return key(*a) < key(*b); }
  };
  // The order of fields is that of torch_dcpx.reader.locate.Form.
  static py::tuple to_form(const LocatedItem& item) {
    return py::make_tuple(kind_name(item.kind), to_tuple(item.sizes), to_tuple(item.strides),
                          item.dtype, item.storage_name, item.dtype_name, item.is_big_endian);
  }

  std::map<const LocatedItem*, std::size_t, Less> numbers_;
  std::map<const LocatedItem*, std::size_t, Less>::iterator last_;
  py::list rows_;
};

engine::WantedItem to_wanted(const py::handle& row) {
  check_tuple(row, 4, "a wanted item has 4 fields");
  return {to_u32(field(row, 0)), to_u64(field(row, 1)), to_u64(field(row, 2)),
          to_bool(field(row, 3))};
}

// The order of fields is that of torch_dcpx.reader.rows.ReadRow.
ReadRegion to_region(const py::handle& row, PinnedBuffers& buffers) {
  check_tuple(row, 10, "a read row has 10 fields");
  ReadRegion region;
  region.file = to_u32(field(row, 0));
  region.src_offset = to_u64(field(row, 1));
  region.region = row_region(row);
  // The last line of defence: where the destination is a buffer, its size is known here.
  const std::uint64_t dest_bytes = to_u64(field(row, 7));
  std::uint64_t available = dest_bytes;
  region.dest = buffers.add(field(row, 6), /*is_writable=*/true, available);
  DCPX_CHECK(plan::dst_span_bytes(region.region) <= std::min(available, dest_bytes),
             "a region reaches behind its destination");
  region.fqn = to_string(field(row, 8));
  region.device = to_device(field(row, 9));
  DCPX_CHECK(region.device < 0 || PyLong_Check(field(row, 6).ptr()) != 0,
             "device memory has an address");
  return region;
}

}  // namespace

void bind_read(py::module_& m) {
  py::class_<ReadJob>(m, "ReadJob")
      .def(py::init([](int dir_fd, std::string dir_path, unsigned workers, std::uint64_t slot_bytes,
                       bool use_direct, bool verify, std::uint32_t max_open_files,
                       unsigned max_slots, bool may_be_left) {
             return std::make_unique<ReadJob>(
                 dir_fd, std::move(dir_path),
                 engine::ReadOptions{workers, slot_bytes, use_direct, verify, max_open_files,
                                     max_slots, may_be_left});
           }),
           py::kw_only(), py::arg("dir_fd"), py::arg("dir_path"), py::arg("workers"),
           py::arg("slot_bytes"), py::arg("use_direct"), py::arg("verify"),
           py::arg("max_open_files"), py::arg("max_slots") = 0, py::arg("may_be_left") = false)
      .def(py::init([](const py::object& objects, std::string dir_path, unsigned workers,
                       std::uint64_t slot_bytes, bool verify, unsigned max_slots) {
             return std::make_unique<ReadJob>(
                 python_objects(objects), std::move(dir_path),
                 engine::ReadOptions{workers, slot_bytes, false, verify, 0, max_slots});
           }),
           py::kw_only(), py::arg("objects"), py::arg("dir_path"), py::arg("workers"),
           py::arg("slot_bytes"), py::arg("verify"), py::arg("max_slots") = 0)
      .def(
          "locate",
          [](ReadJob& job, const py::list& file_rows, const py::list& wanted_rows) {
            std::vector<engine::StoredFileSpec> files;
            for (const py::handle& row : file_rows) files.push_back(to_file(row));
            std::vector<engine::WantedItem> wanted;
            wanted.reserve(wanted_rows.size());
            for (const py::handle& row : py::tuple(wanted_rows)) wanted.push_back(to_wanted(row));
            std::vector<LocatedItem> located;
            {
              const ReleasedGil no_gil;
              located = job.locate(files, wanted, signal_poll());
            }
            py::list out(located.size());
            Forms forms;
            for (std::size_t i = 0; i < located.size(); ++i) {
              const LocatedItem& item = located[i];
              out[i] = py::make_tuple(forms.number(item), item.payload_offset, item.payload_bytes,
                                      item.storage_offset);
            }
            return py::make_tuple(forms.rows(), out);
          },
          py::arg("files"), py::arg("wanted"))
      .def(
          "read",
          [](ReadJob& job, const py::list& rows, const device::SourceEvents* after) {
            PinnedBuffers buffers;
            std::vector<ReadRegion> regions;
            regions.reserve(rows.size());
            for (const py::handle& row : py::tuple(rows))
              regions.push_back(to_region(row, buffers));
            const ReleasedGil no_gil;
            job.read(regions, signal_poll(), after);
          },
          py::arg("rows"), py::arg("after") = py::none())
      .def("leave", &ReadJob::leave, py::call_guard<ReleasedGil>())
      .def_property_readonly("moved", &ReadJob::moved)
      .def("close", &ReadJob::close, py::call_guard<ReleasedGil>())
      .def("touched", &ReadJob::touched)
      .def(
          "report",
          [](const ReadJob& job, bool spans) {
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
            if (spans) add_spans(job.spans(), out);
            return out;
          },
          py::arg("spans") = false);
}

}  // namespace dcpx
