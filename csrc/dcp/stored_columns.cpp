#include "dcp/stored_columns.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "common/error.h"

namespace dcpx {
namespace {

namespace py = pybind11;

SipHash::Key hash_key(const py::bytes& secret) {
  const auto bytes = secret.cast<std::string_view>();
  SipHash::Key key;
  DCPX_CHECK(bytes.size() == sizeof(key), "a hash's key has 16 bytes");
  std::memcpy(key.data(), bytes.data(), sizeof(key));
  return key;
}

StoredTable read_table(PinnedBuffers& buffers, const py::dict& columns, std::size_t strings,
                       std::size_t descriptors) {
  const auto find = [&](const char* name) {
    std::uint64_t nbytes = 0;
    const std::byte* begin = buffers.add(columns[name], /*is_writable=*/false, nbytes);
    return RawColumn{begin, nbytes};
  };
  return {find, strings, descriptors, columns.contains("tensor_stride_count")};
}

// Ends with None, which nothing numbers.
std::size_t descriptor_count(const py::list& descriptors) {
  DCPX_CHECK(!descriptors.empty(), "descriptors end with None");
  return descriptors.size() - 1;
}

}  // namespace

StoredColumns::StoredColumns(ItemMaker& maker, const py::list& strings, const py::dict& columns,
                             const py::dict& values)
    : maker_(maker),
      strings_(strings),
      dtypes_(values["dtype"]),
      layouts_(values["layout"]),
      memory_formats_(values["memory_formats"]),
      descriptors_(values["descriptors"]),
      info_class_(values["StorageInfo"]),
      has_strides_(values["has_strides"].cast<bool>()),
      hash_key_(hash_key(values["hash_key"])),
      relative_path_(interned("relative_path")),
      offset_(interned("offset")),
      length_(interned("length")),
      transform_descriptors_(interned("transform_descriptors")),
      table_(read_table(buffers_, columns, strings_.size(), descriptor_count(descriptors_))) {
  for (const py::handle& one : strings_) {
    if (PyUnicode_CheckExact(one.ptr()) == 0) throw py::type_error("strings are wanted");
  }
  if (PyType_Check(info_class_.ptr()) == 0) throw py::type_error("a class is wanted");
  index_items();
}

StoredColumns::Key StoredColumns::key_of(std::size_t row) const {
  return {text(table_.storage_fqn[row]), table_.storage_ndim[row],
          table_.storage_offsets.values + table_.offset_begins[row]};
}

// Not Python's hash of it: that of "" is 0, and of all others known by PYTHONHASHSEED.
std::uint64_t StoredColumns::hash_of(PyObject* name) const {
#if PY_VERSION_HEX < 0x030C0000
  if (PyUnicode_READY(name) != 0) throw py::error_already_set();
#endif
  const auto kind = static_cast<std::size_t>(PyUnicode_KIND(name));  // equal of equal strings
  const auto* data = static_cast<const std::byte*>(PyUnicode_DATA(name));
  const auto count = static_cast<std::size_t>(PyUnicode_GET_LENGTH(name));
  return SipHash::of(hash_key_, data, count * kind) ^ kind;
}

std::uint64_t StoredColumns::hash_of(std::uint64_t name_hash, const Key& key) const {
  SipHash hash(hash_key_);
  hash.add(name_hash);
  for (std::int64_t d = 0; d < key.ndim; ++d) {
    hash.add(static_cast<std::uint64_t>(key.offsets[d]));
  }
  return hash.finish() ^ (key.ndim < 0 ? 1 : 0);
}

bool StoredColumns::is_same(const Key& a, const Key& b) const {
  if (a.ndim != b.ndim) return false;
  if (a.ndim > 0 && !std::equal(a.offsets, a.offsets + a.ndim, b.offsets)) return false;
  return a.fqn == b.fqn || PyUnicode_Compare(a.fqn, b.fqn) == 0;
}

void StoredColumns::index_items() {
  std::size_t slots = 16;
  while (slots < 2 * table_.storage_fqn.count) slots *= 2;
  slots_.resize(slots);
  std::vector<std::uint64_t> names;
  names.reserve(strings_.size());
  for (const py::handle& name : strings_) names.push_back(hash_of(name.ptr()));
  for (std::size_t row = 0; row < table_.storage_fqn.count; ++row) {
    const Key key = key_of(row);
    const std::uint64_t hash =
        hash_of(names[static_cast<std::size_t>(table_.storage_fqn[row])], key);
    const auto tag = static_cast<std::uint32_t>(hash >> 32);
    std::size_t at = hash & (slots - 1);
    for (; slots_[at].row != kNoRow; at = (at + 1) & (slots - 1)) {
      if (slots_[at].tag == tag && is_same(key_of(slots_[at].row), key)) {
        has_twins_ = true;
        return;
      }
      ++probe_count_;
    }
    slots_[at] = {static_cast<std::uint32_t>(row), tag};
  }
}

std::int64_t StoredColumns::row_of(const Key& key) const {
  const std::uint64_t hash = hash_of(hash_of(key.fqn), key);
  const auto tag = static_cast<std::uint32_t>(hash >> 32);
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t at = hash & mask; slots_[at].row != kNoRow; at = (at + 1) & mask) {
    if (slots_[at].tag == tag && is_same(key_of(slots_[at].row), key)) return slots_[at].row;
  }
  return -1;
}

