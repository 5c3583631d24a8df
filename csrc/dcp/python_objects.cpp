#include "dcp/python_objects.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/error.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/python.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// What an object of Python's holds. With the GIL.
class View {
 public:
  explicit View(const py::object& owner) {
    if (PyObject_GetBuffer(owner.ptr(), &view_, PyBUF_CONTIG_RO) != 0)
      throw py::error_already_set();
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  ~View() { PyBuffer_Release(&view_); }

  const std::byte* data() const noexcept { return static_cast<const std::byte*>(view_.buf); }
  std::uint64_t size_bytes() const noexcept { return static_cast<std::uint64_t>(view_.len); }

 private:
  Py_buffer view_{};
};

// An error of torch_dcpx.errors by its attributes, none of which is Python's code.
Error to_error(ErrorCode code, const py::object& value) {
  const auto attribute = [&](const char* name) { return py::getattr(value, name, py::none()); };
  const auto number = [&](const char* name) {
    const py::object found = attribute(name);
    return PyLong_Check(found.ptr()) != 0 ? found.cast<std::int64_t>() : std::int64_t{-1};
  };
  Error error(code, to_string(attribute("message")));
  error.sys_errno = static_cast<int>(std::max<std::int64_t>(number("errno"), 0));
  const py::object path = attribute("path");
  if (PyUnicode_Check(path.ptr()) != 0) error.path = to_string(path);
  error.offset = number("offset");
  error.nbytes = number("nbytes");
  return error;
}

class PythonObjects : public io::ObjectStore {
 public:
  explicit PythonObjects(const py::object& objects)
      : look_(objects.attr("look")), read_(objects.attr("read")) {
    const py::object errors = py::module_::import("torch_dcpx.errors");
    storage_error_ = errors.attr("StorageError");
    unsupported_error_ = errors.attr("UnsupportedError");
  }
  PythonObjects(const PythonObjects&) = delete;
  PythonObjects& operator=(const PythonObjects&) = delete;
  ~PythonObjects() override {
    const TakenGil gil;
    look_ = read_ = storage_error_ = unsupported_error_ = py::object();
  }

  Object look(const std::string& name, std::uint64_t nbytes) override {
    const TakenGil gil;
    const py::object answer = call(look_, py::make_tuple(name, nbytes));
    check_tuple(answer, 3, "an object has a size, a tag and an end");
    const View end(py::reinterpret_borrow<py::object>(field(answer, 2)));
    return {to_u64(field(answer, 0)),
            to_string(field(answer, 1)),
            {end.data(), end.data() + end.size_bytes()}};
  }

  Bytes read(const std::string& name, const std::string& tag, std::uint64_t offset,
             std::uint64_t nbytes) override {
    const TakenGil gil;
    const py::object answer = call(read_, py::make_tuple(name, tag, offset, offset + nbytes));
    // Let go by a worker, without the GIL.
    const std::shared_ptr<View> view(new View(answer), [](const View* held) {
      const TakenGil own;
      delete held;
    });
    DCPX_CHECK(view->size_bytes() == nbytes, "an answer of another length than asked for");
    return {view, view->data()};
  }

 private:
  // A call of Python's code, which may release the GIL while the interpreter ends.
  py::object call(const py::object& method, const py::tuple& arguments) const {
    PyObject* const answer =
        in_python([&] { return PyObject_CallObject(method.ptr(), arguments.ptr()); });
    if (answer != nullptr) return py::reinterpret_steal<py::object>(answer);
    const py::error_already_set raised;
    if (raised.type().is(storage_error_)) throw to_error(ErrorCode::kStorage, raised.value());
    if (raised.type().is(unsupported_error_)) {
      throw to_error(ErrorCode::kUnsupported, raised.value());
    }
    throw raised;
  }

  py::object look_;
  py::object read_;
  py::object storage_error_;
  py::object unsupported_error_;
};

}  // namespace

std::shared_ptr<io::ObjectStore> python_objects(const py::object& objects) {
  return std::make_shared<PythonObjects>(objects);
}

}  // namespace dcpx
