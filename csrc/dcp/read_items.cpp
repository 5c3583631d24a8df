// A whole load plan in one call: which stored chunks fill which wanted ones, as DCP's ReadItems,
// and whether they fill them exactly once.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"
#include "dcp/gil.h"
#include "dcp/plan_items.h"
#include "dcp/python.h"
#include "dcp/stored_columns.h"
#include "plan/coverage.h"
#include "plan/overlap.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using Numbers = std::vector<std::int64_t>;

constexpr std::size_t kManyBoxes = 1024;  // from here on others get the GIL meanwhile

// The chunks of one tensor on one side, as numbers.
struct Side {
  Numbers offsets;
  Numbers sizes;
  std::size_t count = 0;

  plan::Boxes boxes() const { return {offsets.data(), sizes.data(), count}; }
  void clear() { offsets.clear(), sizes.clear(), count = 0; }
};

// What is asked of `check_coverage` about one tensor, and whose chunks they are.
struct Doubts {
  struct Chunk {
    std::int64_t row;
    std::int64_t wanted;
    std::size_t first;  // of the wanted chunk's overlaps in `stored`
  };
  Numbers ndims, sizes, counts, offsets, lengths;
  std::vector<Chunk> chunks;
  Numbers stored;  // numbers of the stored chunks

  void clear() {
    for (Numbers* column : {&ndims, &sizes, &counts, &offsets, &lengths, &stored}) column->clear();
    chunks.clear();
  }
};

class ReadPlanner {
 public:
  ReadPlanner(ItemMaker& maker, const py::function& fallback, plan::OverlapOrder order,
              const StoredColumns* columns)
      : maker_(maker), fallback_(fallback), order_(order), columns_(columns) {}

