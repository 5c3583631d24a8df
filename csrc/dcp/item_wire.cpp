#include "dcp/item_wire.h"

#include "dcp/python.h"

namespace dcpx {

namespace py = pybind11;

py::object fields_of(const py::handle& object, const py::object& its_class, Py_ssize_t count) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object.ptr())) != its_class.ptr()) return {};
  auto fields = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object.ptr(), nullptr));
  if (!fields) throw py::error_already_set();
  if (PyDict_GET_SIZE(fields.ptr()) != count) return {};
  return fields;
}

PyObject* field_in(const py::object& fields, const py::object& name) {
  PyObject* value = PyDict_GetItemWithError(fields.ptr(), name.ptr());
  if (value == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

bool to_plain_int(PyObject* value, std::int64_t* number) {
  if (value == nullptr || PyLong_CheckExact(value) == 0) return false;
  int overflow = 0;
  *number = PyLong_AsLongLongAndOverflow(value, &overflow);
  return overflow == 0;
}

std::string_view utf8_of(PyObject* text, std::string* storage) {
  if (PyUnicode_IS_COMPACT_ASCII(text)) {
    return {static_cast<const char*>(PyUnicode_DATA(text)),
            static_cast<std::size_t>(PyUnicode_GET_LENGTH(text))};
  }
  *storage = to_string(text);
  return *storage;
}

py::object interned_text(std::string_view utf8) {
  PyObject* text =
      PyUnicode_DecodeUTF8(utf8.data(), static_cast<Py_ssize_t>(utf8.size()), "surrogatepass");
  if (text == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError) == 0) throw py::error_already_set();
    PyErr_Clear();
    wire::refuse("a text is no UTF-8");
  }
  PyUnicode_InternInPlace(&text);
  return py::reinterpret_steal<py::object>(text);
}

// ---- Out ----------------------------------------------------------------------------------------

void WireWriter::put_name(PyObject* text) {
  PyObject* known = PyDict_GetItemWithError(numbers_.ptr(), text);
  if (known == nullptr) {
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const std::uint64_t number = static_cast<std::uint64_t>(PyDict_GET_SIZE(numbers_.ptr()));
    if (PyDict_SetItem(numbers_.ptr(), text, py::int_(number).ptr()) != 0) {
      throw py::error_already_set();
    }
    std::string storage;
    const std::string_view utf8 = utf8_of(text, &storage);
    columns_[kTextBytes].put(utf8.size());
    columns_[kTexts].put_text(utf8);
    columns_[kNames].put(0);
    next_name_ = number + 1;
    return;
  }
  const std::uint64_t number = PyLong_AsUnsignedLongLong(known);
  // Mostly the one behind the last: plans mention names in one order.
  const auto step = static_cast<std::int64_t>(number) - static_cast<std::int64_t>(next_name_);
  columns_[kNames].put(
      1 + ((static_cast<std::uint64_t>(step) << 1) ^ static_cast<std::uint64_t>(step >> 63)));
  next_name_ = number + 1;
}

bool WireWriter::add_size(PyObject* size, std::size_t* number) {
  if (size == nullptr || !maker_.is_size(size)) return false;
  const Py_ssize_t ndim = PyTuple_GET_SIZE(size);
  values_.resize(static_cast<std::size_t>(ndim));
  for (Py_ssize_t d = 0; d < ndim; ++d) {
    if (!to_plain_int(PyTuple_GET_ITEM(size, d), &values_[static_cast<std::size_t>(d)])) {
      return false;
    }
  }
  bool is_new = false;
  *number = sizes_.add(values_.data(), values_.size(), &is_new);
  if (is_new) {
    columns_[kSizes].put(values_.size());
    for (const std::int64_t value : values_) columns_[kSizes].put_signed(value);
  }
  return true;
}

bool WireWriter::read_index(const py::handle& index, WireIndex* out) {
  py::object fields = fields_of(index, maker_.index_class(), 3);
  if (!fields) fields = fields_of(index, maker_.index_class(), 2);  // no offset
  if (!fields) return false;
  PyObject* fqn = field_in(fields, maker_.names.fqn);
  PyObject* offset = field_in(fields, maker_.names.offset);
  PyObject* hint = field_in(fields, maker_.names.index);
  if (fqn == nullptr || PyUnicode_CheckExact(fqn) == 0 || hint == nullptr) return false;
  out->has_offset = offset != nullptr && offset != Py_None;
  if (out->has_offset && !add_size(offset, &out->offset)) return false;
  out->has_hint = hint != Py_None;
  if (out->has_hint && !to_plain_int(hint, &out->hint)) return false;
  out->fqn = py::reinterpret_borrow<py::object>(fqn);
  return true;
}

void WireWriter::put_index(const WireIndex& index) {
  put_name(index.fqn.ptr());
  if (index.has_offset) columns_[kRest].put(index.offset);
  if (index.has_hint) columns_[kRest].put_signed(index.hint);
}

// ---- In -----------------------------------------------------------------------------------------

WireReader::WireReader(const ItemMaker& maker, std::string_view message)
    : maker_(maker), columns_(wire::split(message, kWireColumns)) {
  while (!columns_[kTextBytes].is_done()) {
    texts_.push_back(columns_[kTexts].get_text(columns_[kTextBytes].get()));
  }
  names_.resize(texts_.size());
  std::vector<std::int64_t> values;
  wire::Reader& sizes = columns_[kSizes];
  while (!sizes.is_done()) {
    values.resize(sizes.get_below(sizes.left()));
    for (std::int64_t& value : values) value = sizes.get_signed();
    sizes_.push_back(maker.size_of(values.data(), values.size()));
  }
}

std::size_t WireReader::get_name() {
  const std::uint64_t mention = columns_[kNames].get();
  std::uint64_t number = new_names_;
  if (mention == 0) {
    ++new_names_;
  } else {
    const std::uint64_t step = mention - 1;
    number = next_name_ + ((step >> 1) ^ (0 - (step & 1)));  // wraps, and is refused then
  }
  if (number >= texts_.size()) wire::refuse("a name is not in the table");
  next_name_ = static_cast<std::size_t>(number) + 1;
  return static_cast<std::size_t>(number);
}

const py::object& WireReader::name(std::size_t number) {
  py::object& text = names_[number];
  if (!text) text = interned_text(texts_[number]);
  return text;
}

py::object WireReader::index(std::uint8_t flags, py::object offset) {
  const py::object& fqn = name(get_name());
  if ((flags & kHasOffset) != 0) offset = sizes_[columns_[kRest].get_below(sizes_.size())];
  const py::object hint = (flags & kHasHint) != 0
                              ? py::object(py::int_(columns_[kRest].get_signed()))
                              : py::object(py::none());
  return maker_.metadata_index(fqn, offset, hint);
}

void WireReader::check_done() const { wire::check_done(columns_); }

}  // namespace dcpx
