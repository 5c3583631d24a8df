// Stock's `.metadata` for Python: a pickle in, columns out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "common/error.h"
#include "dcp/gil.h"
#include "dcp/objects.h"
#include "format/metadata_unpickle.h"

namespace dcpx {
namespace {

namespace py = pybind11;

constexpr std::size_t kMaxSameHash = 64;  // as `hashed_keys` allows keys of a dict

// Bytes of a column, whose vector is gone afterwards. They begin at a multiple of 8.
template <typename T>
py::bytes moved(std::vector<T>& values) {
  const std::vector<T> owned = std::move(values);
  return {reinterpret_cast<const char*>(owned.data()), owned.size() * sizeof(T)};
}

// The texts as str, a lone surrogate as its three bytes. False: one is no UTF-8.
bool to_texts(const std::vector<std::string_view>& strings, py::list* texts) {
  for (const std::string_view text : strings) {
    PyObject* made =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "surrogatepass");
    if (made == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError) == 0) throw py::error_already_set();
      PyErr_Clear();
      return false;
    }
    texts->append(py::reinterpret_steal<py::object>(made));
  }
  return true;
}

// Python's hash of a tuple of ints, which everybody can foresee.
Py_hash_t hash_of(const std::int64_t* first, std::int64_t count) {
  py::tuple numbers(static_cast<std::size_t>(std::max<std::int64_t>(count, 0)));
  for (std::int64_t d = 0; d < count; ++d) {
    PyTuple_SET_ITEM(numbers.ptr(), d, py::int_(first[d]).release().ptr());
  }
  const Py_hash_t hash = PyObject_Hash(numbers.ptr());
  if (hash == -1) throw py::error_already_set();
  return hash;
}

// Whether the items of one name have offsets chosen so that they all meet in one place of a dict.
bool have_one_hash(const UnpickledColumns& columns) {
  std::vector<std::size_t> counts(columns.strings.size(), 0);
  for (const std::int64_t fqn : columns.storage_fqn) ++counts[static_cast<std::size_t>(fqn)];
  std::vector<std::pair<std::int64_t, Py_hash_t>> hashes;
  std::size_t at = 0;
  for (std::size_t i = 0; i < columns.storage_fqn.size(); ++i) {
    const std::int64_t fqn = columns.storage_fqn[i];
    const std::int64_t ndim = columns.storage_ndim[i];
    if (counts[static_cast<std::size_t>(fqn)] > kMaxSameHash) {
      hashes.emplace_back(fqn, hash_of(columns.storage_offsets.data() + at, ndim));
    }
    at += static_cast<std::size_t>(std::max<std::int64_t>(ndim, 0));
  }
  std::sort(hashes.begin(), hashes.end());
  for (std::size_t i = kMaxSameHash; i < hashes.size(); ++i) {
    if (hashes[i] == hashes[i - kMaxSameHash]) return true;
  }
  return false;
}

py::list pick(const py::list& texts, const std::vector<std::int64_t>& numbers) {
  py::list picked;
  for (const std::int64_t number : numbers) picked.append(texts[static_cast<std::size_t>(number)]);
  return picked;
}

py::object text_or_none(const py::list& texts, std::int64_t number) {
  return number < 0 ? py::object(py::none()) : py::object(texts[static_cast<std::size_t>(number)]);
}

py::object storage_meta_of(const UnpickledColumns& columns, const py::list& texts) {
  if (!columns.storage_meta) return py::none();
  const UnpickledStorageMeta& meta = *columns.storage_meta;
  return py::make_tuple(meta.is_path, pick(texts, meta.checkpoint_id),
                        text_or_none(texts, meta.save_id), text_or_none(texts, meta.load_id),
                        pick(texts, meta.modules));
}

void move_columns(UnpickledColumns& from, const py::dict& to) {
  to["entry_fqn"] = moved(from.entry_fqn);
  to["entry_kind"] = moved(from.entry_kind);
  to["tensor_dtype"] = moved(from.tensor_dtype);
  to["tensor_layout"] = moved(from.tensor_layout);
  to["tensor_flags"] = moved(from.tensor_flags);
  to["tensor_memory_format"] = moved(from.tensor_memory_format);
  to["tensor_ndim"] = moved(from.tensor_ndim);
  to["tensor_chunk_count"] = moved(from.tensor_chunk_count);
  to["tensor_sizes"] = moved(from.tensor_sizes);
  to["tensor_stride_count"] = moved(from.tensor_stride_count);
  to["tensor_strides"] = moved(from.tensor_strides);
  to["chunk_flags"] = moved(from.chunk_flags);
  to["chunk_offsets"] = moved(from.chunk_offsets);
  to["chunk_sizes"] = moved(from.chunk_sizes);
  to["storage_fqn"] = moved(from.storage_fqn);
  to["storage_ndim"] = moved(from.storage_ndim);
  to["storage_offsets"] = moved(from.storage_offsets);
  to["storage_hint"] = moved(from.storage_hint);
  to["storage_path"] = moved(from.storage_path);
  to["storage_offset"] = moved(from.storage_offset);
  to["storage_bytes"] = moved(from.storage_bytes);
  to["storage_descriptors"] = moved(from.storage_descriptors);
  to["planner_fqn"] = moved(from.planner_fqn);
  to["planner_len"] = moved(from.planner_len);
  to["planner_tag"] = moved(from.planner_tag);
  to["planner_value"] = moved(from.planner_value);
}

py::object py_unpickle_metadata(const py::bytes& data, const py::bytes& hash_key) {
  const auto bytes = static_cast<std::string_view>(data);
  const auto secret = static_cast<std::string_view>(hash_key);
  SipHash::Key key;
  DCPX_CHECK(secret.size() == sizeof(key), "a hash's key has 16 bytes");
  std::memcpy(key.data(), secret.data(), sizeof(key));
  UnpickledColumns columns;
  bool is_known = false;
  {
    const ReleasedGil unlocked;  // bytes do not change, and the caller holds them
    is_known = unpickle_metadata(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(),
                                 key, &columns);
  }
  py::list texts;
  if (!is_known || !to_texts(columns.strings, &texts) || have_one_hash(columns)) return py::none();
  py::dict found;
  found["strings"] = texts;
  py::list descriptors;
  for (const auto& names : columns.descriptors) descriptors.append(pick(texts, names));
  found["descriptors"] = descriptors;
  found["storage_meta"] = storage_meta_of(columns, texts);
  found["version"] = text_or_none(texts, columns.version);
  found["has_planner"] = py::bool_(columns.has_planner);
  py::dict made;
  move_columns(columns, made);
  found["columns"] = made;
  return found;
}

}  // namespace

void bind_unpickle(py::module_& module) {
  module.def("unpickle_metadata", &py_unpickle_metadata, py::arg("data"), py::arg("hash_key"),
             "What a `.metadata` pickle of stock's says, as columns; None where it is not exactly "
             "what stock writes. `hash_key`: 16 bytes that no file can know.");
}

}  // namespace dcpx
