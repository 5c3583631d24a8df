// RangeJob: regions and their places in files come in as rows; the writing runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "bind/bind.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/python.h"
#include "engine/range_job.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::RangeJob;
using engine::RangeRow;

// The order of fields is that of torch_dcpx.artifacts.rows.ExportRow.
RangeRow to_row(const py::handle& row, PinnedBuffers& buffers) {
  check_tuple(row, 10, "an export row has 10 fields");
  RangeRow out;
  out.file = to_u32(field(row, 0));
  out.offset = to_u64(field(row, 1));
  out.region = row_region(row);
  DCPX_CHECK(out.region.elem_bytes > 0 &&
                 std::count(out.region.lengths.begin(), out.region.lengths.end(), 0) == 0,
             "a region without bytes");
  const std::uint64_t source_bytes = to_u64(field(row, 7));
  std::uint64_t available = source_bytes;
  out.source = buffers.add(field(row, 6), /*is_writable=*/false, available);
  DCPX_CHECK(plan::src_span_bytes(out.region) <= std::min(available, source_bytes),
             "a region reaches behind its source");
  const std::int64_t tag = field(row, 8).cast<std::int64_t>();
  out.tag = tag < 0 ? engine::kNoTag : static_cast<std::uint32_t>(tag);
  out.payload_end = to_u64(field(row, 9));
  return out;
}

}  // namespace

void bind_range(py::module_& m) {
  py::class_<RangeJob>(m, "RangeJob")
      .def(py::init([](int dir_fd, std::string dir_path, unsigned workers, std::uint64_t slot_bytes,
                       bool is_durable, bool use_direct) {
             return std::make_unique<RangeJob>(
                 dir_fd, std::move(dir_path),
                 engine::RangeOptions{workers, slot_bytes, is_durable, use_direct});
           }),
           py::kw_only(), py::arg("dir_fd"), py::arg("dir_path"), py::arg("workers"),
           py::arg("slot_bytes"), py::arg("is_durable"), py::arg("use_direct"))
      .def(
          "add_file",
          [](RangeJob& job, const std::string& name, std::uint64_t file_bytes, bool is_new) {
            const PollFunction poll = signal_poll();
            const ReleasedGil no_gil;
            return job.add_file(name, file_bytes, is_new, poll);
          },
          py::arg("name"), py::arg("file_bytes"), py::arg("is_new"))
      .def(
          "write",
          [](RangeJob& job, const py::list& given) {
            PinnedBuffers buffers;
            std::vector<RangeRow> rows;
            rows.reserve(given.size());
            for (const py::handle& row : py::tuple(given)) rows.push_back(to_row(row, buffers));
            const PollFunction poll = signal_poll();
            const ReleasedGil no_gil;
            job.write(rows, poll);
          },
          py::arg("rows"))
      .def("crc_shares", &RangeJob::crc_shares)
      .def(
          "finish",
          [](RangeJob& job, bool is_whole) {
            const PollFunction poll = signal_poll();
            const ReleasedGil no_gil;
            job.finish(is_whole, poll);
          },
          py::arg("is_whole"))
      .def("abandon", &RangeJob::abandon, py::call_guard<ReleasedGil>())
      .def("report", [](const RangeJob& job) {
        const engine::RangeReport report = job.report();
        py::dict out;
        out["written_bytes"] = report.written_bytes;
        out["in_place_bytes"] = report.in_place_bytes;
        out["direct_bytes"] = report.direct_bytes;
        out["writes"] = report.writes;
        out["slot_bytes"] = report.slot_bytes;
        out["engine_ns"] = report.engine_ns;
        return out;
      });
}

}  // namespace dcpx
