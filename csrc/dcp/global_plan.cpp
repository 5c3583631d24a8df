// The metadata of a save out of the WriteItems of all ranks, and whether its chunks make sense.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "dcp/gil.h"
#include "dcp/plan_items.h"
#include "dcp/python.h"
#include "plan/coverage.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using Numbers = std::vector<std::int64_t>;

// One name of the metadata.
struct Named {
  py::object fqn;
  py::object size;  // of the whole tensor; null of an object
  py::object properties;
  Numbers sizes;
  std::size_t chunk_count = 0;
  bool is_even = true;  // all chunks have the tensor's dimensions

  bool is_bytes() const { return !size; }
  // Of 0 dimensions each chunk is all of it.
  bool is_tiled() const { return !is_bytes() && !sizes.empty(); }
};

// A chunk as it was met: ranks behind one another, so that what is noted of a million chunks is
// written from front to back. Appended to a thousand names in turn, each of them is a page that
// the processor has to look up.
struct Met {
  std::size_t name;  // of `named_`
  std::size_t cell;  // of its offsets and lengths in `cells_`
};

class GlobalPlan {
 public:
  GlobalPlan(ItemMaker& maker, std::size_t item_count) : maker_(maker) {
    met_.reserve(item_count);
    chunks_.reserve(item_count);
  }

  py::list add_plan(const py::handle& items, bool is_kept) {
    py::list planned;
    for (const py::handle& item : items) planned.append(add_item(item, is_kept));
    return planned;
  }

  // Sorts the chunks by name. Call it once, when all plans were added.
  py::dict entries() {
    std::vector<std::size_t> next(named_.size() + 1, 0);
    for (std::size_t n = 0; n < named_.size(); ++n) next[n + 1] = next[n] + named_[n].chunk_count;
    by_name_.resize(met_.size());
    for (std::size_t i = 0; i < met_.size(); ++i) by_name_[next[met_[i].name]++] = i;
    py::dict entries;
    std::size_t at = 0;
    for (const Named& named : named_) {
      if (named.is_bytes()) {
        entries[named.fqn] = maker_.bytes_entry();
        continue;
      }
      py::list chunks(named.chunk_count);
      for (std::size_t i = 0; i < named.chunk_count; ++i) {
        PyList_SET_ITEM(chunks.ptr(), static_cast<Py_ssize_t>(i),
                        chunks_[by_name_[at++]].release().ptr());
      }
      entries[named.fqn] = maker_.tensor_entry(named.properties, named.size, chunks);
    }
    return entries;
  }

  // (fqn, offence, chunk, other chunk, point) of the tensors whose chunks do not tile them.
  // REQUIRES: `entries` was called.
  py::list offences() const {
    std::vector<plan::CoverageError> errors;
    {
      const ReleasedGil no_gil;
      errors = coverage_errors();
    }
    py::list found;
    std::size_t next = 0;
    for (std::size_t number = 0; number < named_.size(); ++number) {
      const Named& named = named_[number];
      if (!named.is_tiled()) continue;
      if (!named.is_even) {
        found.append(py::make_tuple(named.fqn, "dimensions", -1, -1, py::tuple()));
        continue;
      }
      if (next == errors.size() || static_cast<std::size_t>(errors[next].tensor) != number) {
        continue;
      }
      const plan::CoverageError& error = errors[next++];
      py::tuple point(error.point.size());
      for (std::size_t d = 0; d < error.point.size(); ++d) point[d] = error.point[d];
      found.append(
          py::make_tuple(named.fqn, name_of(error.offence), error.box, error.other, point));
    }
    return found;
  }

 private:
  py::object add_item(const py::handle& item, bool is_kept) {
    const py::object index = get_attr(item, maker_.names.index);
    const py::object fqn = get_attr(index, maker_.names.fqn);
    const py::object type = get_attr(item, maker_.names.type);
    bool is_new = false;
    const std::size_t number = number_of(fqn, &is_new);
    if (!is_new && !maker_.is_shard(type)) refuse("item.index.fqn not in md");  // torch's text
    if (maker_.is_byte_io(type)) return py::reinterpret_borrow<py::object>(item);
    const py::object data = get_attr(item, maker_.names.tensor_data);
    if (data.is_none()) refuse("item.tensor_data is not None");
    if (!is_new && named_[number].is_bytes()) {
      refuse("a tensor's chunk under the name of an object");
    }
    py::object chunk = get_attr(data, maker_.names.chunk);
    if (chunk.is_none()) refuse("Cannot create MD for tensor without bounds.");
    if (is_kept) chunk = maker_.copy_of(chunk);
    if (is_new) {
      Named& named = named_[number];
      named.size = get_attr(data, maker_.names.size);
      append_ints(named.size, &named.sizes);
      named.properties = get_attr(data, maker_.names.properties);
      if (is_kept) named.properties = maker_.copy_of(named.properties);
    }
    met_.push_back({number, cells_.size()});
    const std::size_t ndim = append_ints(get_attr(chunk, maker_.names.offsets), &cells_);
    const std::size_t sizes = append_ints(get_attr(chunk, maker_.names.sizes), &cells_);
    chunks_.push_back(std::move(chunk));
    Named& named = named_[number];
    named.is_even = named.is_even && ndim == named.sizes.size() && sizes == ndim;
    const std::size_t hint = named.chunk_count++;
    if (is_number(get_attr(index, maker_.names.index), hint)) {
      return py::reinterpret_borrow<py::object>(item);
    }
    py::object offset = get_attr(index, maker_.names.offset);
    if (offset.is_none()) offset = py::object();
    return maker_.write_item(maker_.metadata_index(fqn, offset, hint_of(hint)), type,
                             get_attr(item, maker_.names.bytes_io_data), data);
  }

