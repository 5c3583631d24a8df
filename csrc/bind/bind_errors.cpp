// C++ errors become Python's, as docs/reference/errors.md has it in "From C++".
#include <pybind11/pybind11.h>

#include <string_view>

#include "bind/bind.h"
#include "common/error.h"

namespace dcpx {
namespace {

namespace py = pybind11;

const char* class_name(ErrorCode code) {
  switch (code) {
    case ErrorCode::kPlan:
      return "PlanError";
    case ErrorCode::kStorage:
      return "StorageError";
    case ErrorCode::kShortRead:
      return "ShortReadError";
    case ErrorCode::kCorruption:
      return "CorruptionError";
    case ErrorCode::kUnsupported:
      return "UnsupportedError";
    case ErrorCode::kStaging:
      return "StagingError";
  }
  return "DcpxError";
}

py::object or_none(std::int64_t value) {
  return value < 0 ? py::none() : py::object(py::int_(value));
}
// `errors` says what becomes of bytes that are no UTF-8: file names and keys may hold any.
py::object decode(std::string_view text, const char* errors) {
  PyObject* object =
      PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), errors);
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

py::object or_none(const std::string& value, const char* errors = "backslashreplace") {
  return value.empty() ? py::none() : decode(value, errors);
}

// Only the fields that the class has: errors.py knows which.
void raise(const Error& error) {
  const py::object errors = py::module_::import("torch_dcpx.errors");
  const py::object cls = errors.attr(class_name(error.code()));
  const py::object known = cls.attr("FIELDS");
  py::dict fields;
  const auto add = [&](const char* name, const py::object& value) {
    if (known.contains(name)) fields[name] = value;
  };
  add("errno", error.sys_errno == 0 ? py::none() : py::object(py::int_(error.sys_errno)));
  add("path", or_none(error.path, "surrogateescape"));
  add("offset", or_none(error.offset));
  add("nbytes", or_none(error.nbytes));
  add("fqn", or_none(error.fqn, "surrogatepass"));
  add("expected", or_none(error.expected));
  add("found", or_none(error.found));
  const py::object instance = cls(decode(error.what(), "backslashreplace"), **fields);
  PyErr_SetObject(cls.ptr(), instance.ptr());
}

}  // namespace

void bind_errors() {
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace dcpx
