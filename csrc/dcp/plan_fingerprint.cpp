// What of a state decides on its plan, as bytes to compare: 20,000 unchanged tensors are then
// planned in the time that reading their attributes takes.
#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <vector>

#include "dcp/dcp.h"
#include "dcp/plan_items.h"
#include "dcp/plan_state.h"
#include "dcp/python.h"
#include "dcp/stored_columns.h"

namespace dcpx {

namespace py = pybind11;

namespace {

PyObject* class_of(const py::handle& value) {
  return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
}

}  // namespace

StateReader::StateReader(const py::dict& parts)
    : tensor_(parts["Tensor"]),
      parameter_(parts["Parameter"]),
      dtensor_(parts["DTensor"]),
      shard_(parts["Shard"]),
      replicate_(parts["Replicate"]),
      kind_of_(parts["kind_of"]),
      describe_mesh_(parts["describe_mesh"]),
      describe_placement_(parts["describe_placement"]),
      describe_value_(parts["describe_value"]),
      hooks_(parts["hooks"].cast<py::tuple>()),
      has_strides_(parts["has_strides"].cast<bool>()),
      items_(interned("items")),
      shape_(interned("shape")),
      dtype_(interned("dtype")),
      layout_(interned("layout")),
      requires_grad_(interned("requires_grad")),
      is_pinned_(interned("is_pinned")),
      stride_(interned("stride")),
      spec_(interned("_spec")),
      mesh_(interned("mesh")),
      placements_(interned("placements")),
      local_(interned("_local_tensor")),
      dim_(interned("dim")) {}

bool StateReader::has_hooks(const py::handle& value) const { return has_own(value, hooks_); }

bool StateReader::is_plain_tensor(const py::handle& value) const {
  return (class_of(value) == tensor_.ptr() || class_of(value) == parameter_.ptr()) &&
         !has_hooks(value);
}

bool StateReader::is_plain_leaf(const py::handle& value) const {
  PyObject* one = value.ptr();
  return one == Py_None || PyLong_CheckExact(one) != 0 || PyBool_Check(one) != 0 ||
         PyFloat_CheckExact(one) != 0 || PyUnicode_CheckExact(one) != 0 ||
         PyBytes_CheckExact(one) != 0 || PyTuple_CheckExact(one) != 0;
}

class Fingerprint {
 public:
  Fingerprint(const StateReader& reader, const py::object& paths)
      : reader_(reader), paths_(paths) {}

  // False: the plan depends on what is not seen here.
  bool add(const py::handle& fqn, const py::handle& value) {
    if (PyUnicode_CheckExact(fqn.ptr()) == 0 || !add_name(fqn)) return false;
    if (reader_.is_plain_tensor(value)) {
      out_ += 'T';
      add_tensor(value);
      return true;
    }
    if (class_of(value) == reader_.dtensor_.ptr()) return add_dtensor(value);
    if (reader_.is_plain_leaf(value) || PyList_CheckExact(value.ptr()) != 0 ||
        PyDict_CheckExact(value.ptr()) != 0) {
      out_ += 'V';
      return true;
    }
    return add_described(reader_.describe_value_, value);
  }

  py::bytes result() const { return out_; }

 private:
  void put(const void* bytes, std::size_t count) {
    out_.append(static_cast<const char*>(bytes), count);
  }
  void put(std::int64_t number) { put(&number, sizeof number); }
  void put_address(const py::object& constant) {
    // Of a dtype or a layout, of which there is one each as long as the process lives.
    const auto address = reinterpret_cast<std::uintptr_t>(constant.ptr());
    put(&address, sizeof address);
  }

  void put_text(const py::handle& text) {
    const Py_ssize_t length = PyUnicode_GET_LENGTH(text.ptr());
    const auto width = static_cast<Py_ssize_t>(PyUnicode_KIND(text.ptr()));
    put(length << 3 | width);
    put(PyUnicode_DATA(text.ptr()), static_cast<std::size_t>(length * width));
  }

  // Counts before values: what follows cannot be taken for one more of them.
  void put_ints(const py::object& values) {
    ints_.clear();
    append_ints(values, &ints_);
    put(static_cast<std::int64_t>(ints_.size()));
    put(ints_.data(), ints_.size() * sizeof(std::int64_t));
  }