std::int64_t StoredColumns::row_of(const py::handle& index) {
  if (!maker_.is_index(index)) return kUnlike;
  const py::object fqn = get_attr(index, maker_.names.fqn);
  if (PyUnicode_CheckExact(fqn.ptr()) == 0) return kUnlike;
  const py::object offset = get_attr(index, maker_.names.offset);
  if (offset.is_none()) return row_of(Key{fqn.ptr(), -1, nullptr});
  if (!maker_.is_size(offset)) return kUnlike;
  wanted_offset_.clear();
  for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(offset.ptr()); ++d) {
    PyObject* value = PyTuple_GET_ITEM(offset.ptr(), d);
    int overflow = 0;
    if (PyLong_CheckExact(value) == 0) return kUnlike;
    wanted_offset_.push_back(PyLong_AsLongLongAndOverflow(value, &overflow));
    if (overflow != 0) return -1;  // beyond all that is stored
  }
  return row_of(
      Key{fqn.ptr(), static_cast<std::int64_t>(wanted_offset_.size()), wanted_offset_.data()});
}

bool StoredColumns::is_tensor(std::int64_t number) const {
  return number >= 0 && static_cast<std::size_t>(number) < table_.tensor_of.size() &&
         table_.tensor_of[static_cast<std::size_t>(number)] >= 0;
}

py::object StoredColumns::dtype(std::int64_t number) const {
  DCPX_CHECK(is_tensor(number), "a stored tensor's number is wanted");
  const auto at = static_cast<std::size_t>(table_.tensor_of[static_cast<std::size_t>(number)]);
  return dtypes_[py::int_(table_.dtype_numbers[at])];
}

StoredTensor StoredColumns::tensor(std::int64_t number) const {
  const StoredTable::Tensor found = table_.tensor(number);
  return {found.ndim, found.sizes, {found.offsets, found.lengths, found.chunks}};
}

py::object StoredColumns::properties_of(std::size_t tensor) {
  const auto constant = [&](const py::dict& known, std::int64_t number) {
    return py::object(known[py::int_(number)]);
  };
  py::object strides = has_strides_ ? py::object(py::none()) : py::object();
  if (has_strides_ && table_.stride_counts.values != nullptr && table_.stride_counts[tensor] >= 0) {
    const auto count = static_cast<std::size_t>(table_.stride_counts[tensor]);
    py::tuple made(count);
    for (std::size_t d = 0; d < count; ++d)
      made[d] = table_.strides[table_.begins[tensor].strides + d];
    strides = std::move(made);
  }
  return maker_.stored_properties(
      constant(dtypes_, table_.dtype_numbers[tensor]),
      constant(layouts_, table_.layout_numbers[tensor]), (table_.flags[tensor] & 1) != 0,
      memory_formats_[table_.format_codes[tensor]], (table_.flags[tensor] & 2) != 0, strides);
}

