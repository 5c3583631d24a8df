// What a load asks of each of its items in Python: where their bytes go.
//
// Nearly all items are whole tensors, stored and wanted in C order. Their rows are made here, each
// question asked once; the others, and those to be refused, are left to Python.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "dcp/dcp.h"
#include "dcp/fields.h"
#include "dcp/objects.h"
#include "dcp/stored_columns.h"
#include "dcp/tensor_fields.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// Of torch_dcpx.reader.locate.Form.
struct Form {
  std::uint64_t run_bytes = 0;  // 0: not in C order, or no plain payload
  bool is_foreign = false;      // named by its storage alone
  py::object dtype;
  py::object sizes;
};

bool are_equal(const py::object& a, const py::object& b) {
  const int truth = PyObject_RichCompareBool(a.ptr(), b.ptr(), Py_EQ);
  if (truth < 0) throw py::error_already_set();
  return truth != 0;
}

class ReadRows {
 public:
  explicit ReadRows(const py::dict& classes)
      : tensor_(classes["Tensor"]),
        parameter_(classes["Parameter"]),
        byte_io_(classes["BYTE_IO"]),
        read_class_(classes["Read"]),
        claim_class_(classes["Claim"]),
        fields_(classes["strided"]) {
    check_tuple_class(read_class_);
    check_tuple_class(claim_class_);
  }

  py::tuple plain_reads(const py::list& items, const py::list& files, const py::list& places,
                        const py::list& entries, const py::list& forms, const py::dict& state,
                        const py::dict& stored, const StoredColumns* columns,
                        const py::object& is_host, const py::object& ordinal_of) const {
    const Py_ssize_t count = PyList_GET_SIZE(items.ptr());
    if (PyList_GET_SIZE(files.ptr()) != count || PyList_GET_SIZE(places.ptr()) != count ||
        PyList_GET_SIZE(entries.ptr()) != count) {
      throw py::value_error("items and their places differ in number");
    }
    std::vector<Form> known;
    for (const py::handle& form : forms) {
      known.push_back({to_u64(get_attr(form, run_bytes_)), !is_true(get_attr(form, named_dtype_)),
                       get_attr(form, dtype_), get_attr(form, sizes_)});
    }
    py::list reads;
    py::set devices;
    // Tuples, which a mode of torch's that answers for a tensor cannot change meanwhile.
    const py::tuple all(items), its_files(files), its_places(places), its_entries(entries);
    for (Py_ssize_t i = 0; i < count; ++i) {
      const py::handle place = field(its_places, i);
      check_tuple(place, 4, "a place has 4 fields");
      const std::uint64_t number = to_u64(field(place, 0));
      if (number >= known.size()) throw py::value_error("a place numbers no form");
      const Form& form = known[number];
      py::object read;
      if (form.run_bytes != 0 && is_of_dtype(field(all, i), form, stored, columns)) {
        read = read_of(field(all, i), form, field(its_files, i), place, field(its_entries, i),
                       state, is_host, ordinal_of, devices);
      }
      reads.append(read ? read : py::object(py::none()));
    }
    return py::make_tuple(reads, devices);
  }

 private:
  // Whether the metadata says the dtype that is stored in a file of stock's. `stored` has entries,
  // or their numbers in the columns, by name.
  bool is_of_dtype(const py::handle& item, const Form& form, const py::dict& stored,
                   const StoredColumns* columns) const {
    if (!form.is_foreign) return true;
    const auto entry = py::reinterpret_borrow<py::object>(
        find(stored, get_attr(get_attr(item, storage_index_), fqn_)));
    if (!entry) return true;  // nothing is said
    if (PyLong_CheckExact(entry.ptr()) == 0) {
      const py::object properties = py::getattr(entry, properties_, py::none());
      return !properties.is_none() && get_attr(properties, dtype_).is(form.dtype);
    }
    const auto number = entry.cast<std::int64_t>();
    return columns != nullptr && columns->is_tensor(number) &&
           columns->dtype(number).is(form.dtype);
  }

