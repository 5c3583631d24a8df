// Of what several ranks hold, who writes it: DCP's WriteItems in, balanced ones out.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <numeric>
#include <vector>

#include "dcp/plan_items.h"
#include "dcp/python.h"
#include "plan/balance.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using Numbers = std::vector<std::int64_t>;

// An item of a rank's plan, by what makes two of them the same chunk: name and offset.
struct Entry {
  std::uint32_t name;
  std::uint32_t rank;
  std::uint32_t place;  // in the rank's plan
  std::int32_t ndim;    // of the offset; -1: none
  std::size_t first;    // of the offset's numbers
};

// Do the offsets of a name ascend from item to item, as shards do from rank to rank? Then no two of
// them are the same chunk. Of each name the last offset alone is looked at, and lies here: one line
// of memory a name, where all items of a name are spread over those of all ranks.
class Order {
 public:
  void add(const std::int64_t* offset, std::int32_t ndim) {
    if (is_doubtful_) return;
    const std::int64_t* end = offset + std::max(ndim, 0);
    if (ndim > kMaxDims) {
      is_doubtful_ = true;
    } else if (ndim_ != kNone) {
      is_doubtful_ =
          ndim != ndim_ || !std::lexicographical_compare(
                               last_.data(), last_.data() + std::max(ndim, 0), offset, end);
    }
    if (is_doubtful_) return;
    ndim_ = ndim;
    std::copy(offset, end, last_.data());
  }
  bool is_doubtful() const { return is_doubtful_; }

 private:
  static constexpr std::int32_t kMaxDims = 7;
  static constexpr std::int32_t kNone = -2;

  std::array<std::int64_t, kMaxDims> last_{};
  std::int32_t ndim_ = kNone;  // as `Entry`'s
  bool is_doubtful_ = false;
};

// What the first item of a name says of all of its tensor.
struct About {
  std::uint32_t rank;
  py::object size;  // null of an object
  py::object properties;
};

