#include "format/metadata_pickle.h"

#include <iterator>
#include <optional>
#include <unordered_map>

#include "format/pickled_texts.h"

namespace dcpx {
namespace {

using namespace pickle_op;

// Modules and classes of stock DCP: a name's number among the others of PickleTexts. Behind them
// come those of the fields.
enum Name : std::uint8_t {
  kTorch,
  kTorchSerialization,
  kMetadataModule,
  kFilesystemModule,
  kSizeClass,
  kGetLayout,
  kMemFormatEncoding,
  kMetadataClass,
  kBytesClass,
  kTensorClass,
  kPropertiesClass,
  kChunkClass,
  kIndexClass,
  kPlaceClass,
  kStorageMetaClass,
  kNameCount,
};
constexpr const char* kNames[] = {
    "torch",
    "torch.serialization",
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
    "Size",
    "_get_layout",
    "_MEM_FORMAT_ENCODING",
    "Metadata",
    "BytesStorageMetadata",
    "TensorStorageMetadata",
    "TensorProperties",
    "ChunkStorageMetadata",
    "MetadataIndex",
    "_StorageInfo",
    "StorageMeta",
};
static_assert(std::size(kNames) == kNameCount);

constexpr std::size_t kMemoryFormats = 3;  // codes of stock's _MEM_FORMAT_ENCODING

// A flat column, taken piece by piece in the order of the file.
class Flat {
 public:
  explicit Flat(const Column<std::int64_t>& column) : column_(column) {}

  const std::int64_t* take(std::size_t count) {
    DCPX_CHECK(count <= column_.count - at_, "a flat column of metadata is too short");
    const std::int64_t* values = column_.data + at_;
    at_ += count;
    return values;
  }

 private:
  const Column<std::int64_t>& column_;
  std::size_t at_ = 0;
};

std::size_t as_count(std::int64_t value) {
  DCPX_CHECK(value >= 0, "a column of metadata counts less than none");
  return static_cast<std::size_t>(value);
}

class MetadataPickle {
 public:
  MetadataPickle(const MetadataColumns& columns, const MetadataRest& rest)
      : c_(columns), rest_(rest), texts_(columns.strings, columns.string_ends) {
    for (const char* name : kNames) texts_.add(name);  // each gets its Name as its number
    for (std::size_t field = 1; field <= kFieldCount; ++field) {
      texts_.add(field_name(static_cast<Field>(field)));
    }
    for (std::size_t at = 0; at < c_.tensor_layout.count; ++at) {
      const std::int64_t layout = c_.tensor_layout[at];
      if (layouts_.count(layout) != 0) continue;
      const std::size_t text = texts_.add("torch." + std::string(texts_.pool_text(layout)));
      layouts_.emplace(layout, Layout{text, {}});
    }
    for (const std::vector<std::string>& names : rest.descriptors) {
      descriptors_.push_back(added(names));
    }
    if (rest.storage_meta) {
      modules_ = added(rest.storage_meta->modules);
      checkpoint_id_ = added(rest.storage_meta->checkpoint_id);
      save_id_ = added(rest.storage_meta->save_id);
    }
    version_ = added(rest.version);
    texts_.number_pool();
  }

  // Attribute by attribute: `}(` key value ... `ub` sets those of the object before it.
  std::vector<std::byte> run() {
    PickleWriter out(texts_);
    out_ = &out;
    open(kMetadataModule, kMetadataClass);
    put_field(Field::kStateDictMetadata);
    out.op(kEmptyDict);
    out.batches(c_.entry_fqn.count, kSetitems, [&](std::size_t at) { put_entry(at); });
    put_field(Field::kPlannerData);
    put_planner();
    put_field(Field::kStorageData);
    out.op(kEmptyDict);
    out.batches(c_.storage_fqn.count, kSetitems, [&](std::size_t at) { put_place(at); });
    put_field(Field::kStorageMeta);
    put_storage_meta();
    put_field(Field::kVersion);
    put_optional(version_);
    close();
    return out.finish();
  }

 private:
  struct Layout {
    std::size_t text;
    PickleWriter::Memo memo;
  };
  using OptionalText = std::optional<std::size_t>;

  std::vector<std::size_t> added(const std::vector<std::string>& texts) {
    std::vector<std::size_t> numbers;
    for (const std::string& text : texts) numbers.push_back(texts_.add(text));
    return numbers;
  }
  OptionalText added(const std::optional<std::string>& text) {
    return text ? OptionalText(texts_.add(*text)) : std::nullopt;
  }

  // An object of one of stock's classes, without attributes yet.
  void put_new(Name module, Name name) {
    out_->global(module, name, classes_[name]);
    out_->op(kEmptyTuple);
    out_->op(kNewobj);
  }
  void open(Name module, Name name) {
    put_new(module, name);
    out_->op(kEmptyDict);
    out_->op(kMark);
  }
  void close() {
    out_->op(kSetitems);
    out_->op(kBuild);
  }
  void put_field(Field field) { out_->text(kNameCount + static_cast<std::size_t>(field) - 1); }
  void put_optional(OptionalText text) {
    if (text) return out_->text(*text);
    out_->op(kNone);
  }
  void put_texts(const std::vector<std::size_t>& numbers) {
    out_->op(kEmptyList);
    out_->batches(numbers.size(), kAppends, [&](std::size_t at) { out_->text(numbers[at]); });
  }
  void put_pool_text(std::int64_t at) { out_->text(texts_.of_pool(at)); }
  void put_size(Flat& values, std::size_t ndim) {
    out_->size({kTorch, kSizeClass, classes_[kSizeClass]}, values.take(ndim), ndim);
  }