  // Null for what is not a whole tensor in C order of the stored dtype.
  py::object read_of(const py::handle& item, const Form& form, const py::handle& file,
                     const py::handle& place, const py::handle& entry, const py::dict& state,
                     const py::object& is_host, const py::object& ordinal_of,
                     py::set& devices) const {
    if (get_attr(item, type_).is(byte_io_)) return {};
    const py::object dest = get_attr(item, dest_index_);
    const py::object fqn = get_attr(dest, fqn_);
    const auto target = py::reinterpret_borrow<py::object>(find(state, fqn));
    if (!target || !is_tensor(target) || !get_attr(target, dtype_).is(form.dtype) ||
        !are_equal(get_attr(target, shape_), form.sizes) ||
        !are_equal(form.sizes, get_attr(item, lengths_))) {
      return {};
    }
    long long device = -1;
    if (!is_true(checked(PyObject_CallOneArg(is_host.ptr(), target.ptr())))) {
      device = checked(PyObject_CallOneArg(ordinal_of.ptr(), target.ptr())).cast<long long>();
      if (device < 0) return {};
    }
    if (!fields_.is_plain(target) || !is_origin(get_attr(dest, offset_)) ||
        !is_origin(get_attr(item, storage_offsets_)) || is_true(get_attr(entry, descriptors_))) {
      return {};
    }
    const TensorFields::Memory memory = fields_.memory(target);
    const std::uint64_t begin = to_u64(field(place, 1));
    const std::uint64_t payload_bytes = to_u64(field(place, 2));
    const std::uint64_t storage_offset = to_u64(field(place, 3));
    std::uint64_t skipped = 0;
    std::uint64_t end = 0;
    if (memory.address == 0 ||
        __builtin_mul_overflow(storage_offset, fields_.itemsize(target), &skipped) ||
        __builtin_add_overflow(skipped, form.run_bytes, &end) || end > payload_bytes ||
        memory.storage_begin + form.run_bytes > memory.storage_bytes) {
      return {};
    }
    if (device >= 0) devices.add(py::int_(device));
    const py::tuple row = py::make_tuple(file, begin + skipped, form.run_bytes, empty_, empty_,
                                         empty_, memory.address, form.run_bytes, fqn, device);
    const py::object claim = new_tuple(
        claim_class_, py::make_tuple(memory.address, memory.address + form.run_bytes, dest));
    return new_tuple(read_class_, py::make_tuple(row, claim, target, py::none()));
  }

  bool is_tensor(const py::object& value) const {
    auto* const type = reinterpret_cast<PyObject*>(Py_TYPE(value.ptr()));
    return type == tensor_.ptr() || type == parameter_.ptr();
  }

  py::object tensor_, parameter_, byte_io_, read_class_, claim_class_;
  TensorFields fields_;
  py::tuple empty_;
  py::object run_bytes_ = interned("run_bytes"), dtype_ = interned("dtype"),
             sizes_ = interned("sizes"), type_ = interned("type"),
             dest_index_ = interned("dest_index"), fqn_ = interned("fqn"),
             shape_ = interned("shape"), lengths_ = interned("lengths"),
             offset_ = interned("offset"), storage_offsets_ = interned("storage_offsets"),
             descriptors_ = interned("transform_descriptors"),
             storage_index_ = interned("storage_index"), properties_ = interned("properties"),
             named_dtype_ = interned("named_dtype");
};

}  // namespace

void bind_read_rows(py::module_& module) {
  py::class_<ReadRows>(module, "ReadRows", "What a load makes in Python of each of its items.")
      .def(py::init<const py::dict&>(), py::arg("classes"))
      .def("plain_reads", &ReadRows::plain_reads, py::arg("items"), py::arg("files"),
           py::arg("places"), py::arg("entries"), py::arg("forms"), py::arg("state"),
           py::arg("stored"), py::arg("columns").none(true), py::arg("is_host"),
           py::arg("ordinal_of"),
           "(reads of whole tensors in C order whose dtype is that of the metadata, in files of "
           "stock's, None for other "
           "items; the devices they go to).");
}

}  // namespace dcpx
