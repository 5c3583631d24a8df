#include "dcp/python_objects.h"

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

// A call of Python's code, which may release the GIL while the interpreter ends.
py::object call(const py::object& method, const py::tuple& arguments) {
  PyObject* const answer =
      in_python([&] { return PyObject_CallObject(method.ptr(), arguments.ptr()); });
  if (answer == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(answer);
}

class PythonObjects : public io::ObjectStore {
 public:
  explicit PythonObjects(const py::object& objects)
      : look_(objects.attr("look")), read_(objects.attr("read")) {}
  PythonObjects(const PythonObjects&) = delete;
  PythonObjects& operator=(const PythonObjects&) = delete;
  ~PythonObjects() override {
    const TakenGil gil;
    look_ = read_ = py::object();
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
  py::object look_;
  py::object read_;
};

}  // namespace

std::shared_ptr<io::ObjectStore> python_objects(const py::object& objects) {
  return std::make_shared<PythonObjects>(objects);
}

}  // namespace dcpx