// What the plans of all ranks hold. Throws ValueError where a plan is no list.
class Entries {
 public:
  Entries(const ItemMaker& maker, const py::list& plans) {
    std::size_t item_count = 0;
    for (const py::handle& items : plans) {
      if (PyList_Check(items.ptr()) == 0) throw py::value_error("a list of items a plan is wanted");
      plans_.push_back(py::reinterpret_borrow<py::list>(items));
      item_count += plans_.back().size();
    }
    entries_.reserve(item_count);
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      for (std::size_t place = 0; place < plans_[rank].size(); ++place) {
        const py::object index = get_attr(item_at(rank, place), maker.names.index);
        Entry entry{};
        entry.name = number_of(get_attr(index, maker.names.fqn));
        entry.rank = static_cast<std::uint32_t>(rank);
        entry.place = static_cast<std::uint32_t>(place);
        entry.first = numbers_.size();
        const py::object offset = get_attr(index, maker.names.offset);
        entry.ndim = offset.is_none() ? -1 : static_cast<int>(append_ints(offset, &numbers_));
        if (entry.name == orders_.size()) orders_.emplace_back();
        orders_[entry.name].add(numbers_.data() + entry.first, entry.ndim);
        if (plans_.size() > 1) note(maker, entry, item_at(rank, place));
        entries_.push_back(entry);
      }
    }
  }

  const Entry& operator[](std::size_t number) const { return entries_[number]; }
  std::size_t size() const { return entries_.size(); }

  // Numbers of the entries that may be the same chunk as another: by name, then offset, then rank,
  // then place.
  std::vector<std::size_t> doubtful() const {
    std::vector<std::size_t> begins(orders_.size() + 1, 0);
    for (const Entry& entry : entries_) {
      if (orders_[entry.name].is_doubtful()) ++begins[entry.name + 1];
    }
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    std::vector<std::size_t> sorted(begins.back());
    std::vector<std::size_t> next(begins);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const std::uint32_t name = entries_[i].name;
      if (orders_[name].is_doubtful()) sorted[next[name]++] = i;
    }
    for (std::size_t name = 0; name < orders_.size(); ++name) {
      std::stable_sort(
          sorted.data() + begins[name], sorted.data() + begins[name + 1],
          [&](std::size_t a, std::size_t b) { return compare(entries_[a], entries_[b]) < 0; });
    }
    return sorted;
  }

  py::object item_at(std::size_t rank, std::size_t place) const {
    PyObject* item = PyList_GetItem(plans_[rank].ptr(), static_cast<Py_ssize_t>(place));
    if (item == nullptr) throw py::error_already_set();
    return py::reinterpret_borrow<py::object>(item);
  }
  // (fqn, rank, other rank) of the names that are an object on one rank and a tensor on another, or
  // tensors of other sizes or another dtype; each once.
  const py::list& unlike() const { return unlike_; }

  py::object item_of(const Entry& entry) const { return item_at(entry.rank, entry.place); }
  bool are_same(const Entry& a, const Entry& b) const { return compare(a, b) == 0; }

 private:
  int compare(const Entry& a, const Entry& b) const {
    if (a.name != b.name) return a.name < b.name ? -1 : 1;
    if (a.ndim != b.ndim) return a.ndim < b.ndim ? -1 : 1;
    for (std::int32_t d = 0; d < a.ndim; ++d) {
      const std::int64_t left = numbers_[a.first + static_cast<std::size_t>(d)];
      const std::int64_t right = numbers_[b.first + static_cast<std::size_t>(d)];
      if (left != right) return left < right ? -1 : 1;
    }
    return 0;
  }

  void note(const ItemMaker& maker, const Entry& entry, const py::object& item) {
    About about{entry.rank, py::object(), py::object()};
    const py::object data = get_attr(item, maker.names.tensor_data);
    if (!data.is_none()) {
      about.size = get_attr(data, maker.names.size);
      about.properties = get_attr(data, maker.names.properties);
    }
    if (entry.name == abouts_.size()) {
      abouts_.push_back(std::move(about));
      return;
    }
    const About& first = abouts_[entry.name];
    if (is_like(maker, first, about)) return;
    const py::object fqn = get_attr(get_attr(item, maker.names.index), maker.names.fqn);
    if (told_.contains(fqn)) return;
    told_.add(fqn);
    unlike_.append(py::make_tuple(fqn, first.rank, about.rank));
  }

  // Chunks of one plan, and of plans that came from another process, share what is equal.
  static bool is_like(const ItemMaker& maker, const About& a, const About& b) {
    if (!a.size || !b.size) return !a.size && !b.size;
    if (!a.size.is(b.size) && !a.size.equal(b.size)) return false;
    return a.properties.is(b.properties) ||
           get_attr(a.properties, maker.names.dtype).is(get_attr(b.properties, maker.names.dtype));
  }

  std::uint32_t number_of(const py::object& name) {
    PyObject* known = PyDict_GetItemWithError(names_.ptr(), name.ptr());
    if (known != nullptr) return static_cast<std::uint32_t>(PyLong_AsUnsignedLong(known));
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    const auto number = static_cast<std::uint32_t>(names_.size());
    if (PyDict_SetItem(names_.ptr(), name.ptr(), py::int_(number).ptr()) != 0) {
      throw py::error_already_set();
    }
    return number;
  }

  std::vector<py::list> plans_;
  std::vector<Entry> entries_;  // by rank, then place
  std::vector<Order> orders_;   // by name
  Numbers numbers_;
  py::dict names_;
  std::vector<About> abouts_;  // by name
  py::list unlike_;
  py::set told_;
};

// A chunk's bytes, and the dimension along which it may be cut.
struct Extent {
  std::int64_t nbytes = 0;
  std::int64_t rows = 1;
  std::size_t dim = 0;
  Numbers sizes;
  Numbers tensor_sizes;
  py::object dtype;

  // Whether rows of the one are rows of the other.
  bool is_like(const Extent& other) const {
    return dtype.is(other.dtype) && sizes == other.sizes && tensor_sizes == other.tensor_sizes;
  }
};