  // The path, of which the name is made, too; without paths the name.
  bool add_name(const py::handle& fqn) {
    if (paths_.is_none()) {
      put_text(fqn);
      return true;
    }
    put_text(fqn);
    PyObject* path = PyDict_GetItemWithError(paths_.ptr(), fqn.ptr());
    if (path == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (path == nullptr || PyTuple_CheckExact(path) == 0) return false;
    const Py_ssize_t depth = PyTuple_GET_SIZE(path);
    put(depth);
    for (Py_ssize_t i = 0; i < depth; ++i) {
      const py::handle part = PyTuple_GET_ITEM(path, i);
      if (PyUnicode_CheckExact(part.ptr()) != 0) {
        out_ += 's';
        put_text(part);
      } else if (PyLong_CheckExact(part.ptr()) != 0) {
        const long long at = PyLong_AsLongLong(part.ptr());
        if (at == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        out_ += 'i';
        put(at);
      } else {
        return false;
      }
    }
    return true;
  }

  void add_tensor(const py::handle& tensor) {
    put_ints(get_attr(tensor, reader_.shape_));
    put_address(get_attr(tensor, reader_.dtype_));
    put_address(get_attr(tensor, reader_.layout_));
    const bool needs_grad = get_attr(tensor, reader_.requires_grad_).ptr() == Py_True;
    const bool is_pinned =
        checked(PyObject_CallMethodNoArgs(tensor.ptr(), reader_.is_pinned_.ptr())).ptr() == Py_True;
    out_ += static_cast<char>('0' + (needs_grad ? 1 : 0) + (is_pinned ? 2 : 0));
    if (reader_.has_strides_) {
      put_ints(checked(PyObject_CallMethodNoArgs(tensor.ptr(), reader_.stride_.ptr())));
    }
  }

  bool add_dtensor(const py::handle& tensor) {
    if (reader_.has_hooks(tensor)) return false;
    const py::object local = get_attr(tensor, reader_.local_);
    if (!reader_.is_plain_tensor(local)) return false;
    const py::object spec = get_attr(tensor, reader_.spec_);
    out_ += 'D';
    put_ints(get_attr(tensor, reader_.shape_));
    out_ += get_attr(tensor, reader_.requires_grad_).ptr() == Py_True ? '1' : '0';
    add_tensor(local);
    return add_mesh(get_attr(spec, reader_.mesh_)) &&
           add_placements(get_attr(spec, reader_.placements_));
  }

  // Each mesh is told once; after that, its number.
  bool add_mesh(const py::object& mesh) {
    const auto known = meshes_.find(mesh.ptr());
    if (known != meshes_.end()) {
      put(known->second);
      return true;
    }
    const auto number = static_cast<std::int64_t>(meshes_.size());
    meshes_.emplace(mesh.ptr(), number);
    kept_.append(mesh);  // so that no other comes to lie there
    put(number);
    return add_described(reader_.describe_mesh_, mesh);
  }

  bool add_placements(const py::object& placements) {
    if (PyTuple_Check(placements.ptr()) == 0) return false;
    const Py_ssize_t count = PyTuple_GET_SIZE(placements.ptr());
    put(count);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const py::handle place = PyTuple_GET_ITEM(placements.ptr(), i);
      if (class_of(place) == reader_.replicate_.ptr()) {
        out_ += 'R';
      } else if (class_of(place) == reader_.shard_.ptr()) {
        out_ += 'S';
        const py::object dim = get_attr(place, reader_.dim_);
        const long long at = PyLong_AsLongLong(dim.ptr());
        if (at == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
        put(at);
      } else if (!add_described(reader_.describe_placement_, place)) {
        return false;
      }
    }
    return true;
  }

  // What Python says of a value: bytes, or None.
  bool add_described(const py::object& describe, const py::handle& value) {
    const py::object said = checked(PyObject_CallOneArg(describe.ptr(), value.ptr()));
    if (PyBytes_CheckExact(said.ptr()) == 0) return false;
    out_ += 'X';
    put(PyBytes_GET_SIZE(said.ptr()));
    put(PyBytes_AS_STRING(said.ptr()), static_cast<std::size_t>(PyBytes_GET_SIZE(said.ptr())));
    return true;
  }

  const StateReader& reader_;
  const py::object paths_;
  std::string out_;
  std::vector<std::int64_t> ints_;
  std::unordered_map<PyObject*, std::int64_t> meshes_;
  py::list kept_;
};

py::object StateReader::fingerprint(const py::dict& state, const py::object& paths) const {
  if (!paths.is_none() && (PyDict_CheckExact(paths.ptr()) == 0 ||
                           PyDict_GET_SIZE(paths.ptr()) != PyDict_GET_SIZE(state.ptr()))) {
    return py::none();
  }
  Fingerprint made(*this, paths);
  const py::object items = checked(PyObject_CallMethodNoArgs(state.ptr(), items_.ptr()));
  const py::object each = checked(PyObject_GetIter(items.ptr()));
  while (PyObject* next = PyIter_Next(each.ptr())) {
    const py::object item = py::reinterpret_steal<py::object>(next);
    if (!made.add(PyTuple_GET_ITEM(next, 0), PyTuple_GET_ITEM(next, 1))) return py::none();
  }
  if (PyErr_Occurred() != nullptr) throw py::error_already_set();
  return made.result();
}

void bind_plan_state(py::module_& module) {
  py::class_<StateReader>(module, "StateReader", "Reads state dicts as planners do.")
      .def(py::init<const py::dict&>(), py::arg("parts"))
      .def("flatten", &StateReader::flatten, py::arg("state"),
           "(flat state, path of each name, whether a value is a ShardedTensor, whether a "
           "key is no str or an element of a list has no value).")
      .def("fingerprint", &StateReader::fingerprint, py::arg("state"), py::arg("paths"),
           "Bytes that are equal only where plans are, or None.")
      .def("unlike", &StateReader::unlike, py::arg("state"), py::arg("entries"), py::arg("columns"),
           py::arg("has_dtypes"), "Names of what is not seen to be a whole tensor as it is stored.")
      .def(
          "whole_rows", &StateReader::whole_rows, py::arg("state"), py::arg("entries"),
          py::arg("columns"),
          "(a row a whole tensor of the stored sizes, None for all else; (place, name) of these).");
}

}  // namespace dcpx
