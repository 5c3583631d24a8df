#include "format/pickled_texts.h"

#include <iterator>

namespace dcpx {
namespace {

constexpr std::string_view kFields[] = {
    "",  // kNoField
    "state_dict_metadata",
    "planner_data",
    "storage_data",
    "storage_meta",
    "version",
    "properties",
    "size",
    "chunks",
    "offsets",
    "sizes",
    "fqn",
    "index",
    "offset",
    "relative_path",
    "length",
    "transform_descriptors",
    "checkpoint_id",
    "save_id",
    "load_id",
    "modules",
};
static_assert(std::size(kFields) == kFieldCount + 1);

constexpr std::string_view kMetadataModule = "torch.distributed.checkpoint.metadata";
constexpr std::string_view kFilesystem = "torch.distributed.checkpoint.filesystem";
// Where torch 2.0 kept two of them.
constexpr std::string_view kSharded = "torch.distributed._shard.sharded_tensor.metadata";

struct NamedGlobal {
  std::string_view module, name;
  Global global;
};
constexpr NamedGlobal kGlobals[] = {
    {kMetadataModule, "Metadata", Global::kMetadata},
    {kMetadataModule, "BytesStorageMetadata", Global::kBytes},
    {kMetadataModule, "TensorStorageMetadata", Global::kTensor},
    {kMetadataModule, "TensorProperties", Global::kProperties},
    {kSharded, "TensorProperties", Global::kProperties},
    {kMetadataModule, "ChunkStorageMetadata", Global::kChunk},
    {kMetadataModule, "MetadataIndex", Global::kIndex},
    {kFilesystem, "_StorageInfo", Global::kPlace},
    {kMetadataModule, "StorageMeta", Global::kStorageMeta},
    {kMetadataModule, "_MEM_FORMAT_ENCODING", Global::kMemoryFormat},
    {kSharded, "MEM_FORMAT_ENCODING", Global::kMemoryFormat},
    {"torch", "Size", Global::kSize},
    {"torch.serialization", "_get_layout", Global::kGetLayout},
    {"builtins", "dict", Global::kDict},
    {"__builtin__", "dict", Global::kDict},
    {"builtins", "getattr", Global::kGetattr},  // CPython 3.11.0 to 3.11.3 pickle enums so
    {"__builtin__", "getattr", Global::kGetattr},
    {"pathlib", "PosixPath", Global::kPath},
    {"pathlib._local", "PosixPath", Global::kPath},
};

Field find_field(std::string_view text) {
  for (std::size_t at = 1; at < std::size(kFields); ++at) {
    if (kFields[at] == text) return static_cast<Field>(at);
  }
  return Field::kNoField;
}

}  // namespace

std::string_view field_name(Field field) { return kFields[static_cast<std::size_t>(field)]; }

Global find_global(std::string_view module, std::string_view name) {
  for (const NamedGlobal& known : kGlobals) {
    if (known.module == module && known.name == name) return known.global;
  }
  return module == "torch" ? Global::kDtype : Global::kUnknown;
}

std::uint32_t PickledTexts::add(std::string_view text) {
  const std::uint64_t hash =
      SipHash::of(key_, reinterpret_cast<const std::byte*>(text.data()), text.size());
  const std::size_t mask = slots_.size() - 1;
  std::size_t at = hash & mask;
  for (; slots_[at] != 0; at = (at + 1) & mask) {
    const Text& known = texts_[slots_[at] - 1];
    if (known.hash == hash && known.text == text) return slots_[at] - 1;
  }
  texts_.push_back({text, hash, find_field(text)});
  slots_[at] = static_cast<std::uint32_t>(texts_.size());
  if (2 * texts_.size() > slots_.size()) grow();
  return static_cast<std::uint32_t>(texts_.size()) - 1;
}

void PickledTexts::grow() {
  const std::size_t mask = 2 * slots_.size() - 1;
  slots_.assign(mask + 1, 0);
  for (std::size_t number = 0; number < texts_.size(); ++number) {
    std::size_t at = texts_[number].hash & mask;
    while (slots_[at] != 0) at = (at + 1) & mask;
    slots_[at] = static_cast<std::uint32_t>(number) + 1;
  }
}

}  // namespace dcpx