py::object StoredColumns::chunk_of(const StoredTensor& stored, std::size_t at) {
  ++made_count_;
  return maker_.chunk(maker_.size_of(stored.chunks.offsets + at * stored.ndim, stored.ndim),
                      maker_.size_of(stored.chunks.sizes + at * stored.ndim, stored.ndim));
}

py::object StoredColumns::chunk(std::int64_t number, std::size_t at) {
  const StoredTensor stored = tensor(number);
  DCPX_CHECK(at < stored.chunks.count, "a stored chunk's number is wanted");
  return chunk_of(stored, at);
}

py::object StoredColumns::entry(std::int64_t number, bool has_chunks) {
  DCPX_CHECK(number >= 0 && static_cast<std::size_t>(number) < table_.tensor_of.size(),
             "an entry's number is wanted");
  const std::int64_t at = table_.tensor_of[static_cast<std::size_t>(number)];
  if (at < 0) return maker_.bytes_entry();
  const StoredTensor stored = tensor(number);
  py::list chunks;
  for (std::size_t i = 0; has_chunks && i < stored.chunks.count; ++i) {
    chunks.append(chunk_of(stored, i));
  }
  return maker_.tensor_entry(properties_of(static_cast<std::size_t>(at)),
                             maker_.size_of(stored.sizes, stored.ndim), chunks);
}

py::list StoredColumns::entries(const py::list& numbers) {
  py::list made;
  for (const py::handle& number : numbers) made.append(entry(number.cast<std::int64_t>(), true));
  return made;
}

py::object StoredColumns::new_place(std::size_t row) {
  ++made_count_;
  py::object made = maker_.make(info_class_);
  const std::int64_t descriptors = table_.descriptor_numbers[row];
  const std::size_t last = descriptors_.size() - 1;  // None
  set_field(made, relative_path_, text(table_.paths[row]));
  set_field(made, offset_, py::int_(table_.file_offsets[row]));
  set_field(made, length_, py::int_(table_.lengths[row]));
  set_field(
      made, transform_descriptors_,
      py::object(descriptors_[descriptors < 0 ? last : static_cast<std::size_t>(descriptors)]));
  return made;
}

py::object StoredColumns::place_of(std::size_t row) {
  const auto known = places_.find(row);
  if (known != places_.end()) return known->second;
  return places_.emplace(row, new_place(row)).first->second;
}

py::object StoredColumns::place(const py::handle& index) {
  const std::int64_t row = row_of(index);
  if (row == kUnlike) return py::reinterpret_borrow<py::object>(Py_NotImplemented);
  return row < 0 ? py::object(py::none()) : place_of(static_cast<std::size_t>(row));
}

py::object StoredColumns::places(const py::list& indices) {
  py::list found;
  for (const py::handle& index : py::tuple(indices)) {
    const py::object one = place(index);
    if (one.ptr() == Py_NotImplemented) return py::none();
    found.append(one);
  }
  return found;
}

py::dict StoredColumns::all_places() {
  py::dict made;
  for (std::size_t row = 0; row < table_.storage_fqn.count; ++row) {
    const Key key = key_of(row);
    const py::object offset = key.ndim < 0
                                  ? py::object()
                                  : maker_.size_of(key.offsets, static_cast<std::size_t>(key.ndim));
    const py::object hint =
        table_.hints[row] < 0 ? py::object(py::none()) : py::int_(table_.hints[row]);
    const py::object index =
        maker_.metadata_index(py::reinterpret_borrow<py::object>(key.fqn), offset, hint);
    const auto known = places_.find(row);
    const py::object place = known != places_.end() ? known->second : new_place(row);
    if (PyDict_SetItem(made.ptr(), index.ptr(), place.ptr()) != 0) throw py::error_already_set();
  }
  return made;
}

}  // namespace dcpx
