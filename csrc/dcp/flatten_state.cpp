// torch's `flatten_state_dict` in one call: it takes a third of a plan.
#include <pybind11/pybind11.h>

#include "dcp/plan_items.h"
#include "dcp/plan_state.h"

namespace dcpx {

namespace py = pybind11;

namespace {

// What `kind_of` says of values whose class is not known here.
enum class Kind { kLeaf, kMapping, kList, kTensor, kSharded };

// Python's own limit on what holds itself.
class Level {
 public:
  Level() {
    if (Py_EnterRecursiveCall(" while a state_dict is flattened") != 0) {
      throw py::error_already_set();
    }
  }
  ~Level() { Py_LeaveRecursiveCall(); }
  Level(const Level&) = delete;
  Level& operator=(const Level&) = delete;
};

}  // namespace

class Flattener {
 public:
  explicit Flattener(const StateReader& reader) : reader_(reader) {}

  void add_mapping(const py::handle& mapping, const py::object& prefix, const py::tuple& path) {
    const Level level;
    const py::object items =
        checked(PyObject_CallMethodNoArgs(mapping.ptr(), reader_.items_.ptr()));
    const py::object each = checked(PyObject_GetIter(items.ptr()));
    while (PyObject* next = PyIter_Next(each.ptr())) {
      const py::object item = py::reinterpret_steal<py::object>(next);
      if (PyTuple_Check(next) == 0 || PyTuple_GET_SIZE(next) != 2) {
        throw py::value_error("a mapping's items are pairs");
      }
      const py::handle key = PyTuple_GET_ITEM(next, 0);
      const bool is_text = PyUnicode_CheckExact(key.ptr()) != 0;
      is_odd_ = is_odd_ || !is_text;
      const py::object name =
          is_text ? py::reinterpret_borrow<py::object>(key) : checked(PyObject_Str(key.ptr()));
      add(py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(next, 1)), name, name, prefix, path);
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  py::tuple result() const { return py::make_tuple(flat_, paths_, has_sharded_, is_odd_); }

 private:
  // `name`: of `key` among those of `prefix` ("a.b."; empty at the top).
  void add(const py::object& value, const py::object& name, const py::object& key,
           const py::object& prefix, const py::tuple& path) {
    const py::object fqn = PyUnicode_GET_LENGTH(prefix.ptr()) == 0
                               ? name
                               : checked(PyUnicode_Concat(prefix.ptr(), name.ptr()));
    const Py_ssize_t depth = PyTuple_GET_SIZE(path.ptr());
    py::tuple own(static_cast<std::size_t>(depth) + 1);
    for (Py_ssize_t i = 0; i < depth; ++i) {
      PyTuple_SET_ITEM(own.ptr(), i, py::handle(PyTuple_GET_ITEM(path.ptr(), i)).inc_ref().ptr());
    }
    PyTuple_SET_ITEM(own.ptr(), depth, py::object(key).release().ptr());
    const Kind kind = kind_of(value);
    if (kind == Kind::kMapping) {
      add_mapping(value, with_dot(fqn), own);
    } else if (kind == Kind::kList && !is_terminal(value)) {
      add_list(value, with_dot(fqn), own);
    } else {
      has_sharded_ = has_sharded_ || kind == Kind::kSharded;
      keep(fqn, value, own);
    }
  }

  void add_list(const py::object& list, const py::object& prefix, const py::tuple& path) {
    const Level level;
    const py::object each = checked(PyObject_GetIter(list.ptr()));
    for (Py_ssize_t at = 0; PyObject* next = PyIter_Next(each.ptr()); ++at) {
      const py::object value = py::reinterpret_steal<py::object>(next);
      const py::object index = checked(PyLong_FromSsize_t(at));
      const Py_ssize_t before = PyDict_GET_SIZE(flat_.ptr());
      add(value, checked(PyObject_Str(index.ptr())), index, prefix, path);
      is_odd_ = is_odd_ || PyDict_GET_SIZE(flat_.ptr()) == before;
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  }

  void keep(const py::object& fqn, const py::object& value, const py::tuple& path) {
    const int known = PyDict_Contains(flat_.ptr(), fqn.ptr());
    if (known < 0) throw py::error_already_set();
    if (known != 0) {
      PyErr_Format(PyExc_ValueError, "duplicated flatten key %U", fqn.ptr());  // torch's text
      throw py::error_already_set();
    }
    if (PyDict_SetItem(flat_.ptr(), fqn.ptr(), value.ptr()) != 0 ||
        PyDict_SetItem(paths_.ptr(), fqn.ptr(), path.ptr()) != 0) {
      throw py::error_already_set();
    }
  }

  // Of a list: whether nothing in it is to be named by itself.
  bool is_terminal(const py::object& list) {
    const Level level;
    const py::object each = checked(PyObject_GetIter(list.ptr()));
    while (PyObject* next = PyIter_Next(each.ptr())) {
      const py::object entry = py::reinterpret_steal<py::object>(next);
      const Kind kind = kind_of(entry);
      if (kind == Kind::kLeaf || (kind == Kind::kList && is_terminal(entry))) continue;
      return false;
    }
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return true;
  }

  Kind kind_of(const py::object& value) const {
    PyObject* its_class = reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
    if (its_class == reader_.tensor_.ptr() || its_class == reader_.parameter_.ptr() ||
        its_class == reader_.dtensor_.ptr()) {
      return Kind::kTensor;
    }
    if (PyDict_CheckExact(value.ptr()) != 0) return Kind::kMapping;
    if (PyList_CheckExact(value.ptr()) != 0) return Kind::kList;
    if (reader_.is_plain_leaf(value)) return Kind::kLeaf;
    const py::object kind = checked(PyObject_CallOneArg(reader_.kind_of_.ptr(), value.ptr()));
    return static_cast<Kind>(kind.cast<int>());
  }

  static py::object with_dot(const py::object& fqn) {
    return checked(PyUnicode_FromFormat("%U.", fqn.ptr()));
  }

  const StateReader& reader_;
  py::dict flat_;
  py::dict paths_;
  bool has_sharded_ = false;
  bool is_odd_ = false;  // see StateReader::flatten
};

py::tuple StateReader::flatten(const py::object& state) const {
  Flattener flattener(*this);
  flattener.add_mapping(state, py::str(""), py::tuple());
  return flattener.result();
}

}  // namespace dcpx
