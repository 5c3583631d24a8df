// The columns of a Metadata whose objects were built.
#include <utility>

#include "format/pickled_metadata.h"

namespace dcpx {
namespace {

// Whether a text is met for the first time.
class FirstUse {
 public:
  explicit FirstUse(std::size_t texts) : was_met_(texts, false) {}
  bool operator()(std::int64_t text) {
    const auto at = static_cast<std::size_t>(text);
    if (was_met_[at]) return false;
    was_met_[at] = true;
    return true;
  }

 private:
  std::vector<bool> was_met_;
};

}  // namespace

bool PickledMetadata::charge(std::size_t rows, std::size_t cells) {
  std::size_t wanted = 0;
  if (__builtin_mul_overflow(rows, cells, &wanted) || wanted > cells_left_) return false;
  cells_left_ -= wanted;
  return true;
}

void PickledMetadata::append(const Range& range, std::vector<std::int64_t>* column) const {
  const auto first = ints_.begin() + static_cast<std::ptrdiff_t>(range.first);
  column->insert(column->end(), first, first + static_cast<std::ptrdiff_t>(range.count));
}

std::int64_t PickledMetadata::string(std::int64_t text) {
  std::int64_t& number = string_of_[static_cast<std::size_t>(text)];
  if (number < 0) {
    number = static_cast<std::int64_t>(columns_->strings.size());
    columns_->strings.push_back(texts.text(text));
  }
  return number;
}

bool PickledMetadata::emit_properties(const Properties& properties) {
  UnpickledColumns& out = *columns_;
  out.tensor_dtype.push_back(string(properties.dtype));
  out.tensor_layout.push_back(string(properties.layout));
  out.tensor_flags.push_back(properties.flags);
  out.tensor_memory_format.push_back(properties.memory_format);
  out.tensor_stride_count.push_back(properties.stride_count);
  if (properties.stride_count <= 0) return true;
  const auto count = static_cast<std::size_t>(properties.stride_count);
  append({properties.first_stride, count}, &out.tensor_strides);
  return charge(count, 1);
}

bool PickledMetadata::emit_tensor(const Tensor& tensor) {
  UnpickledColumns& out = *columns_;
  const std::size_t ndim = tensor.size.count;
  // First, for it bounds what follows.
  if (!charge(1, ndim) || !charge(tensor.chunk_count, 2 * ndim + 1)) return false;
  out.tensor_ndim.push_back(static_cast<std::int64_t>(ndim));
  out.tensor_chunk_count.push_back(static_cast<std::int64_t>(tensor.chunk_count));
  append(tensor.size, &out.tensor_sizes);
  out.chunk_flags.resize(out.chunk_flags.size() + tensor.chunk_count, 0);
  for (std::size_t i = 0; i < tensor.chunk_count; ++i) {
    const Chunk& chunk = chunks_[chunk_list_[tensor.first_chunk + i]];
    append(chunk.offsets, &out.chunk_offsets);
    append(chunk.sizes, &out.chunk_sizes);
  }
  return emit_properties(properties_[tensor.properties]);
}

bool PickledMetadata::emit_entries() {
  UnpickledColumns& out = *columns_;
  FirstUse is_first(texts.count());
  const Values& pairs = items(root_[0]);
  for (std::size_t at = 0; at < pairs.size(); at += 2) {
    const Value& fqn = pairs[at];
    const Value& entry = pairs[at + 1];
    if (!fqn.is(Kind::kText) || !is_first(fqn.number)) return false;
    if (!entry.is(Kind::kTensor) && !entry.is(Kind::kBytes)) return false;
    out.entry_fqn.push_back(string(fqn.number));
    out.entry_kind.push_back(entry.is(Kind::kTensor) ? 0 : 1);
    if (entry.is(Kind::kTensor) && !emit_tensor(tensors_[static_cast<std::size_t>(entry.number)])) {
      return false;
    }
  }
  return true;
}

bool PickledMetadata::emit_places() {
  UnpickledColumns& out = *columns_;
  const Values& pairs = items(root_[1]);
  for (std::size_t at = 0; at < pairs.size(); at += 2) {
    if (!pairs[at].is(Kind::kIndex) || !pairs[at + 1].is(Kind::kPlace)) return false;
    const Index& index = indices_[static_cast<std::size_t>(pairs[at].number)];
    const Place& place = places_[static_cast<std::size_t>(pairs[at + 1].number)];
    out.storage_fqn.push_back(string(index.fqn));
    out.storage_ndim.push_back(index.ndim);
    out.storage_hint.push_back(index.hint);
    if (index.ndim > 0) {
      const auto ndim = static_cast<std::size_t>(index.ndim);
      if (!charge(1, ndim)) return false;
      append({index.first, ndim}, &out.storage_offsets);
    }
    out.storage_path.push_back(string(place.path));
    out.storage_offset.push_back(place.offset);
    out.storage_bytes.push_back(place.nbytes);
    out.storage_descriptors.push_back(place.descriptors);
  }
  return true;
}

bool PickledMetadata::emit_planner() {
  UnpickledColumns& out = *columns_;
  out.has_planner = root_[2].is(Kind::kDict);
  if (!out.has_planner) return true;
  FirstUse is_first(texts.count());
  const Values& pairs = items(root_[2]);
  for (std::size_t at = 0; at < pairs.size(); at += 2) {
    const Value& fqn = pairs[at];
    const Value& path = pairs[at + 1];
    if (!fqn.is(Kind::kText) || !is_first(fqn.number)) return false;
    if (!path.is(Kind::kTuple) && !path.is(Kind::kIntTuple)) return false;
    if (!charge(path.count, 1)) return false;
    out.planner_fqn.push_back(string(fqn.number));
    out.planner_len.push_back(path.count);
    for (std::size_t i = 0; i < path.count; ++i) {
      const bool is_int = path.is(Kind::kIntTuple) || elements(path)[i].is(Kind::kInt);
      if (!is_int && !elements(path)[i].is(Kind::kText)) return false;
      out.planner_tag.push_back(is_int ? 1 : 0);
      if (path.is(Kind::kIntTuple)) {
        out.planner_value.push_back(ints_[static_cast<std::size_t>(path.number) + i]);
      } else {
        const std::int64_t number = elements(path)[i].number;
        out.planner_value.push_back(is_int ? number : string(number));
      }
    }
  }
  return true;
}

void PickledMetadata::to_strings(std::vector<std::int64_t>* numbers) {
  for (std::int64_t& number : *numbers) number = string(number);
}

bool PickledMetadata::emit_rest() {
  UnpickledColumns& out = *columns_;
  for (std::vector<std::int64_t>& names : descriptors_) to_strings(&names);
  out.descriptors = std::move(descriptors_);
  if (root_[3].is(Kind::kStorageMeta)) {
    // A path is joined, and its parts may all be one text.
    for (const std::int64_t part : storage_meta_.checkpoint_id) {
      if (storage_meta_.is_path && !charge(texts.text(part).size(), 1)) return false;
    }
    to_strings(&storage_meta_.checkpoint_id);
    to_strings(&storage_meta_.modules);
    for (std::int64_t* text : {&storage_meta_.save_id, &storage_meta_.load_id}) {
      if (*text >= 0) *text = string(*text);
    }
    out.storage_meta = std::move(storage_meta_);
  }
  out.version = root_[4].is(Kind::kText) ? string(root_[4].number) : -1;
  return true;
}

bool PickledMetadata::emit(std::size_t max_cells, UnpickledColumns* columns) {
  columns_ = columns;
  cells_left_ = max_cells;
  string_of_.assign(texts.count(), -1);
  return emit_entries() && emit_places() && emit_planner() && emit_rest();
}

}  // namespace dcpx