Extent extent_of(const ItemMaker& maker, const py::handle& item) {
  Extent extent;
  const py::object data = get_attr(item, maker.names.tensor_data);
  if (data.is_none()) return extent;
  extent.dtype = get_attr(get_attr(data, maker.names.properties), maker.names.dtype);
  append_ints(get_attr(get_attr(data, maker.names.chunk), maker.names.sizes), &extent.sizes);
  append_ints(get_attr(data, maker.names.size), &extent.tensor_sizes);
  extent.nbytes = get_attr(extent.dtype, maker.names.itemsize).cast<std::int64_t>();
  for (const std::int64_t size : extent.sizes) {
    if (size < 0 || __builtin_mul_overflow(extent.nbytes, size, &extent.nbytes)) {
      throw py::value_error("a chunk of 2**63 bytes or more");
    }
  }
  // Rows are in one piece of memory along the first dimension that has more than one. One of them
  // is the smallest piece, so few large ones cannot be shared out evenly.
  while (extent.dim < extent.sizes.size() && extent.sizes[extent.dim] == 1) ++extent.dim;
  if (extent.dim < extent.sizes.size()) {
    extent.rows = std::max<std::int64_t>(extent.sizes[extent.dim], 1);
  }
  return extent;
}

// Rows of an item, as an item of their own.
py::object piece_of(ItemMaker& maker, const py::object& item, const Extent& extent,
                    const plan::Share& share) {
  const py::object data = get_attr(item, maker.names.tensor_data);
  Numbers offsets;
  append_ints(get_attr(get_attr(data, maker.names.chunk), maker.names.offsets), &offsets);
  if (offsets.size() != extent.sizes.size()) throw py::value_error("a chunk without offsets");
  Numbers sizes(extent.sizes);
  offsets[extent.dim] += share.row;
  sizes[extent.dim] = share.rows;
  const py::object offset = maker.size_of(offsets.data(), offsets.size());
  const py::object fqn = get_attr(get_attr(item, maker.names.index), maker.names.fqn);
  return maker.tensor_write(maker.metadata_index(fqn, offset, py::none()), /*is_shard=*/true,
                            maker.chunk(offset, maker.size_of(sizes.data(), sizes.size())),
                            get_attr(data, maker.names.properties),
                            get_attr(data, maker.names.size));
}

// Entries of one chunk, [first, last) of the sorted ones, that several ranks hold.
struct Group {
  std::size_t first;
  std::size_t last;
  Extent extent;
};

class Dedup {
 public:
  Dedup(ItemMaker& maker, const py::list& plans, const py::list& can_split)
      : maker_(maker), plans_(plans), all_(maker, plans), loads_(plans.size(), 0) {
    for (const py::handle& flag : can_split) can_split_.push_back(flag.cast<bool>());
    if (can_split_.size() != plans.size()) throw py::value_error("a flag a plan is wanted");
  }

  const py::list& unlike() const { return all_.unlike(); }

  // `lowest_names` go to the lowest rank that has them, `whole_names` are not cut.
  py::list plans(bool to_lowest_rank, const py::set& lowest_names, const py::set& whole_names) {
    find_groups();
    if (groups_.empty()) return py::list(plans_);
    for (const py::handle& items : plans_) {
      replaced_.emplace_back(py::len(items));
      is_dropped_.emplace_back(py::len(items), 0);
    }
    std::vector<plan::SharedChunk> chunks;
    std::vector<std::uint32_t> owners;
    for (const Group& group : groups_) {
      const Entry& entry = sorted(group.first);
      const py::object fqn =
          get_attr(get_attr(all_.item_of(entry), maker_.names.index), maker_.names.fqn);
      plan::SharedChunk chunk{group.extent.nbytes, 1, owners.size(), 0};
      const bool is_lowest = to_lowest_rank || lowest_names.contains(fqn);
      // One item a rank, the same on all of them.
      bool is_plain = !whole_names.contains(fqn);
      for (std::size_t i = group.first; i < group.last; ++i) {
        const Entry& own = sorted(i);
        const bool is_again = i > group.first && sorted(i - 1).rank == own.rank;
        is_plain = is_plain && !is_again && can_split_[own.rank];
        if (!is_again) owners.push_back(own.rank);
        if (is_plain && group.extent.rows > 1 && i > group.first) {
          is_plain = extent_of(maker_, all_.item_of(own)).is_like(group.extent);
        }
        if (is_lowest) break;
      }
      chunk.owner_count = owners.size() - chunk.first_owner;
      if (is_plain && entry.ndim == static_cast<std::int32_t>(group.extent.sizes.size())) {
        chunk.rows = group.extent.rows;
      }
      chunks.push_back(chunk);
    }
    for (const plan::Share& share : plan::balance(chunks, owners, &loads_)) {
      note(groups_[share.chunk], share, chunks[share.chunk].rows);
    }
    return kept();
  }

