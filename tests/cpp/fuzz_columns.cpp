// Any bytes as the columns of a `.metadata`: the table refuses them with Error(kPlan), or all that
// it says lies inside the columns, and what they say can be pickled for stock's readers.
//
// An input: a byte (bit 0: strides, bit 1: planner_data, the rest: lists of descriptors); twice a
// column and by how many bytes it gets longer or, as int8, shorter, so that one mutation changes
// one length and nothing else; then each column of kNames: two bytes of length, and its bytes.
// corpus/columns is of tests/golden, by `make_columns_corpus.py`.
#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <string_view>
#include <vector>

#include "common/error.h"
#include "format/metadata_pickle.h"
#include "format/pickle_scan.h"
#include "format/stored_table.h"
#include "fuzz.h"

namespace {

constexpr const char* kNames[] = {
    "strings",        "string_ends",        "entry_fqn",           "entry_kind",
    "tensor_dtype",   "tensor_layout",      "tensor_flags",        "tensor_memory_format",
    "tensor_ndim",    "tensor_chunk_count", "tensor_sizes",        "chunk_offsets",
    "chunk_sizes",    "chunk_flags",        "storage_fqn",         "storage_ndim",
    "storage_hint",   "storage_path",       "storage_descriptors", "storage_offsets",
    "storage_offset", "storage_bytes",      "tensor_stride_count", "tensor_strides",
    "planner_fqn",    "planner_len",        "planner_tag",         "planner_value"};

constexpr std::size_t kHeadBytes = 5;

void require(bool is_so) {
  if (!is_so) __builtin_trap();
}

// A column a heap block, so that ASan sees a read behind its end.
class Columns {
 public:
  Columns(const std::uint8_t* data, std::size_t size) {
    for (std::vector<std::byte>& column : columns_) {
      if (size < 2) return;
      const std::size_t nbytes = std::min<std::size_t>(data[0] | data[1] << 8U, size - 2);
      const auto* first = reinterpret_cast<const std::byte*>(data + 2);
      column.assign(first, first + nbytes);
      data += 2 + nbytes;
      size -= 2 + nbytes;
    }
  }

  dcpx::RawColumn raw(std::string_view name) const {
    const auto* found = std::find(std::begin(kNames), std::end(kNames), name);
    require(found != std::end(kNames));
    const auto& column = columns_[static_cast<std::size_t>(found - std::begin(kNames))];
    return {column.data(), column.size()};
  }
  // Makes one of them so many bytes longer, or shorter.
  void resize(std::size_t number, std::int8_t nbytes) {
    std::vector<std::byte>& column = columns_[number % columns_.size()];
    const auto wanted = static_cast<std::ptrdiff_t>(column.size()) + nbytes;
    column.resize(static_cast<std::size_t>(std::max<std::ptrdiff_t>(wanted, 0)));
    column.shrink_to_fit();  // or ASan would not see what is behind its end
  }
  template <typename T>
  void find(std::string_view name, dcpx::Column<T>& column) const {
    const dcpx::RawColumn found = raw(name);
    column = {reinterpret_cast<const T*>(found.begin), found.nbytes / sizeof(T)};
  }

