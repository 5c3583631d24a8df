// The columns of a `.metadata` pickle that stock DCP wrote, without an object an entry.
// A strict recogniser of what torch pickles for a Metadata: whatever is not exactly that (another
// class, opcode, field or type, bytes behind the end) is no error but declined, and Python's
// unpickler behind its allow-list has the say.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "common/siphash.h"

namespace dcpx {

// `StorageMeta`. Texts are numbers of strings, -1 is None.
struct UnpickledStorageMeta {
  bool is_path = false;                     // checkpoint_id is the path of these parts,
  std::vector<std::int64_t> checkpoint_id;  // else the one text, or None of none
  std::int64_t save_id = -1;
  std::int64_t load_id = -1;
  std::vector<std::int64_t> modules;
};

// The columns that docs/reference/format.md names, and what stands beside them in a Metadata. Every
// number of a string is one, every column has the length that the others say, every size is in [0,
// 2^63), every range ends there, and no key of entries or planner is there twice. Not checked: that
// texts are UTF-8, which constants torch has, and that no item has two places.
struct UnpickledColumns {
  std::vector<std::string_view> strings;  // distinct; views of the pickle

  std::vector<std::int64_t> entry_fqn;
  std::vector<std::uint8_t> entry_kind;
  std::vector<std::int64_t> tensor_dtype;   // a string such as float32
  std::vector<std::int64_t> tensor_layout;  // a string such as torch.strided
  std::vector<std::uint8_t> tensor_flags;
  std::vector<std::uint8_t> tensor_memory_format;
  std::vector<std::int64_t> tensor_ndim;
  std::vector<std::int64_t> tensor_chunk_count;
  std::vector<std::int64_t> tensor_sizes;
  std::vector<std::int64_t> tensor_stride_count;
  std::vector<std::int64_t> tensor_strides;
  std::vector<std::uint8_t> chunk_flags;  // zeros
  std::vector<std::int64_t> chunk_offsets;
  std::vector<std::int64_t> chunk_sizes;

  std::vector<std::int64_t> storage_fqn;
  std::vector<std::int64_t> storage_ndim;
  std::vector<std::int64_t> storage_offsets;
  std::vector<std::int64_t> storage_hint;
  std::vector<std::int64_t> storage_path;
  std::vector<std::int64_t> storage_offset;
  std::vector<std::int64_t> storage_bytes;
  std::vector<std::int64_t> storage_descriptors;
  std::vector<std::vector<std::int64_t>> descriptors;  // what storage_descriptors counts

  bool has_planner = false;  // else planner_data is None
  std::vector<std::int64_t> planner_fqn;
  std::vector<std::int64_t> planner_len;
  std::vector<std::uint8_t> planner_tag;
  std::vector<std::int64_t> planner_value;

  std::optional<UnpickledStorageMeta> storage_meta;
  std::int64_t version = -1;
};

// Returns whether `data` is, from its first byte to its last, the pickle of a Metadata as torch
// writes it (protocols 2 to 5, any memo). Executes nothing, does not recurse; memory stays below a
// small multiple of `nbytes`. `key`: 16 bytes that no file can know. `columns` keeps views of
// `data`, and holds nothing of use where false is returned.
bool unpickle_metadata(const std::byte* data, std::size_t nbytes, const SipHash::Key& key,
                       UnpickledColumns* columns);

}  // namespace dcpx