  // A row is a list of items, the name of a bytes item, in a tuple where it is no string, or
  // (fqn, wanted, stored, global sizes), where `stored` is a list of chunks or the number of an
  // entry in the columns.
  void add_row(std::int64_t number, const py::handle& row) {
    if (PyList_Check(row.ptr()) != 0) {
      extend(row);
    } else if (PyUnicode_Check(row.ptr()) != 0) {
      items_.append(maker_.byte_read(py::reinterpret_borrow<py::object>(row)));
    } else if (PyTuple_Check(row.ptr()) != 0 && PyTuple_GET_SIZE(row.ptr()) == 1) {
      items_.append(
          maker_.byte_read(py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(row.ptr(), 0))));
    } else {
      if (PyTuple_Check(row.ptr()) == 0 || PyTuple_GET_SIZE(row.ptr()) != 4) {
        throw py::value_error("a row is (fqn, wanted, stored, sizes)");
      }
      add_tensor(number, row);
    }
  }

  bool has_offences() const { return !offences_.empty(); }
  py::tuple result() const { return py::make_tuple(items_, offences_); }

 private:
  std::vector<plan::CoverageError> coverage_errors() const {
    return plan::check_coverage({doubts_.ndims.data(), doubts_.sizes.data(), doubts_.counts.data(),
                                 doubts_.offsets.data(), doubts_.lengths.data(),
                                 doubts_.ndims.size(), doubts_.sizes.size(),
                                 doubts_.offsets.size()});
  }

  void settle_doubts() {
    if (doubts_.ndims.empty()) return;
    std::vector<plan::CoverageError> errors;
    if (doubts_.stored.size() < kManyBoxes) {
      errors = coverage_errors();
    } else {  // a metadata file can make this long
      const ReleasedGil no_gil;
      errors = coverage_errors();
    }
    for (const plan::CoverageError& error : errors) {
      const Doubts::Chunk& chunk = doubts_.chunks[static_cast<std::size_t>(error.tensor)];
      const auto stored = [&](std::int64_t box) {
        return box < 0 ? -1 : doubts_.stored[chunk.first + static_cast<std::size_t>(box)];
      };
      py::tuple point(error.point.size());
      for (std::size_t d = 0; d < error.point.size(); ++d) point[d] = error.point[d];
      offences_.append(py::make_tuple(chunk.row, chunk.wanted, name_of(error.offence),
                                      stored(error.box), stored(error.other), point));
    }
  }

  void extend(const py::handle& items) {
    if (PyList_Check(items.ptr()) == 0) throw py::type_error("a list of items is wanted");
    for (const py::handle& item : items) items_.append(item);
  }

  // Appends the numbers of a chunk; false where it has not `ndim` of each.
  bool add_chunk(const py::handle& chunk, std::size_t ndim, Side* side) {
    ++side->count;
    return append_ints(get_attr(chunk, maker_.names.offsets), &side->offsets) == ndim &&
           append_ints(get_attr(chunk, maker_.names.sizes), &side->sizes) == ndim;
  }

  // Runs `read`; false where what it reads is no numbers below 2^63 or no boxes, which is noted.
  template <typename Read>
  bool is_readable(std::int64_t number, std::int64_t chunk, const Read& read) {
    try {
      if (read()) return true;
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_OverflowError) && !error.matches(PyExc_TypeError) &&
          !error.matches(PyExc_AttributeError)) {
        throw;
      }
    }
    offences_.append(py::make_tuple(number, 0, "numbers", chunk, -1, py::tuple()));
    return false;
  }

  // Whether the last `ndim` of a side's numbers end below 2^63.
  static bool is_finite(const Side& side, std::size_t ndim) {
    std::int64_t end = 0;
    for (std::size_t i = side.sizes.size() - ndim; i < side.sizes.size(); ++i) {
      if (__builtin_add_overflow(side.offsets[i], side.sizes[i], &end)) return false;
    }
    return true;
  }

  // False where not all chunks have the same dimensions.
  bool read_wanted(const py::handle& wanted) {
    wanted_.clear();
    if (maker_.is_size(wanted)) {
      ndim_ = append_ints(wanted, &wanted_.sizes);
      wanted_.offsets.assign(ndim_, 0);
      wanted_.count = 1;
      return true;
    }
    const auto chunks = py::cast<py::list>(wanted);
    ndim_ = chunks.empty() ? 0 : py::len(get_attr(chunks[0], maker_.names.offsets));
    return std::all_of(chunks.begin(), chunks.end(),
                       [&](const py::handle& chunk) { return add_chunk(chunk, ndim_, &wanted_); });
  }

  // Returns whether all could be read; `is_even` says whether they have the dimensions of the
  // wanted ones.
  bool read_stored(std::int64_t number, const py::handle& stored_chunks, bool* is_even) {
    stored_.clear();
    *is_even = true;
    if (PyLong_CheckExact(stored_chunks.ptr()) != 0) {
      DCPX_CHECK(columns_ != nullptr, "a number in a row needs the columns that it is of");
      const StoredTensor tensor = columns_->tensor(stored_chunks.cast<std::int64_t>());
      *is_even = tensor.ndim == ndim_ || wanted_.count == 0 || tensor.chunks.count == 0;
      boxes_ = wanted_.count == 0 ? plan::Boxes{} : tensor.chunks;
      return true;
    }
    const auto stored = py::cast<py::list>(stored_chunks);
    for (std::size_t i = 0; i < stored.size() && wanted_.count > 0 && *is_even; ++i) {
      if (!is_readable(number, static_cast<std::int64_t>(i), [&] {
            *is_even = add_chunk(stored[i], ndim_, &stored_);
            return !*is_even || is_finite(stored_, ndim_);
          })) {
        return false;
      }
    }
    boxes_ = stored_.boxes();
    return true;
  }

  void add_tensor(std::int64_t number, const py::handle& row) {
    const auto fqn = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(row.ptr(), 0));
    const py::handle wanted = PyTuple_GET_ITEM(row.ptr(), 1);
    const py::handle stored = PyTuple_GET_ITEM(row.ptr(), 2);
    sizes_.clear();
    const bool has_sizes = is_readable(number, -1, [&] {
      append_ints(py::handle(PyTuple_GET_ITEM(row.ptr(), 3)), &sizes_);
      return true;
    });
    if (!has_sizes) return;
    bool is_even = read_wanted(wanted);
    if (is_even && !read_stored(number, stored, &is_even)) return;
    if (!is_even) {
      extend(fallback_(row));
      return;
    }
    overlaps_.clear();
    plan::find_overlaps(ndim_, wanted_.boxes(), boxes_, order_, &overlaps_);
    regions_.resize(3 * ndim_ * overlaps_.size());
    for (std::size_t i = 0; i < overlaps_.size(); ++i) {
      std::int64_t* region = regions_.data() + 3 * ndim_ * i;
      plan::overlap_region(ndim_, wanted_.boxes(), boxes_, overlaps_[i], region, region + ndim_,
                           region + 2 * ndim_);
    }
    note_doubts(number);
    settle_doubts();
    // Not before: a file of a byte a chunk can have all its chunks meet in one wanted element.
    if (has_offences()) return;
    for (std::size_t i = 0; i < overlaps_.size(); ++i) {
      add_item(fqn, wanted, stored, overlaps_[i], regions_.data() + 3 * ndim_ * i);
    }
  }

  py::object region_size(const std::int64_t* values) {
    const bool is_origin = std::all_of(values, values + ndim_, [](auto n) { return n == 0; });
    return is_origin ? maker_.zeros(ndim_) : maker_.size_of(values, ndim_);
  }

  py::object stored_offset(const py::handle& stored, std::uint32_t number) const {
    if (PyList_Check(stored.ptr()) == 0) {
      return maker_.size_of(boxes_.offsets + number * ndim_, ndim_);
    }
    const py::object chunk = py::reinterpret_borrow<py::list>(stored)[number];
    return maker_.as_size(get_attr(chunk, maker_.names.offsets));
  }

  void add_item(const py::object& fqn, const py::handle& wanted, const py::handle& stored,
                const plan::Overlap& overlap, const std::int64_t* region) {
    py::object dest_offset;
    py::object dest_sizes;
    if (maker_.is_size(wanted)) {
      dest_offset = maker_.zeros(ndim_);
      dest_sizes = py::reinterpret_borrow<py::object>(wanted);
    } else {
      const py::object chunk = py::reinterpret_borrow<py::list>(wanted)[overlap.wanted];
      dest_offset = maker_.as_size(get_attr(chunk, maker_.names.offsets));
      dest_sizes = maker_.as_size(get_attr(chunk, maker_.names.sizes));
    }
    const std::int64_t* lengths = region + 2 * ndim_;
    const bool is_whole =
        std::equal(lengths, lengths + ndim_, wanted_.sizes.data() + overlap.wanted * ndim_);
    items_.append(maker_.tensor_read(
        maker_.metadata_index(fqn, dest_offset, py::int_(overlap.wanted)), region_size(region),
        maker_.metadata_index(fqn, stored_offset(stored, overlap.stored), py::int_(overlap.stored)),
        region_size(region + ndim_), is_whole ? dest_sizes : maker_.size_of(lengths, ndim_)));
  }

  // Wanted chunks that one overlap does not obviously fill. What a chunk asks for beyond the
  // tensor's end is padding, which is nobody's to store.
  void note_doubts(std::int64_t number) {
    doubts_.clear();
    // Overlaps of one wanted chunk lie together, wherever its group is.
    firsts_.assign(wanted_.count, 0);
    lasts_.assign(wanted_.count, 0);
    for (std::size_t i = 0; i < overlaps_.size(); ++i) {
      const std::size_t w = overlaps_[i].wanted;
      if (lasts_[w] == 0) firsts_[w] = i;
      lasts_[w] = i + 1;
    }
    for (std::size_t w = 0; w < wanted_.count; ++w) {
      const std::size_t first = firsts_[w];
      const std::size_t last = std::max(lasts_[w], first);
      const std::int64_t* sizes = wanted_.sizes.data() + w * ndim_;
      const std::int64_t* lengths = regions_.data() + 3 * ndim_ * first + 2 * ndim_;
      if (last - first == 1 && std::equal(lengths, lengths + ndim_, sizes)) continue;
      const std::int64_t* offsets = wanted_.offsets.data() + w * ndim_;
      const auto inside = [&](std::size_t d, std::int64_t end) {
        if (sizes_.size() == ndim_ && offsets[d] >= 0) end = std::min(end, sizes_[d] - offsets[d]);
        return std::max<std::int64_t>(end, 0);
      };
      doubts_.ndims.push_back(static_cast<std::int64_t>(ndim_));
      for (std::size_t d = 0; d < ndim_; ++d) doubts_.sizes.push_back(inside(d, sizes[d]));
      doubts_.counts.push_back(static_cast<std::int64_t>(last - first));
      doubts_.chunks.push_back({number, static_cast<std::int64_t>(w), doubts_.stored.size()});
      for (std::size_t i = first; i < last; ++i) {
        const std::int64_t* region = regions_.data() + 3 * ndim_ * i;
        for (std::size_t d = 0; d < ndim_; ++d) {
          const std::int64_t begin = inside(d, region[d]);
          doubts_.offsets.push_back(begin);
          doubts_.lengths.push_back(inside(d, region[d] + region[2 * ndim_ + d]) - begin);
        }
        doubts_.stored.push_back(overlaps_[i].stored);
      }
    }
  }

  ItemMaker& maker_;
  const py::function& fallback_;
  plan::OverlapOrder order_;
  const StoredColumns* columns_;
  py::list items_;
  py::list offences_;
  Doubts doubts_;
  // Of the tensor at hand.
  std::size_t ndim_ = 0;
  Side wanted_;
  Side stored_;
  plan::Boxes boxes_;  // those in `stored_`, or in the columns
  std::vector<plan::Overlap> overlaps_;
  Numbers regions_;                  // of each overlap: dest offsets, storage offsets, lengths
  Numbers sizes_;                    // of the whole tensor
  std::vector<std::size_t> firsts_;  // of each wanted chunk's overlaps
  std::vector<std::size_t> lasts_;   // and behind them
};

}  // namespace

py::tuple make_read_items(ItemMaker& maker, const py::list& rows, const py::function& fallback,
                          bool is_swept, const StoredColumns* columns) {
  ReadPlanner planner(maker, fallback,
                      is_swept ? plan::OverlapOrder::kSwept : plan::OverlapOrder::kNested, columns);
  std::int64_t number = 0;
  for (const py::handle& row : rows) {
    planner.add_row(number++, row);
    if (planner.has_offences()) break;  // whoever asks refuses the first
  }
  return planner.result();
}

}  // namespace dcpx
