#include "format/pickled_metadata.h"

#include <algorithm>
#include <utility>

namespace dcpx {
namespace {

using Kind = PickledValue::Kind;

constexpr std::size_t kMaxDims = 64;          // of torch
constexpr std::size_t kMaxDescriptors = 256;  // distinct lists; a save has one or two
constexpr std::size_t kMaxNames = 16;         // of one list: all lists are compared with a place's
constexpr std::size_t kCommonProperties = 5;  // fields; the sixth is torch 2.15's
constexpr std::string_view kMemoryFormats[] = {"TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST",
                                               "TORCH_PRESERVE_FORMAT"};
constexpr std::int64_t kMemoryFormatCount = 3;

bool is_absent(const PickledValue& value) {
  return value.is(Kind::kUnset) || value.is(Kind::kNone);
}

bool is_optional_text(const PickledValue& value) {
  return is_absent(value) || value.is(Kind::kText);
}

std::int64_t text_or_none(const PickledValue& value) {
  return is_absent(value) ? -1 : value.number;
}

}  // namespace

PickledValue PickledMetadata::made(Kind kind, std::size_t number) const {
  Value value;
  value.kind = kind;
  value.number = static_cast<std::int64_t>(number);
  return value;
}

PickledValue PickledMetadata::container(Kind kind) {
  if (free_containers_.empty()) {
    free_containers_.push_back(containers_.size());
    containers_.emplace_back();
  }
  const std::size_t number = free_containers_.back();
  free_containers_.pop_back();
  return made(kind, number);
}

void PickledMetadata::forget(const Value& container) {
  items(container).clear();
  free_containers_.push_back(static_cast<std::size_t>(container.number));
}

bool PickledMetadata::make_tuple(const Value* from, std::size_t count, Value* made) {
  if (count > UINT16_MAX) return false;
  const bool are_ints =
      std::all_of(from, from + count, [](const Value& v) { return v.is(Kind::kInt); });
  *made =
      this->made(are_ints ? Kind::kIntTuple : Kind::kTuple, are_ints ? ints_.size() : pool_.size());
  made->count = static_cast<std::uint16_t>(count);
  if (are_ints) {
    for (std::size_t i = 0; i < count; ++i) ints_.push_back(from[i].number);
  } else {
    pool_.insert(pool_.end(), from, from + count);
  }
  return true;
}

void PickledMetadata::forget_tuple(const Value& tuple) {
  const auto first = static_cast<std::size_t>(tuple.number);
  if (tuple.is(Kind::kTuple) && first + tuple.count == pool_.size()) pool_.resize(first);
}

bool PickledMetadata::call(Global callee, const Value& arguments, Value* made) {
  const Value* given = elements(arguments);
  const bool is_one = arguments.is(Kind::kTuple) && arguments.count == 1;
  switch (callee) {
    case Global::kSize: {
      if (!is_one || !given[0].is(Kind::kIntTuple)) return false;
      *made = given[0];
      made->kind = Kind::kSize;
      Range range;
      return size(*made, &range);
    }
    case Global::kGetLayout:
      if (!is_one || !given[0].is(Kind::kText)) return false;
      *made = given[0];
      made->kind = Kind::kLayout;
      return true;
    case Global::kMemoryFormat: {
      if (!arguments.is(Kind::kIntTuple) || arguments.count != 1) return false;
      const std::int64_t code = ints_[static_cast<std::size_t>(arguments.number)];
      if (code < 0 || code >= kMemoryFormatCount) return false;
      *made = this->made(Kind::kMemoryFormat, static_cast<std::size_t>(code));
      return true;
    }
    case Global::kGetattr: {
      if (!arguments.is(Kind::kTuple) || arguments.count != 2 || !given[0].is(Kind::kGlobal) ||
          static_cast<Global>(given[0].number) != Global::kMemoryFormat ||
          !given[1].is(Kind::kText)) {
        return false;
      }
      const auto* end = kMemoryFormats + kMemoryFormatCount;
      const auto* found = std::find(kMemoryFormats, end, texts.text(given[1].number));
      *made = this->made(Kind::kMemoryFormat, static_cast<std::size_t>(found - kMemoryFormats));
      return found != end;
    }
    case Global::kDict:
      *made = container(Kind::kDict);
      made->count = 1;  // no state of an object
      return arguments.is(Kind::kIntTuple) && arguments.count == 0;
    case Global::kPath: {
      *made = arguments;
      made->kind = Kind::kPath;
      return arguments.is(Kind::kTuple) &&
             std::all_of(given, given + arguments.count,
                         [](const Value& part) { return part.is(Kind::kText); });
    }
    default:
      return false;
  }
}

bool PickledMetadata::build(Global its_class, const Value& state, Value* made) {
  if (its_class == Global::kProperties) return properties(state, made);
  if (!state.is(Kind::kDict) || state.count != 0) return false;
  switch (its_class) {
    case Global::kChunk:
      return chunk(state, made);
    case Global::kTensor:
      return tensor(state, made);
    case Global::kIndex:
      return index(state, made);
    case Global::kPlace:
      return place(state, made);
    case Global::kStorageMeta:
      return storage_meta(state, made);
    case Global::kMetadata:
      return metadata(state, made);
    default:
      return false;
  }
}

template <std::size_t N>
bool PickledMetadata::fields(const Value& state, const std::array<Field, N>& names,
                             Fields<N>* found) {
  for (Value& value : *found) value.kind = Kind::kUnset;
  const Values& pairs = items(state);
  for (std::size_t at = 0; at < pairs.size(); at += 2) {
    if (!pairs[at].is(Kind::kText)) return false;
    const Field field = texts.field(pairs[at].number);
    const auto* name = std::find(names.begin(), names.end(), field);
    if (name == names.end()) return false;
    Value& value = (*found)[static_cast<std::size_t>(name - names.begin())];
    if (!value.is(Kind::kUnset)) return false;
    value = pairs[at + 1];
  }
  return true;
}

bool PickledMetadata::size(const Value& value, Range* into) const {
  if (!value.is(Kind::kSize) || value.count > kMaxDims) return false;
  *into = {static_cast<std::size_t>(value.number), value.count};
  const auto first = ints_.begin() + value.number;
  return std::all_of(first, first + value.count, [](std::int64_t n) { return n >= 0; });
}

bool PickledMetadata::properties(const Value& state, Value* made) {
  const std::size_t count = state.count;
  if (!state.is(Kind::kTuple) || (count != kCommonProperties && count != kCommonProperties + 1)) {
    return false;
  }
  const Value* given = elements(state);
  if (!given[0].is(Kind::kDtype) || !given[1].is(Kind::kLayout) || !given[2].is(Kind::kBool) ||
      !given[3].is(Kind::kMemoryFormat) || !given[4].is(Kind::kBool)) {
    return false;
  }
  Properties one;
  one.dtype = given[0].number;
  one.layout = given[1].number;
  one.flags = static_cast<std::uint8_t>(given[2].number + 2 * given[4].number);
  one.memory_format = static_cast<std::uint8_t>(given[3].number);
  if (count > kCommonProperties && !given[5].is(Kind::kNone)) {
    Value strides = given[5];
    if (strides.is(Kind::kIntTuple)) strides.kind = Kind::kSize;
    Range range;
    if (!size(strides, &range)) return false;
    one.stride_count = static_cast<std::int64_t>(range.count);
    one.first_stride = range.first;
  }
  *made = this->made(Kind::kProperties, properties_.size());
  properties_.push_back(one);
  return true;
}

bool PickledMetadata::chunk(const Value& state, Value* made) {
  Fields<2> found;
  Chunk one;
  if (!fields(state, std::array{Field::kOffsets, Field::kSizes}, &found) ||
      !size(found[0], &one.offsets) || !size(found[1], &one.sizes) ||
      one.offsets.count != one.sizes.count) {
    return false;
  }
  for (std::size_t d = 0; d < one.sizes.count; ++d) {
    std::int64_t end = 0;
    if (__builtin_add_overflow(ints_[one.offsets.first + d], ints_[one.sizes.first + d], &end)) {
      return false;
    }
  }
  *made = this->made(Kind::kChunk, chunks_.size());
  chunks_.push_back(one);
  return true;
}

bool PickledMetadata::tensor(const Value& state, Value* made) {
  Fields<3> found;
  Tensor one;
  if (!fields(state, std::array{Field::kProperties, Field::kSize, Field::kChunks}, &found) ||
      !found[0].is(Kind::kProperties) || !size(found[1], &one.size) || !found[2].is(Kind::kList)) {
    return false;
  }
  one.properties = static_cast<std::size_t>(found[0].number);
  one.first_chunk = chunk_list_.size();
  one.chunk_count = items(found[2]).size();
  for (const Value& chunk : items(found[2])) {
    const auto number = static_cast<std::size_t>(chunk.number);
    if (!chunk.is(Kind::kChunk) || chunks_[number].sizes.count != one.size.count) return false;
    chunk_list_.push_back(number);
  }
  *made = this->made(Kind::kTensor, tensors_.size());
  tensors_.push_back(one);
  return true;
}

bool PickledMetadata::index(const Value& state, Value* made) {
  Fields<3> found;
  Index one;
  if (!fields(state, std::array{Field::kFqn, Field::kOffset, Field::kIndex}, &found) ||
      !found[0].is(Kind::kText)) {
    return false;
  }
  one.fqn = found[0].number;
  if (!is_absent(found[1])) {
    Range range;
    if (!size(found[1], &range)) return false;
    one.ndim = static_cast<std::int64_t>(range.count);
    one.first = range.first;
  }
  if (!is_absent(found[2])) {
    if (!found[2].is(Kind::kInt) || found[2].number < 0) return false;
    one.hint = found[2].number;
  }
  *made = this->made(Kind::kIndex, indices_.size());
  indices_.push_back(one);
  return true;
}

bool PickledMetadata::place(const Value& state, Value* made) {
  Fields<4> found;
  Place one;
  if (!fields(state,
              std::array{Field::kRelativePath, Field::kOffset, Field::kLength,
                         Field::kTransformDescriptors},
              &found) ||
      !found[0].is(Kind::kText) || !found[1].is(Kind::kInt) || !found[2].is(Kind::kInt)) {
    return false;
  }
  one.path = found[0].number;
  one.offset = found[1].number;
  one.nbytes = found[2].number;
  std::int64_t end = 0;
  if (one.offset < 0 || one.nbytes < 0 || __builtin_add_overflow(one.offset, one.nbytes, &end)) {
    return false;
  }
  if (!is_absent(found[3]) && !descriptors(found[3], &one.descriptors)) return false;
  *made = this->made(Kind::kPlace, places_.size());
  places_.push_back(one);
  return true;
}

bool PickledMetadata::texts_of(const Value& value, std::vector<std::int64_t>* into) {
  const bool is_empty = value.is(Kind::kIntTuple) && value.count == 0;
  if (!is_empty && !value.is(Kind::kTuple) && !value.is(Kind::kList) && !value.is(Kind::kPath)) {
    return false;
  }
  const bool is_list = value.is(Kind::kList);
  const Value* first = is_list ? items(value).data() : elements(value);
  const std::size_t count = is_list ? items(value).size() : value.count;
  for (std::size_t i = 0; i < count; ++i) {
    if (!first[i].is(Kind::kText)) return false;
    into->push_back(first[i].number);
  }
  return true;
}

bool PickledMetadata::descriptors(const Value& value, std::int64_t* number) {
  const std::size_t count = value.is(Kind::kList) ? items(value).size() : value.count;
  std::vector<std::int64_t> names;
  if (count > kMaxNames || !texts_of(value, &names)) return false;
  const auto found = std::find(descriptors_.begin(), descriptors_.end(), names);
  *number = found - descriptors_.begin();
  if (found == descriptors_.end()) descriptors_.push_back(std::move(names));
  return descriptors_.size() <= kMaxDescriptors;
}

bool PickledMetadata::storage_meta(const Value& state, Value* made) {
  Fields<4> found;
  if (has_storage_meta_ ||
      !fields(state,
              std::array{Field::kCheckpointId, Field::kSaveId, Field::kLoadId, Field::kModules},
              &found)) {
    return false;
  }
  const Value& place = found[0];
  storage_meta_.is_path = place.is(Kind::kPath);
  if (storage_meta_.is_path) {
    texts_of(place, &storage_meta_.checkpoint_id);
  } else {
    if (!is_optional_text(place)) return false;
    if (!is_absent(place)) storage_meta_.checkpoint_id.push_back(place.number);
  }
  if (!is_optional_text(found[1]) || !is_optional_text(found[2])) return false;
  storage_meta_.save_id = text_or_none(found[1]);
  storage_meta_.load_id = text_or_none(found[2]);
  if (!found[3].is(Kind::kUnset) &&
      (!found[3].is(Kind::kList) || !texts_of(found[3], &storage_meta_.modules))) {
    return false;
  }
  has_storage_meta_ = true;
  *made = this->made(Kind::kStorageMeta, 0);
  return true;
}

bool PickledMetadata::metadata(const Value& state, Value* made) {
  if (has_root_ || !fields(state,
                           std::array{Field::kStateDictMetadata, Field::kStorageData,
                                      Field::kPlannerData, Field::kStorageMeta, Field::kVersion},
                           &root_)) {
    return false;
  }
  has_root_ = true;
  *made = this->made(Kind::kMetadata, 0);
  return root_[0].is(Kind::kDict) && root_[1].is(Kind::kDict) &&
         (is_absent(root_[2]) || root_[2].is(Kind::kDict)) &&
         (is_absent(root_[3]) || root_[3].is(Kind::kStorageMeta)) && is_optional_text(root_[4]);
}

}  // namespace dcpx
