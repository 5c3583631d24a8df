#include "dcp/plan_items.h"

#include <string>

namespace dcpx {
namespace {

constexpr std::size_t kMaxDims = 64;  // of a tensor

namespace py = pybind11;

py::object call(const py::object& function) {
  PyObject* result = PyObject_CallNoArgs(function.ptr());
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

const char* name_of(plan::Offence offence) {
  switch (offence) {
    case plan::Offence::kTooLarge:
      return "too large";
    case plan::Offence::kOutside:
      return "outside";
    case plan::Offence::kOverlap:
      return "overlap";
    case plan::Offence::kHole:
      break;
  }
  return "hole";
}

FieldNames::FieldNames()
    : fqn(interned("fqn")),
      offset(interned("offset")),
      index(interned("index")),
      type(interned("type")),
      dest_index(interned("dest_index")),
      dest_offsets(interned("dest_offsets")),
      storage_index(interned("storage_index")),
      storage_offsets(interned("storage_offsets")),
      lengths(interned("lengths")),
      bytes_io_data(interned("bytes_io_data")),
      tensor_data(interned("tensor_data")),
      chunk(interned("chunk")),
      properties(interned("properties")),
      size(interned("size")),
      offsets(interned("offsets")),
      sizes(interned("sizes")),
      chunks(interned("chunks")),
      dtype(interned("dtype")),
      layout(interned("layout")),
      requires_grad(interned("requires_grad")),
      memory_format(interned("memory_format")),
      pin_memory(interned("pin_memory")),
      strides(interned("strides")),
      shape(interned("shape")),
      stride(interned("stride")),
      is_pinned(interned("is_pinned")),
      itemsize(interned("itemsize")),
      size_in_bytes(interned("size_in_bytes")),
      storage_data(interned("storage_data")),
      relative_path(interned("relative_path")),
      length(interned("length")),
      transform_descriptors(interned("transform_descriptors")) {}

ItemMaker::ItemMaker(const py::dict& classes)
    : size_class_(classes["Size"]),
      index_class_(classes["MetadataIndex"]),
      read_class_(classes["ReadItem"]),
      write_class_(classes["WriteItem"]),
      data_class_(classes["TensorWriteData"]),
      properties_class_(classes["TensorProperties"]),
      chunk_class_(classes["ChunkStorageMetadata"]),
      tensor_entry_class_(classes["TensorStorageMetadata"]),
      bytes_entry_class_(classes["BytesStorageMetadata"]),
      result_class_(classes["WriteResult"]),
      place_class_(classes["_StorageInfo"]),
      read_tensor_(classes["READ_TENSOR"]),
      read_bytes_(classes["READ_BYTES"]),
      tensor_(classes["TENSOR"]),
      shard_(classes["SHARD"]),
      byte_io_(classes["BYTE_IO"]),
      contiguous_(classes["contiguous_format"]),
      has_strides_(classes["has_strides"].cast<bool>()) {
  for (const py::object& one :
       {index_class_, read_class_, write_class_, data_class_, properties_class_, chunk_class_,
        tensor_entry_class_, bytes_entry_class_, result_class_, place_class_, size_class_}) {
    if (PyType_Check(one.ptr()) == 0) throw py::type_error("a class of DCP's is wanted");
  }
  const std::vector<std::int64_t> none(kMaxDims, 0);
  for (std::size_t n = 0; n <= none.size(); ++n) zeros_.push_back(size_of(none.data(), n));
}

py::object ItemMaker::make(const py::object& its_class) const {
  return new_object(its_class, no_arguments_);
}

py::object ItemMaker::as_size(py::object values) const {
  if (is_size(values)) return values;
  PyObject* made = PyObject_CallOneArg(size_class_.ptr(), values.ptr());
  if (made == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(made);
}

py::object ItemMaker::size_of(const std::int64_t* values, std::size_t count) const {
  py::tuple ints(count);
  for (std::size_t i = 0; i < count; ++i) {
    PyObject* number = PyLong_FromLongLong(values[i]);
    if (number == nullptr) throw py::error_already_set();
    PyTuple_SET_ITEM(ints.ptr(), static_cast<Py_ssize_t>(i), number);
  }
  return as_size(std::move(ints));
}

py::object ItemMaker::zeros(std::size_t count) const {
  if (count < zeros_.size()) return zeros_[count];
  const std::vector<std::int64_t> none(count, 0);
  return size_of(none.data(), count);
}

py::object ItemMaker::metadata_index(const py::object& fqn, const py::object& offset,
                                     const py::object& index) const {
  py::object made = make(index_class_);
  set_field(made, names.fqn, fqn);
  set_field(made, names.index, index);
  if (offset) set_field(made, names.offset, offset);
  return made;
}

py::object ItemMaker::byte_read(const py::object& fqn) const {
  const py::object zero = zeros(1);
  py::object made = make(read_class_);
  set_field(made, names.type, read_bytes_);
  set_field(made, names.dest_index, metadata_index(fqn, py::object(), py::none()));
  set_field(made, names.dest_offsets, zero);
  set_field(made, names.storage_index, metadata_index(fqn, py::object(), py::none()));
  set_field(made, names.storage_offsets, zero);
  set_field(made, names.lengths, zero);
  return made;
}

py::object ItemMaker::tensor_read(const py::object& dest_index, const py::object& dest_offsets,
                                  const py::object& storage_index,
                                  const py::object& storage_offsets,
                                  const py::object& lengths) const {
  py::object made = make(read_class_);
  set_field(made, names.type, read_tensor_);
  set_field(made, names.dest_index, dest_index);
  set_field(made, names.dest_offsets, dest_offsets);
  set_field(made, names.storage_index, storage_index);
  set_field(made, names.storage_offsets, storage_offsets);
  set_field(made, names.lengths, lengths);
  return made;
}

py::object ItemMaker::byte_write(const py::object& fqn) const {
  py::object made = make(write_class_);
  set_field(made, names.index, metadata_index(fqn, py::object(), py::none()));
  set_field(made, names.type, byte_io_);
  set_field(made, names.bytes_io_data, py::none());
  set_field(made, names.tensor_data, py::none());
  return made;
}

py::object ItemMaker::tensor_write(const py::object& index, bool is_shard, const py::object& chunk,
                                   const py::object& properties, const py::object& size) const {
  return write_item(index, is_shard ? 1 : 0, write_data(chunk, properties, size));
}

py::object ItemMaker::write_item(const py::object& index, int type, const py::object& data) const {
  const py::object* const types[] = {&tensor_, &shard_, &byte_io_};
  return write_item(index, *types[type], py::none(), data);
}

py::object ItemMaker::write_item(const py::object& index, const py::object& type,
                                 const py::object& bytes_io_data, const py::object& data) const {
  py::object made = make(write_class_);
  set_field(made, names.index, index);
  set_field(made, names.type, type);
  set_field(made, names.bytes_io_data, bytes_io_data);
  set_field(made, names.tensor_data, data);
  return made;
}

py::object ItemMaker::write_data(const py::object& chunk, const py::object& properties,
                                 const py::object& size) const {
  py::object made = make(data_class_);
  set_field(made, names.chunk, chunk);
  set_field(made, names.properties, properties);
  set_field(made, names.size, size);
  return made;
}

int ItemMaker::write_type_code(const py::handle& type) const {
  if (is_shard(type)) return 1;
  if (type.ptr() == tensor_.ptr()) return 0;
  return is_byte_io(type) ? 2 : -1;
}

py::object ItemMaker::copied(const py::object& properties) const {
  if (reinterpret_cast<PyObject*>(Py_TYPE(properties.ptr())) != properties_class_.ptr()) {
    return properties;
  }
  py::object made = make(properties_class_);
  for (const py::object* name : {&names.dtype, &names.layout, &names.requires_grad,
                                 &names.memory_format, &names.pin_memory}) {
    set_field(made, *name, get_attr(properties, *name));
  }
  if (has_strides_) set_field(made, names.strides, get_attr(properties, names.strides));
  return made;
}

py::object ItemMaker::result(const py::object& index, std::int64_t nbytes,
                             const py::object& place) const {
  py::object made = make(result_class_);
  set_field(made, names.index, index);
  set_field(made, names.size_in_bytes, py::int_(nbytes));
  set_field(made, names.storage_data, place);
  return made;
}

py::object ItemMaker::place(const py::object& path, std::int64_t offset,
                            std::int64_t length) const {
  py::object made = make(place_class_);
  set_field(made, names.relative_path, path);
  set_field(made, names.offset, py::int_(offset));
  set_field(made, names.length, py::int_(length));
  return made;
}

py::object ItemMaker::chunk(const py::object& offsets, const py::object& sizes) const {
  py::object made = make(chunk_class_);
  set_field(made, names.offsets, offsets);
  set_field(made, names.sizes, sizes);
  return made;
}

py::object ItemMaker::properties(const py::handle& tensor, const py::object& requires_grad) const {
  py::object made = make(properties_class_);
  set_field(made, names.dtype, get_attr(tensor, names.dtype));
  set_field(made, names.layout, get_attr(tensor, names.layout));
  set_field(made, names.requires_grad,
            requires_grad ? requires_grad : get_attr(tensor, names.requires_grad));
  set_field(made, names.memory_format, contiguous_);
  set_field(made, names.pin_memory, call(get_attr(tensor, names.is_pinned)));
  if (has_strides_) set_field(made, names.strides, call(get_attr(tensor, names.stride)));
  return made;
}

py::object ItemMaker::stored_properties(const py::object& dtype, const py::object& layout,
                                        bool requires_grad, const py::object& memory_format,
                                        bool pin_memory, const py::object& strides) const {
  py::object made = make(properties_class_);
  set_field(made, names.dtype, dtype);
  set_field(made, names.layout, layout);
  set_field(made, names.requires_grad, py::bool_(requires_grad));
  set_field(made, names.memory_format, memory_format);
  set_field(made, names.pin_memory, py::bool_(pin_memory));
  if (strides) set_field(made, names.strides, strides);
  return made;
}

py::object ItemMaker::tensor_entry(const py::object& properties, const py::object& size,
                                   const py::object& chunks) const {
  py::object made = make(tensor_entry_class_);
  set_field(made, names.properties, properties);
  set_field(made, names.size, size);
  set_field(made, names.chunks, chunks);
  return made;
}

py::object ItemMaker::copy_of(const py::handle& object) const {
  py::object copied = make(py::type::of(object));
  const auto to = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(copied.ptr(), nullptr));
  const auto from =
      py::reinterpret_steal<py::object>(PyObject_GenericGetDict(object.ptr(), nullptr));
  if (!to || !from || PyDict_Update(to.ptr(), from.ptr()) != 0) throw py::error_already_set();
  return copied;
}

}  // namespace dcpx