 private:
  std::array<std::vector<std::byte>, std::size(kNames)> columns_;
};

template <typename Run>
bool passes(Run run) {
  try {
    run();
    return true;
  } catch (const dcpx::Error& error) {
    require(error.code() == dcpx::ErrorCode::kPlan);
    return false;
  }
}

// The questions of `metadata/decode.py`, against the same in wider numbers.
void ask(const Columns& columns) {
  const dcpx::RawNumbers counts(columns.raw("tensor_ndim"));
  const dcpx::RawNumbers widths(columns.raw("tensor_chunk_count"));
  __int128 sum = 0;
  for (std::size_t at = 0; at < counts.count(); ++at) sum += std::max<std::int64_t>(counts[at], 0);
  const __int128 limit = dcpx::kTooMany;
  require(dcpx::total(counts, nullptr) == static_cast<std::uint64_t>(std::min(sum, limit)));
  if (widths.count() == counts.count()) dcpx::total(counts, &widths);

  const dcpx::RawNumbers begins(columns.raw("storage_offset"));
  const dcpx::RawNumbers lengths(columns.raw("storage_bytes"));
  if (begins.count() == lengths.count() && dcpx::are_within(begins, 0, INT64_MAX) &&
      dcpx::are_within(lengths, 0, INT64_MAX) && dcpx::have_ends(begins, lengths)) {
    for (std::size_t at = 0; at < begins.count(); ++at) require(begins[at] + lengths[at] >= 0);
  }
  const dcpx::RawColumn tags = columns.raw("planner_tag");
  const dcpx::RawNumbers values(columns.raw("planner_value"));
  if (values.count() == tags.nbytes) {
    dcpx::are_keys(tags, values, 3);
    dcpx::longest_list(tags, values);
  }
  dcpx::highest(columns.raw("tensor_flags"));
}

std::int64_t sum_of(const std::int64_t* values, std::size_t count) {
  std::uint64_t sum = 0;
  for (std::size_t at = 0; at < count; ++at) sum += static_cast<std::uint64_t>(values[at]);
  return static_cast<std::int64_t>(sum);
}

// Reads all that it says.
std::int64_t walk(const dcpx::StoredTable& table, std::size_t strings, std::size_t descriptors) {
  std::int64_t sum = 0;
  for (std::size_t entry = 0; entry < table.tensor_of.size(); ++entry) {
    if (table.tensor_of[entry] < 0) continue;
    const dcpx::StoredTable::Tensor found = table.tensor(static_cast<std::int64_t>(entry));
    sum ^= sum_of(found.sizes, found.ndim) ^ sum_of(found.offsets, found.chunks * found.ndim) ^
           sum_of(found.lengths, found.chunks * found.ndim);
    const auto at = static_cast<std::size_t>(table.tensor_of[entry]);
    sum ^= table.dtype_numbers[at] ^ table.layout_numbers[at] ^ table.flags[at] ^
           table.format_codes[at];
    if (table.stride_counts.values == nullptr || table.stride_counts[at] < 0) continue;
    sum ^= sum_of(table.strides.values + table.begins[at].strides,
                  static_cast<std::size_t>(table.stride_counts[at]));
  }
  for (std::size_t row = 0; row < table.storage_fqn.count; ++row) {
    require(static_cast<std::uint64_t>(table.storage_fqn[row]) < strings);
    require(static_cast<std::uint64_t>(table.paths[row]) < strings);
    require(table.descriptor_numbers[row] < static_cast<std::int64_t>(descriptors));
    sum ^= table.hints[row] ^ table.file_offsets[row] ^ table.lengths[row];
    if (table.storage_ndim[row] < 0) continue;
    sum ^= sum_of(table.storage_offsets.values + table.offset_begins[row],
                  static_cast<std::size_t>(table.storage_ndim[row]));
  }
  return sum;
}

dcpx::MetadataColumns stock_columns(const Columns& columns, bool has_planner) {
  dcpx::MetadataColumns c;
  columns.find("strings", c.strings);
  columns.find("string_ends", c.string_ends);
  columns.find("entry_fqn", c.entry_fqn);
  columns.find("entry_kind", c.entry_kind);
  columns.find("tensor_dtype", c.tensor_dtype);
  columns.find("tensor_layout", c.tensor_layout);
  columns.find("tensor_flags", c.tensor_flags);
  columns.find("tensor_memory_format", c.tensor_memory_format);
  columns.find("tensor_ndim", c.tensor_ndim);
  columns.find("tensor_chunk_count", c.tensor_chunk_count);
  columns.find("tensor_sizes", c.tensor_sizes);
  columns.find("chunk_offsets", c.chunk_offsets);
  columns.find("chunk_sizes", c.chunk_sizes);
  columns.find("storage_fqn", c.storage_fqn);
  columns.find("storage_ndim", c.storage_ndim);
  columns.find("storage_hint", c.storage_hint);
  columns.find("storage_path", c.storage_path);
  columns.find("storage_descriptors", c.storage_descriptors);
  columns.find("storage_offsets", c.storage_offsets);
  columns.find("storage_offset", c.storage_offset);
  columns.find("storage_bytes", c.storage_bytes);
  c.has_planner = has_planner;
  columns.find("planner_fqn", c.planner_fqn);
  columns.find("planner_len", c.planner_len);
  columns.find("planner_tag", c.planner_tag);
  columns.find("planner_value", c.planner_value);
  return c;
}

}  // namespace

FUZZ(columns) {
  if (size < kHeadBytes) return;
  const std::size_t descriptors = data[0] >> 2U;
  const bool has_strides = (data[0] & 1U) != 0;
  const bool has_planner = (data[0] & 2U) != 0;
  Columns columns(data + kHeadBytes, size - kHeadBytes);
  columns.resize(data[1], static_cast<std::int8_t>(data[2]));
  columns.resize(data[3], static_cast<std::int8_t>(data[4]));
  ask(columns);
  const std::size_t strings = columns.raw("string_ends").nbytes / sizeof(std::int64_t);
  const bool is_table = passes([&] {
    const dcpx::StoredTable table([&](const char* name) { return columns.raw(name); }, strings,
                                  descriptors, has_strides);
    const volatile std::int64_t sum = walk(table, strings, descriptors);
    static_cast<void>(sum);
  });
  if (!is_table) return;
  passes([&] {
    dcpx::MetadataRest rest;
    rest.descriptors.resize(descriptors, {"zstd"});
    const std::vector<std::byte> pickle =
        dcpx::pickle_metadata(stock_columns(columns, has_planner), rest);
    const dcpx::RawColumn text = columns.raw("strings");
    const bool is_ascii = dcpx::highest(text) < 0x80;  // else a cut may leave no UTF-8
    if (is_ascii)
      require(dcpx::scan_pickle(pickle.data(), pickle.size(), {}).stop_bytes == pickle.size());
  });
}
