// WriteJob: what it works on comes from rows (dcp/write_rows.h); the rest runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bind/bind.h"
#include "bind/job_spans.h"
#include "common/error.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/write_rows.h"
#include "engine/upload_queue.h"
#include "engine/write_job.h"
#include "format/zip_object.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::WriteJob;

engine::InPlace to_in_place(const std::string& name) {
  if (name == "auto") return engine::InPlace::kAuto;
  DCPX_CHECK(name == "always" || name == "never", "in_place is auto, always or never");
  return name == "always" ? engine::InPlace::kAlways : engine::InPlace::kNever;
}

// Polls for signals, then tells `progress` how many payload bytes are written. What either raises
// cancels the job.
PollFunction poll_with(const WriteJob& job, const py::object& progress) {
  if (progress.is_none()) return signal_poll();
  return [&job, &progress, poll = signal_poll()] {
    poll();
    const std::uint64_t done_bytes = job.report().done_bytes;
    const HeldGil gil;
    call_hook(progress, py::make_tuple(done_bytes));
  };
}

// Bytes on their way to a store. As long as a buffer of them is used, so is their slot.
class Piece {
 public:
  Piece(std::shared_ptr<engine::UploadQueue> queue, engine::UploadPiece piece)
      : queue_(std::move(queue)), piece_(std::move(piece)) {}
  Piece(const Piece&) = delete;
  ~Piece() { queue_->let_go(piece_); }

  py::buffer_info info() const {
    return {const_cast<std::byte*>(piece_.data),  // a buffer that may not be written to
            1,
            "B",
            1,
            {static_cast<py::ssize_t>(piece_.nbytes)},
            {py::ssize_t{1}},
            true};
  }

 private:
  std::shared_ptr<engine::UploadQueue> queue_;
  engine::UploadPiece piece_;
};

// The pieces of one file, front to back.
struct Pieces {
  std::shared_ptr<engine::UploadQueue> queue;
  std::uint32_t file = 0;

  std::unique_ptr<Piece> next() const {
    const PollFunction poll = signal_poll();
    std::optional<engine::UploadPiece> piece;
    {
      const ReleasedGil no_gil;
      piece = queue->next(file, poll);
    }
    if (!piece) throw py::stop_iteration();
    return std::make_unique<Piece>(queue, std::move(*piece));
  }
  // Blocks until the file has begun.
  std::optional<std::uint64_t> nbytes() const {
    const PollFunction poll = signal_poll();
    const ReleasedGil no_gil;
    return queue->size_of(file, poll);
  }
};

// `owners` of the memory that rows point to live as long as the call, wherever its caller is.
py::tuple write(WriteJob& job, const py::list& rows, const py::list& types, bool is_final,
                const py::object& progress, const device::SourceEvents* after,
                const std::vector<std::size_t>& temporary, const py::object& /*owners*/) {
  WriteRows decoded;
  decode_write_rows(rows, types, decoded);
  std::vector<engine::WriteItem>& items = decoded.items;
  for (const std::size_t number : temporary) items.at(number).is_lasting = false;
  {
    const PollFunction poll = poll_with(job, progress);
    const ReleasedGil no_gil;
    job.write(items, is_final, poll, after);
  }
  py::list offsets(items.size());
  py::list lengths(items.size());
  for (std::size_t i = 0; i < items.size(); ++i) {
    offsets[i] = items[i].row.item_offset;
    lengths[i] = items[i].row.item_bytes;
  }
  return py::make_tuple(offsets, lengths);
}

}  // namespace

void bind_write(py::module_& m) {
  m.attr("OBJECT_ZIP_OVERHEAD") = object_zip_overhead();
  py::tuple kinds(kSpanKinds.size());
  for (std::size_t i = 0; i < kSpanKinds.size(); ++i) kinds[i] = kSpanKinds[i];
  m.attr("SPAN_KINDS") = kinds;
  py::class_<Piece>(m, "UploadPiece", py::buffer_protocol()).def_buffer(&Piece::info);
  py::class_<Pieces>(m, "UploadPieces")
      .def("__iter__", [](const py::object& self) { return self; })
      .def("__next__", &Pieces::next)
      .def("nbytes", &Pieces::nbytes);
  py::class_<WriteJob>(m, "WriteJob")
      .def(py::init([](int dir_fd, std::string dir_path, unsigned workers,
                       std::uint64_t segment_bytes, bool use_direct, bool is_durable,
                       unsigned files_at_once, const std::string& in_place,
                       std::uint64_t memory_bytes) {
             return std::make_unique<WriteJob>(
                 dir_fd, std::move(dir_path),
                 engine::WriteOptions{workers, segment_bytes, use_direct, is_durable, files_at_once,
                                      to_in_place(in_place), memory_bytes, dir_fd < 0});
           }),
           py::kw_only(), py::arg("dir_fd"), py::arg("dir_path"), py::arg("workers"),
           py::arg("segment_bytes"), py::arg("use_direct"), py::arg("is_durable"),
           py::arg("files_at_once") = 1, py::arg("in_place") = "auto", py::arg("memory_bytes") = 0)
      .def(
          "add_file",
          [](WriteJob& job, std::vector<std::string> names, const py::bytes& file_id,
             std::uint32_t rank, const py::bytes& save_id) {
            return job.add_file({std::move(names), to_id(file_id), rank, to_id(save_id)});
          },
          py::arg("names"), py::arg("file_id"), py::arg("rank"), py::arg("save_id") = py::bytes())
      .def("write", &write, py::arg("rows"), py::arg("types"), py::arg("is_final"),
           py::arg("progress") = py::none(), py::arg("after") = py::none(),
           py::arg("temporary") = std::vector<std::size_t>(), py::arg("owners") = py::none())
      .def(
          "pieces",
          [](const WriteJob& job, std::uint32_t file) {
            DCPX_CHECK(job.queue() != nullptr, "a job with a directory has no pieces to upload");
            return Pieces{job.queue(), file};
          },
          py::arg("file"))
      .def("stop_uploads",
           [](const WriteJob& job) {
             if (job.queue() != nullptr) job.queue()->fail();
           })
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
      .def("abandon", &WriteJob::abandon, py::call_guard<ReleasedGil>())
      .def("created", &WriteJob::created)
      .def(
          "report",
          [](const WriteJob& job, bool spans) {
            const engine::WriteReport report = job.report();
            py::dict out;
            out["direct_bytes"] = report.direct_bytes;
            out["buffered_bytes"] = report.buffered_bytes;
            out["in_place_bytes"] = report.in_place_bytes;
            out["slot_bytes"] = report.slot_bytes;
            out["done_bytes"] = report.done_bytes;
            out["total_bytes"] = report.total_bytes;
            out["copy_ns"] = report.copy_ns;
            out["write_ns"] = report.write_ns;
            out["fsync_ns"] = report.fsync_ns;
            out["engine_ns"] = report.engine_ns;
            if (spans) add_spans(job.spans(), out);
            return out;
          },
          py::arg("spans") = false);
}

}  // namespace dcpx