  static bool is_number(const py::object& value, std::size_t number) {
    if (PyLong_CheckExact(value.ptr()) == 0) return false;
    int overflow = 0;
    const long long known = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    return overflow == 0 && known >= 0 && static_cast<std::size_t>(known) == number;
  }

  // All names' chunks of one number share one object.
  const py::object& hint_of(std::size_t number) {
    while (hints_.size() <= number) hints_.emplace_back(py::int_(hints_.size()));
    return hints_[number];
  }

  [[noreturn]] static void refuse(const char* text) {
    PyErr_SetString(PyExc_AssertionError, text);
    throw py::error_already_set();
  }

  std::size_t number_of(const py::object& fqn, bool* is_new) {
    PyObject* known = PyDict_GetItemWithError(numbers_.ptr(), fqn.ptr());
    if (known != nullptr) return PyLong_AsSize_t(known);
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    numbers_[fqn] = py::int_(named_.size());
    named_.emplace_back();
    named_.back().fqn = fqn;
    *is_new = true;
    return named_.size() - 1;
  }

  // The errors' `tensor` is a number of `named_`. Touches no Python object.
  std::vector<plan::CoverageError> coverage_errors() const {
    std::vector<plan::CoverageError> all;
    Numbers offsets;
    Numbers lengths;
    std::size_t at = 0;
    for (std::size_t number = 0; number < named_.size(); ++number) {
      const Named& named = named_[number];
      const std::size_t first = at;
      at += named.chunk_count;
      if (!named.is_tiled() || !named.is_even) continue;
      const std::size_t ndim = named.sizes.size();
      offsets.clear();
      lengths.clear();
      for (std::size_t i = first; i < at; ++i) {
        const std::int64_t* cells = cells_.data() + met_[by_name_[i]].cell;
        offsets.insert(offsets.end(), cells, cells + ndim);
        lengths.insert(lengths.end(), cells + ndim, cells + 2 * ndim);
      }
      const auto dims = static_cast<std::int64_t>(ndim);
      const auto count = static_cast<std::int64_t>(named.chunk_count);
      for (plan::CoverageError& error :
           plan::check_coverage({&dims, named.sizes.data(), &count, offsets.data(), lengths.data(),
                                 1, ndim, offsets.size()})) {
        error.tensor = static_cast<std::int64_t>(number);
        all.push_back(std::move(error));
      }
    }
    return all;
  }

  ItemMaker& maker_;
  py::dict numbers_;
  std::vector<Named> named_;
  std::vector<Met> met_;
  std::vector<py::object> chunks_;    // as `met_`
  Numbers cells_;                     // offsets and lengths of each chunk
  std::vector<std::size_t> by_name_;  // numbers of `met_`
  std::vector<py::object> hints_;
};

}  // namespace

py::tuple make_global_plan(ItemMaker& maker, const py::list& plans, const py::list& kept) {
  std::size_t item_count = 0;
  for (const py::handle& items : plans) item_count += py::len(items);
  GlobalPlan all(maker, item_count);
  py::list planned;
  std::size_t at = 0;
  for (const py::handle& items : plans) {
    const bool is_kept = at < kept.size() && kept[at].ptr() == Py_True;
    planned.append(all.add_plan(items, is_kept));
    ++at;
  }
  const py::dict entries = all.entries();
  return py::make_tuple(planned, entries, all.offences());
}

py::dict copy_entries(ItemMaker& maker, const py::dict& entries) {
  py::dict copied;
  for (const auto& [fqn, entry] : entries) {
    py::object own;
    if (maker.is_bytes_entry(entry)) {
      own = maker.copy_of(entry);
    } else {
      py::list chunks;
      for (const py::handle& chunk : get_attr(entry, maker.names.chunks)) {
        chunks.append(maker.copy_of(chunk));
      }
      own = maker.tensor_entry(maker.copy_of(get_attr(entry, maker.names.properties)),
                               get_attr(entry, maker.names.size), chunks);
    }
    if (PyDict_SetItem(copied.ptr(), fqn.ptr(), own.ptr()) != 0) throw py::error_already_set();
  }
  return copied;
}

}  // namespace dcpx