  void put_entry(std::size_t at) {
    put_pool_text(c_.entry_fqn[at]);
    if (c_.entry_kind[at] != 0) return put_new(kMetadataModule, kBytesClass);
    const std::size_t tensor = tensor_++;
    const std::size_t ndim = as_count(c_.tensor_ndim[tensor]);
    open(kMetadataModule, kTensorClass);
    put_field(Field::kProperties);
    put_properties(tensor);
    put_field(Field::kSize);
    put_size(sizes_, ndim);
    put_field(Field::kChunks);
    out_->op(kEmptyList);
    out_->batches(as_count(c_.tensor_chunk_count[tensor]), kAppends, [&](std::size_t) {
      open(kMetadataModule, kChunkClass);
      put_field(Field::kOffsets);
      put_size(chunk_offsets_, ndim);
      put_field(Field::kSizes);
      put_size(chunk_sizes_, ndim);
      close();
    });
    close();
  }

  // The five fields that every torch reads.
  void put_properties(std::size_t tensor) {
    put_new(kMetadataModule, kPropertiesClass);
    out_->op(kMark);
    const std::int64_t dtype = c_.tensor_dtype[tensor];
    out_->global(kTorch, texts_.of_pool(dtype), dtypes_[dtype]);
    put_layout(layouts_.at(c_.tensor_layout[tensor]));
    const std::uint8_t flags = c_.tensor_flags[tensor];
    out_->boolean((flags & 1) != 0);
    put_memory_format(c_.tensor_memory_format[tensor]);
    out_->boolean((flags & 2) != 0);
    out_->op(kTuple);
    out_->op(kBuild);
  }

  void put_layout(Layout& layout) {
    if (out_->get(layout.memo)) return;
    out_->global(kTorchSerialization, kGetLayout, classes_[kGetLayout]);
    out_->text(layout.text);
    out_->op(kTuple1);
    out_->op(kReduce);
    out_->memoize(layout.memo);
  }

  void put_memory_format(std::size_t code) {
    DCPX_CHECK(code < kMemoryFormats, "a column of metadata holds an unknown memory format");
    if (out_->get(memory_formats_[code])) return;
    out_->global(kMetadataModule, kMemFormatEncoding, classes_[kMemFormatEncoding]);
    out_->integer(static_cast<std::int64_t>(code));
    out_->op(kTuple1);
    out_->op(kReduce);
    out_->memoize(memory_formats_[code]);
  }

  void put_planner() {
    if (!c_.has_planner) return out_->op(kNone);
    out_->op(kEmptyDict);
    std::size_t key = 0;
    out_->batches(c_.planner_fqn.count, kSetitems, [&](std::size_t at) {
      put_pool_text(c_.planner_fqn[at]);
      out_->tuple(as_count(c_.planner_len[at]), [&](std::size_t) {
        const std::int64_t value = c_.planner_value[key];
        if (c_.planner_tag[key++] == 0) return put_pool_text(value);
        out_->integer(value);
      });
    });
  }

  void put_place(std::size_t at) {
    open(kMetadataModule, kIndexClass);
    put_field(Field::kFqn);
    put_pool_text(c_.storage_fqn[at]);
    put_field(Field::kIndex);
    const std::int64_t hint = c_.storage_hint[at];
    if (hint < 0) {
      out_->op(kNone);
    } else {
      out_->integer(hint);
    }
    const std::int64_t ndim = c_.storage_ndim[at];
    if (ndim >= 0) {
      put_field(Field::kOffset);
      put_size(storage_offsets_, as_count(ndim));
    }
    close();
    open(kFilesystemModule, kPlaceClass);
    put_field(Field::kRelativePath);
    put_pool_text(c_.storage_path[at]);
    put_field(Field::kOffset);
    out_->integer(c_.storage_offset[at]);
    put_field(Field::kLength);
    out_->integer(c_.storage_bytes[at]);
    const std::int64_t descriptors = c_.storage_descriptors[at];
    if (descriptors >= 0) {
      DCPX_CHECK(as_count(descriptors) < descriptors_.size(), "no such transform descriptors");
      put_field(Field::kTransformDescriptors);
      put_texts(descriptors_[as_count(descriptors)]);
    }
    close();
  }

  void put_storage_meta() {
    if (!rest_.storage_meta) return out_->op(kNone);
    open(kMetadataModule, kStorageMetaClass);
    put_field(Field::kCheckpointId);
    put_optional(checkpoint_id_);
    put_field(Field::kSaveId);
    put_optional(save_id_);
    put_field(Field::kLoadId);
    out_->op(kNone);
    put_field(Field::kModules);
    put_texts(modules_);
    close();
  }

  const MetadataColumns& c_;
  const MetadataRest& rest_;
  PickleTexts texts_;
  PickleWriter* out_ = nullptr;

  std::vector<std::vector<std::size_t>> descriptors_;
  std::vector<std::size_t> modules_;
  OptionalText checkpoint_id_;
  OptionalText save_id_;
  OptionalText version_;

  PickleWriter::Memo classes_[kNameCount];
  PickleWriter::Memo memory_formats_[kMemoryFormats];
  std::unordered_map<std::int64_t, PickleWriter::Memo> dtypes_;  // by number in the pool
  std::unordered_map<std::int64_t, Layout> layouts_;

  std::size_t tensor_ = 0;  // how many entries before were tensors
  Flat sizes_{c_.tensor_sizes};
  Flat chunk_offsets_{c_.chunk_offsets};
  Flat chunk_sizes_{c_.chunk_sizes};
  Flat storage_offsets_{c_.storage_offsets};
};

}  // namespace

std::vector<std::byte> pickle_metadata(const MetadataColumns& columns, const MetadataRest& rest) {
  return MetadataPickle(columns, rest).run();
}

}  // namespace dcpx
