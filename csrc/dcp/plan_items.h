// Instances of DCP's dataclasses, a hundred thousand in one call.
//
// They are made as `object.__new__` makes them, and their fields set as `object.__setattr__` sets
// them: a constructor written in Python costs ten times as much. `_compat` says whether a torch's
// classes have the fields that are set here and no others without a default.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "dcp/objects.h"
#include "plan/coverage.h"

namespace dcpx {

const char* name_of(plan::Offence offence);

// Names of attributes, interned.
struct FieldNames {
  FieldNames();
  pybind11::object fqn, offset, index, type, dest_index, dest_offsets, storage_index,
      storage_offsets, lengths, bytes_io_data, tensor_data, chunk, properties, size, offsets, sizes,
      chunks, dtype, layout, requires_grad, memory_format, pin_memory, strides, shape, stride,
      is_pinned, itemsize, size_in_bytes, storage_data, relative_path, length,
      transform_descriptors;
};

// The classes, and what is made of them. Not thread-safe beyond the GIL.
class ItemMaker {
 public:
  // `classes`: by name, as `torch_dcpx/_plan_classes.py` lists them.
  explicit ItemMaker(const pybind11::dict& classes);

  pybind11::object size_of(const std::int64_t* values, std::size_t count) const;
  pybind11::object zeros(std::size_t count) const;
  pybind11::object as_size(pybind11::object values) const;  // of any sequence of ints
  bool is_size(const pybind11::handle& value) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == size_class_.ptr();
  }

  bool is_index(const pybind11::handle& value) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(value.ptr())) == index_class_.ptr();
  }
  // A new instance without fields.
  pybind11::object make(const pybind11::object& its_class) const;

  // `offset`: a torch.Size or null; `index`: an int or None.
  pybind11::object metadata_index(const pybind11::object& fqn, const pybind11::object& offset,
                                  const pybind11::object& index) const;
  pybind11::object byte_read(const pybind11::object& fqn) const;
  pybind11::object tensor_read(const pybind11::object& dest_index,
                               const pybind11::object& dest_offsets,
                               const pybind11::object& storage_index,
                               const pybind11::object& storage_offsets,
                               const pybind11::object& lengths) const;

  pybind11::object byte_write(const pybind11::object& fqn) const;
  pybind11::object tensor_write(const pybind11::object& index, bool is_shard,
                                const pybind11::object& chunk, const pybind11::object& properties,
                                const pybind11::object& size) const;
  pybind11::object chunk(const pybind11::object& offsets, const pybind11::object& sizes) const;
  // Of a tensor, as TensorProperties.create_from_tensor; `requires_grad` null: the tensor's own.
  pybind11::object properties(const pybind11::handle& tensor,
                              const pybind11::object& requires_grad) const;
  // As metadata has stored them; `strides`: a tuple or None, null where torch knows of none.
  pybind11::object stored_properties(const pybind11::object& dtype, const pybind11::object& layout,
                                     bool requires_grad, const pybind11::object& memory_format,
                                     bool pin_memory, const pybind11::object& strides) const;
  pybind11::object tensor_entry(const pybind11::object& properties, const pybind11::object& size,
                                const pybind11::object& chunks) const;
  pybind11::object bytes_entry() const { return make(bytes_entry_class_); }
  bool is_bytes_entry(const pybind11::handle& entry) const {
    return reinterpret_cast<PyObject*>(Py_TYPE(entry.ptr())) == bytes_entry_class_.ptr();
  }
  // An object of the same class with the same fields, for whoever may change them.
  pybind11::object copy_of(const pybind11::handle& object) const;

  // The same, of parts that are there. `type`: a code of `write_type_code`.
  pybind11::object write_item(const pybind11::object& index, int type,
                              const pybind11::object& data) const;
  pybind11::object write_item(const pybind11::object& index, const pybind11::object& type,
                              const pybind11::object& bytes_io_data,
                              const pybind11::object& data) const;
  pybind11::object write_data(const pybind11::object& chunk, const pybind11::object& properties,
                              const pybind11::object& size) const;
  // Properties with the same fields; those of another class than torch's as they are.
  pybind11::object copied(const pybind11::object& properties) const;
  pybind11::object result(const pybind11::object& index, std::int64_t nbytes,
                          const pybind11::object& place) const;
  pybind11::object place(const pybind11::object& path, std::int64_t offset,
                         std::int64_t length) const;

  // 0 to 2 for a WriteItemType, else -1.
  int write_type_code(const pybind11::handle& type) const;
  const pybind11::object& index_class() const { return index_class_; }
  const pybind11::object& write_class() const { return write_class_; }
  const pybind11::object& data_class() const { return data_class_; }
  const pybind11::object& chunk_class() const { return chunk_class_; }
  const pybind11::object& properties_class() const { return properties_class_; }
  const pybind11::object& result_class() const { return result_class_; }
  const pybind11::object& place_class() const { return place_class_; }
  bool has_strides() const { return has_strides_; }

  bool is_shard(const pybind11::handle& type) const { return type.ptr() == shard_.ptr(); }
  bool is_byte_io(const pybind11::handle& type) const { return type.ptr() == byte_io_.ptr(); }

  const FieldNames names;

 private:
  pybind11::object size_class_, index_class_, read_class_, write_class_, data_class_,
      properties_class_, chunk_class_, tensor_entry_class_, bytes_entry_class_, result_class_,
      place_class_;
  pybind11::object read_tensor_, read_bytes_, tensor_, shard_, byte_io_, contiguous_;
  pybind11::tuple no_arguments_;
  std::vector<pybind11::object> zeros_;  // by how many; never changed: making one can run any code
  bool has_strides_;
};

class StoredColumns;

// (items, offences) of a load plan; see `_C.pyi`. `columns` may be null.
pybind11::tuple make_read_items(ItemMaker& maker, const pybind11::list& rows,
                                const pybind11::function& fallback, bool is_swept,
                                const StoredColumns* columns);
pybind11::list make_write_items(ItemMaker& maker, const pybind11::list& rows);
pybind11::list dedup_items(ItemMaker& maker, const pybind11::list& plans,
                           const pybind11::list& can_split, bool to_lowest_rank,
                           const pybind11::set& lowest_names, const pybind11::set& whole_names,
                           const pybind11::object& unlike);
pybind11::list unlike_items(ItemMaker& maker, const pybind11::list& plans);
// `kept`: by plan, whether its items are planned with again, so that the entries get copies.
pybind11::tuple make_global_plan(ItemMaker& maker, const pybind11::list& plans,
                                 const pybind11::list& kept);
pybind11::dict copy_entries(ItemMaker& maker, const pybind11::dict& entries);

}  // namespace dcpx
