// The metadata of a save out of the WriteItems of all ranks, and whether its chunks make sense.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "bind/plan_items.h"
#include "plan/coverage.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using Numbers = std::vector<std::int64_t>;

// One name of the metadata.
struct Named {
  py::object fqn;
  py::list chunks;
  Numbers sizes;  // of the whole tensor
  Numbers offsets;
  Numbers lengths;
  bool is_bytes = false;
  bool is_even = true;  // all chunks have the tensor's dimensions

  // Of 0 dimensions each chunk is all of it.
  bool is_tiled() const { return !is_bytes && !sizes.empty(); }
};

class GlobalPlan {
 public:
  explicit GlobalPlan(ItemMaker& maker) : maker_(maker) {}

  py::list add_plan(const py::handle& items, bool is_kept) {
    py::list planned;
    for (const py::handle& item : items) planned.append(add_item(item, is_kept));
    return planned;
  }

  py::dict entries() const { return entries_; }

  // (fqn, offence, chunk, other chunk, point) of the tensors whose chunks do not tile them.
  py::list offences() const {
    std::vector<plan::CoverageError> errors;
    {
      const py::gil_scoped_release no_gil;
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
    Named& named = named_of(fqn, &is_new);
    if (!is_new && !maker_.is_shard(type)) refuse("item.index.fqn not in md");  // torch's text
    if (maker_.is_byte_io(type)) {
      named.is_bytes = true;
      entries_[fqn] = maker_.bytes_entry();
      return py::reinterpret_borrow<py::object>(item);
    }
    const py::object data = get_attr(item, maker_.names.tensor_data);
    if (data.is_none()) refuse("item.tensor_data is not None");
    if (named.is_bytes) refuse("a tensor's chunk under the name of an object");
    py::object chunk = get_attr(data, maker_.names.chunk);
    if (chunk.is_none()) refuse("Cannot create MD for tensor without bounds.");
    if (is_kept) chunk = maker_.copy_of(chunk);
    if (is_new) {
      const py::object size = get_attr(data, maker_.names.size);
      append_ints(size, &named.sizes);
      py::object properties = get_attr(data, maker_.names.properties);
      if (is_kept) properties = maker_.copy_of(properties);
      entries_[fqn] = maker_.tensor_entry(properties, size, named.chunks);
    }
    const auto hint = static_cast<std::int64_t>(named.chunks.size());
    named.chunks.append(chunk);
    const std::size_t ndim = append_ints(get_attr(chunk, maker_.names.offsets), &named.offsets);
    const std::size_t sizes = append_ints(get_attr(chunk, maker_.names.sizes), &named.lengths);
    named.is_even = named.is_even && ndim == named.sizes.size() && sizes == ndim;
    const py::object known = get_attr(index, maker_.names.index);
    if (PyLong_CheckExact(known.ptr()) != 0 && known.cast<std::int64_t>() == hint) {
      return py::reinterpret_borrow<py::object>(item);
    }
    return maker_.reindexed(item, index, hint);
  }

  [[noreturn]] static void refuse(const char* text) {
    PyErr_SetString(PyExc_AssertionError, text);
    throw py::error_already_set();
  }

  Named& named_of(const py::object& fqn, bool* is_new) {
    PyObject* known = PyDict_GetItemWithError(numbers_.ptr(), fqn.ptr());
    if (known != nullptr) return named_[PyLong_AsSize_t(known)];
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    numbers_[fqn] = py::int_(named_.size());
    named_.emplace_back();
    named_.back().fqn = fqn;
    *is_new = true;
    return named_.back();
  }

  // The errors' `tensor` is a number of `named_`. Touches no Python object.
  std::vector<plan::CoverageError> coverage_errors() const {
    std::vector<plan::CoverageError> all;
    for (std::size_t number = 0; number < named_.size(); ++number) {
      const Named& named = named_[number];
      if (!named.is_tiled() || !named.is_even) continue;
      const auto ndim = static_cast<std::int64_t>(named.sizes.size());
      const auto count = static_cast<std::int64_t>(named.offsets.size() / named.sizes.size());
      for (plan::CoverageError& error : plan::check_coverage(
               {&ndim, named.sizes.data(), &count, named.offsets.data(), named.lengths.data(), 1,
                named.sizes.size(), named.offsets.size()})) {
        error.tensor = static_cast<std::int64_t>(number);
        all.push_back(std::move(error));
      }
    }
    return all;
  }

  ItemMaker& maker_;
  py::dict entries_;
  py::dict numbers_;
  std::vector<Named> named_;
};

}  // namespace

py::tuple make_global_plan(ItemMaker& maker, const py::list& plans, const py::list& kept) {
  GlobalPlan all(maker);
  py::list planned;
  std::size_t at = 0;
  for (const py::handle& items : plans) {
    const bool is_kept = at < kept.size() && kept[at].ptr() == Py_True;
    planned.append(all.add_plan(items, is_kept));
    ++at;
  }
  return py::make_tuple(planned, all.entries(), all.offences());
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
