// The distinct texts of a pickle, numbered; the names of stock's classes and fields among them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/siphash.h"

namespace dcpx {

// The fields of stock's classes in a `.metadata`.
enum class Field : std::uint8_t {
  kNoField,
  kStateDictMetadata,
  kPlannerData,
  kStorageData,
  kStorageMeta,
  kVersion,
  kProperties,
  kSize,
  kChunks,
  kOffsets,
  kSizes,
  kFqn,
  kIndex,
  kOffset,
  kRelativePath,
  kLength,
  kTransformDescriptors,
  kCheckpointId,
  kSaveId,
  kLoadId,
  kModules,
};
constexpr std::size_t kFieldCount = static_cast<std::size_t>(Field::kModules);  // without kNoField

std::string_view field_name(Field field);

// What a `.metadata` names: classes, the functions that pickle calls, and dtypes.
enum class Global : std::uint8_t {
  kUnknown,
  kMetadata,
  kBytes,
  kTensor,
  kProperties,
  kChunk,
  kIndex,
  kPlace,
  kStorageMeta,
  kMemoryFormat,
  kSize,
  kGetLayout,
  kDict,
  kGetattr,
  kPath,
  kDtype,  // of any name: a member of `torch`
};

Global find_global(std::string_view module, std::string_view name);

class PickledTexts {  // Not thread-safe. Keeps views of what is added.
 public:
  explicit PickledTexts(const SipHash::Key& key) : key_(key), slots_(64, 0) {}

  // The number of a text, the same for equal ones.
  std::uint32_t add(std::string_view text);

  std::string_view text(std::int64_t number) const {
    return texts_[static_cast<std::size_t>(number)].text;
  }
  Field field(std::int64_t number) const { return texts_[static_cast<std::size_t>(number)].field; }
  std::size_t count() const { return texts_.size(); }

 private:
  struct Text {
    std::string_view text;
    std::uint64_t hash;
    Field field;
  };
  void grow();

  SipHash::Key key_;
  std::vector<Text> texts_;
  std::vector<std::uint32_t> slots_;  // by hash, at most half of them taken: numbers + 1, 0 is free
};

}  // namespace dcpx
