// VerifyJob: file names in, findings out as rows; the reading runs without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/python.h"
#include "dcp/python_objects.h"
#include "engine/verify_job.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::Finding;
using engine::FindingKind;
using engine::VerifyJob;

const char* kind_name(FindingKind kind) {
  switch (kind) {
    case FindingKind::kUnreadable:
      return "unreadable";
    case FindingKind::kTail:
      return "tail";
    case FindingKind::kIndex:
      return "index";
    case FindingKind::kTable:
      return "table";
    case FindingKind::kData:
      return "data";
    case FindingKind::kItem:
      return "item";
    case FindingKind::kPadding:
      return "padding";
    case FindingKind::kUnchecked:
      return "unchecked";
  }
  return "unknown";
}

// Text of a file that may hold anything: what is no UTF-8 is a name that no metadata has.
py::str to_text(const std::string& text, const char* errors) {
  PyObject* made = PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), errors);
  if (made == nullptr) {
    PyErr_Clear();
    made =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "backslashreplace");
  }
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(made);
}

// The order of fields is that of torch_dcpx.integrity.footers.RawFinding.
py::list to_rows(const std::vector<Finding>& findings) {
  py::list rows;
  for (const Finding& finding : findings) {
    const Error& error = finding.error;
    rows.append(py::make_tuple(
        kind_name(finding.kind), to_text(error.path, "surrogateescape"), error.offset, error.nbytes,
        to_text(error.expected, "backslashreplace"), to_text(error.found, "backslashreplace"),
        to_text(error.what(), "backslashreplace")));
  }
  return rows;
}

// The order of fields is that of torch_dcpx.integrity.footers.FooterRow.
py::tuple to_row(const IndexRow& row) {
  return py::make_tuple(
      static_cast<int>(row.kind), static_cast<int>(row.flags), static_cast<int>(row.memory_format),
      row.item_offset, row.item_bytes, row.payload_offset, row.payload_bytes,
      to_tuple(row.global_sizes), to_tuple(row.offsets), to_tuple(row.sizes),
      to_text(row.dtype, "backslashreplace"), to_text(row.prop_dtype, "backslashreplace"),
      to_text(row.layout, "backslashreplace"), to_text(row.fqn, "surrogatepass"),
      to_text(row.path, "surrogatepass"), row.payload_crc, to_tuple(row.strides));
}

py::object to_tail(const engine::FooterFacts& facts) {
  if (!facts.has_tail) return py::none();
  const Tail& tail = facts.tail;
  const auto to_bytes = [](const auto& id) {
    return py::bytes(reinterpret_cast<const char*>(id.data()), id.size());
  };
  return py::make_tuple(tail.rank, to_bytes(tail.file_id), tail.tail_crc, tail.data_bytes,
                        tail.save_id == SaveId{} ? py::bytes() : to_bytes(tail.save_id));
}

py::tuple add_file(VerifyJob& job, const std::string& path) {
  engine::FooterFacts facts;
  std::uint64_t file_bytes = 0;
  std::vector<Finding> findings;
  {
    const ReleasedGil no_gil;
    facts = job.add_file(path, &file_bytes, findings);
  }
  py::object rows = py::none();
  if (facts.has_rows) {
    py::list made(facts.rows.size());
    for (std::size_t r = 0; r < facts.rows.size(); ++r) made[r] = to_row(facts.rows[r]);
    rows = std::move(made);
  }
  return py::make_tuple(file_bytes, to_tail(facts), rows, to_rows(findings));
}

py::tuple add_foreign(VerifyJob& job, const std::string& path, const py::list& item_rows) {
  std::vector<engine::ForeignItem> items;
  items.reserve(item_rows.size());
  for (const py::handle& row : py::tuple(item_rows)) {
    check_tuple(row, 3, "an item has 3 fields");
    items.push_back({to_u64(field(row, 0)), to_u64(field(row, 1)), to_bool(field(row, 2))});
  }
  std::uint64_t file_bytes = 0;
  std::vector<Finding> findings;
  {
    const ReleasedGil no_gil;
    job.add_foreign(path, items, &file_bytes, findings);
  }
  return py::make_tuple(file_bytes, to_rows(findings));
}

py::list sum(VerifyJob& job, const py::object& progress) {
  const PollFunction signals = signal_poll();
  const bool has_progress = !progress.is_none();
  const PollFunction poll = [&] {
    signals();
    if (!has_progress) return;
    const HeldGil gil;
    call_hook(progress, py::make_tuple(job.done_bytes(), job.total_bytes()));
  };
  std::vector<Finding> findings;
  {
    const ReleasedGil no_gil;
    findings = job.sum(poll);
  }
  return to_rows(findings);
}

}  // namespace

void bind_verify(py::module_& m) {
  py::class_<VerifyJob>(m, "VerifyJob")
      .def(py::init([](int dir_fd, std::string dir_path, unsigned workers, std::uint64_t slot_bytes,
                       bool use_direct) {
             return std::make_unique<VerifyJob>(
                 dir_fd, std::move(dir_path),
                 engine::VerifyOptions{workers, slot_bytes, use_direct});
           }),
           py::kw_only(), py::arg("dir_fd"), py::arg("dir_path"), py::arg("workers"),
           py::arg("slot_bytes"), py::arg("use_direct"))
      .def(py::init([](const py::object& objects, std::string dir_path, unsigned workers,
                       std::uint64_t slot_bytes) {
             return std::make_unique<VerifyJob>(
                 python_objects(objects), std::move(dir_path),
                 engine::VerifyOptions{workers, slot_bytes, /*use_direct=*/false});
           }),
           py::kw_only(), py::arg("objects"), py::arg("dir_path"), py::arg("workers"),
           py::arg("slot_bytes"))
      .def("has_footer", &VerifyJob::has_footer, py::arg("path"), py::call_guard<ReleasedGil>())
      .def("add_file", &add_file, py::arg("path"))
      .def("add_foreign", &add_foreign, py::arg("path"), py::arg("items"))
      .def("sum", &sum, py::arg("progress") = py::none())
      .def_property_readonly("done_bytes", &VerifyJob::done_bytes)
      .def_property_readonly("total_bytes", &VerifyJob::total_bytes)
      .def_property_readonly("direct_bytes", &VerifyJob::direct_bytes);
}

}  // namespace dcpx