 private:
  const Entry& sorted(std::size_t at) const { return all_[sorted_[at]]; }

  // Notes the loads of what one rank alone holds.
  void find_groups() {
    sorted_ = all_.doubtful();
    std::vector<bool> is_shared(all_.size(), false);
    for (std::size_t first = 0; first < sorted_.size();) {
      std::size_t last = first + 1;
      while (last < sorted_.size() && all_.are_same(sorted(first), sorted(last))) ++last;
      if (sorted(last - 1).rank != sorted(first).rank) {
        groups_.push_back({first, last, extent_of(maker_, all_.item_of(sorted(first)))});
        for (std::size_t i = first; i < last; ++i) is_shared[sorted_[i]] = true;
      }
      first = last;
    }
    if (groups_.empty()) return;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      if (is_shared[i]) continue;
      loads_[all_[i].rank] += extent_of(maker_, all_.item_of(all_[i])).nbytes + plan::kItemBytes;
    }
  }

  // The owner of a share keeps its item, or rows of it; `kept` drops those of the others.
  void note(const Group& group, const plan::Share& share, std::int64_t rows) {
    for (std::size_t i = group.first; i < group.last; ++i) {
      const Entry& entry = sorted(i);
      char& state = is_dropped_[entry.rank][entry.place];
      if (entry.rank == share.rank) {
        state = kKept;
        if (share.rows < rows) {
          replaced_[entry.rank][entry.place] =
              piece_of(maker_, all_.item_of(entry), group.extent, share);
        }
      } else if (state != kKept) {
        state = kDropped;
      }
    }
  }

  py::list kept() const {
    py::list plans;
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      py::list items;
      for (std::size_t place = 0; place < replaced_[rank].size(); ++place) {
        if (is_dropped_[rank][place] == kDropped) continue;
        const py::object& piece = replaced_[rank][place];
        items.append(piece ? piece : all_.item_at(rank, place));
      }
      plans.append(items);
    }
    return plans;
  }

  static constexpr char kDropped = 1;
  static constexpr char kKept = 2;

  ItemMaker& maker_;
  const py::list& plans_;
  Entries all_;
  std::vector<std::size_t> sorted_;  // numbers of `all_`
  std::vector<std::int64_t> loads_;
  std::vector<bool> can_split_;
  std::vector<Group> groups_;
  std::vector<std::vector<py::object>> replaced_;  // [rank][place], null where it is as it was
  std::vector<std::vector<char>> is_dropped_;
};

}  // namespace

py::list dedup_items(ItemMaker& maker, const py::list& plans, const py::list& can_split,
                     bool to_lowest_rank, const py::set& lowest_names, const py::set& whole_names,
                     const py::object& unlike) {
  Dedup dedup(maker, plans, can_split);
  if (!unlike.is_none()) {
    unlike.attr("extend")(dedup.unlike());
    if (py::len(dedup.unlike()) > 0) return py::list(plans);
  }
  return dedup.plans(to_lowest_rank, lowest_names, whole_names);
}

py::list unlike_items(ItemMaker& maker, const py::list& plans) {
  return Entries(maker, plans).unlike();
}

}  // namespace dcpx
