// The trailer of a `.metadata`, looked into without an object a chunk: DCP's objects are made of
// its columns when somebody asks for them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/siphash.h"
#include "dcp/plan_items.h"
#include "dcp/python.h"
#include "format/stored_table.h"
#include "plan/overlap.h"

namespace dcpx {

// What the columns say of one tensor. Valid as long as they are.
struct StoredTensor {
  std::size_t ndim = 0;
  const std::int64_t* sizes = nullptr;  // [ndim]
  plan::Boxes chunks;
};

// Not thread-safe beyond the GIL. Owns references to the buffers of its columns and to what it was
// asked for: an item's place is one object, whoever asks.
class StoredColumns {
 public:
  // `strings`: those that columns of string numbers name. `columns`: buffers by name, int64 at a
  // multiple of 8. `values`: "dtype" and "layout" by string number, lists "memory_formats" and
  // "descriptors" (None last), class "StorageInfo", "has_strides" of torch, "hash_key": 16 bytes
  // that no file can know.
  // Throws Error where lengths or numbers contradict each other: nothing is read outside of a
  // column, whatever a file says.
  StoredColumns(ItemMaker& maker, const pybind11::list& strings, const pybind11::dict& columns,
                const pybind11::dict& values);

  // Whether two stored items have one name and offset.
  bool has_twins() const { return has_twins_; }
  std::size_t entry_count() const { return table_.tensor_of.size(); }
  std::size_t item_count() const { return table_.storage_fqn.count; }
  std::int64_t made_count() const { return made_count_; }
  // Slots of the index that were taken when an item looked for one.
  std::int64_t probe_count() const { return probe_count_; }

  // Whether `number` is that of an entry, and the entry a tensor.
  bool is_tensor(std::int64_t number) const;
  // The dtype of entry `number`, a tensor. Throws Error for any other number.
  pybind11::object dtype(std::int64_t number) const;
  // What the columns say of entry `number`, a tensor. Throws Error for any other number.
  StoredTensor tensor(std::int64_t number) const;
  // The entry; without its chunks where `has_chunks` is false.
  pybind11::object entry(std::int64_t number, bool has_chunks);
  pybind11::list entries(const pybind11::list& numbers);
  // One chunk of a tensor. Throws Error where there is none.
  pybind11::object chunk(std::int64_t number, std::size_t at);
  // The place of an item, None where it is not stored; NotImplemented where only Python can
  // compare the index (another class than DCP's, or fields of another type).
  pybind11::object place(const pybind11::handle& index);
  // Those of many; None where only Python can compare one of them.
  pybind11::object places(const pybind11::list& indices);
  // All of storage_data.
  pybind11::dict all_places();

 private:
  struct Slot {
    std::uint32_t row = kNoRow;
    std::uint32_t tag = 0;
  };
  struct Key {
    PyObject* fqn;
    std::int64_t ndim;  // -1: no offset
    const std::int64_t* offsets;
  };
  static constexpr std::uint32_t kNoRow = UINT32_MAX;
  static constexpr std::int64_t kUnlike = -2;  // an index that is none of ours to compare

  void index_items();
  Key key_of(std::size_t row) const;
  std::uint64_t hash_of(PyObject* name) const;
  std::uint64_t hash_of(std::uint64_t name_hash, const Key& key) const;
  bool is_same(const Key& a, const Key& b) const;
  std::int64_t row_of(const Key& key) const;           // -1: none
  std::int64_t row_of(const pybind11::handle& index);  // or kUnlike
  pybind11::object place_of(std::size_t row);
  pybind11::object new_place(std::size_t row);
  pybind11::object chunk_of(const StoredTensor& stored, std::size_t at);
  pybind11::object properties_of(std::size_t tensor);
  PyObject* text(std::int64_t number) const {
    return PyList_GET_ITEM(strings_.ptr(), static_cast<Py_ssize_t>(number));
  }

  ItemMaker& maker_;
  PinnedBuffers buffers_;  // of the table's columns
  pybind11::list strings_;
  pybind11::dict dtypes_, layouts_;
  pybind11::list memory_formats_, descriptors_;
  pybind11::object info_class_;
  bool has_strides_;  // of torch's TensorProperties
  SipHash::Key hash_key_;
  pybind11::object relative_path_, offset_, length_, transform_descriptors_;

  StoredTable table_;
  std::vector<Slot> slots_;                                   // by hash; at most half of them taken
  std::unordered_map<std::size_t, pybind11::object> places_;  // handed out, by item
  std::vector<std::int64_t> wanted_offset_;                   // of the index at hand
  std::int64_t made_count_ = 0;                               // chunks and places, for tests
  std::int64_t probe_count_ = 0;                              // for tests
  bool has_twins_ = false;
};

}  // namespace dcpx
