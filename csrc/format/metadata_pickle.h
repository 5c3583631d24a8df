// The pickle of a Metadata that stock DCP reads, from the columns that our own readers read
// (docs/reference/format.md names them): the same bytes from every torch and Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "format/pickle_writer.h"

namespace dcpx {

// Views of the columns, by their names there; strings are numbers in the pool.
struct MetadataColumns {
  Column<char> strings;
  Column<std::int64_t> string_ends;

  Column<std::int64_t> entry_fqn;
  Column<std::uint8_t> entry_kind;  // 0: a tensor, 1: bytes
  Column<std::int64_t> tensor_dtype;
  Column<std::int64_t> tensor_layout;
  Column<std::uint8_t> tensor_flags;  // 1: requires_grad, 2: pin_memory
  Column<std::uint8_t> tensor_memory_format;
  Column<std::int64_t> tensor_ndim;
  Column<std::int64_t> tensor_chunk_count;
  Column<std::int64_t> tensor_sizes;   // flat
  Column<std::int64_t> chunk_offsets;  // flat
  Column<std::int64_t> chunk_sizes;    // flat

  Column<std::int64_t> storage_fqn;
  Column<std::int64_t> storage_ndim;  // -1: the index has no offset
  Column<std::int64_t> storage_hint;  // -1: none
  Column<std::int64_t> storage_path;
  Column<std::int64_t> storage_descriptors;  // -1: none
  Column<std::int64_t> storage_offsets;      // flat
  Column<std::int64_t> storage_offset;
  Column<std::int64_t> storage_bytes;

  bool has_planner = false;  // else planner_data is None
  Column<std::int64_t> planner_fqn;
  Column<std::int64_t> planner_len;
  Column<std::uint8_t> planner_tag;  // 0: the number of a string, 1: an int
  Column<std::int64_t> planner_value;
};

struct StockStorageMeta {
  std::optional<std::string> checkpoint_id;
  std::optional<std::string> save_id;
  std::vector<std::string> modules;
};

// What a Metadata says beside its columns.
struct MetadataRest {
  std::vector<std::vector<std::string>> descriptors;  // what storage_descriptors counts
  std::optional<StockStorageMeta> storage_meta;
  std::optional<std::string> version;
};

// Throws Error(kPlan) for columns that contradict each other.
std::vector<std::byte> pickle_metadata(const MetadataColumns& columns, const MetadataRest& rest);

}  // namespace dcpx
