// The footer of a data file: index, block checksums, tail (docs/reference/format.md).
//
// With it a reader needs neither zip nor pickle, verifies just the blocks it reads, and can check
// a file by itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dcpx {

inline constexpr std::uint64_t kBlockBytes = 64 << 10;  // one CRC-32 covers this much of a file
inline constexpr std::uint64_t kPageEntries = 1024;     // block CRCs that one page check covers
inline constexpr std::uint64_t kFileAlignment = 4096;   // file sizes and footers start on it
inline constexpr std::uint64_t kTailBytes = 128;
inline constexpr std::uint32_t kFooterVersion = 1;

using FileId = std::array<std::byte, 16>;
using SaveId = std::array<std::byte, 16>;  // zeros: none, as in files of before there was one

enum class ItemKind : std::uint8_t {
  kTensor = 0,       // a torch.save zip of a plain strided tensor; the payload is its storage
  kBytes = 1,        // what the planner gave; the payload is the whole item
  kTorchTensor = 2,  // a tensor in torch's own serialisation, which only torch reads
};

inline constexpr std::uint8_t kRequiresGrad = 1;  // bits of IndexRow::flags
inline constexpr std::uint8_t kPinMemory = 2;

// One item of a data file. Sizes, offsets and strides in elements, the rest in bytes.
struct IndexRow {
  ItemKind kind = ItemKind::kTensor;
  std::uint8_t flags = 0;
  std::uint8_t memory_format = 0;  // 0 contiguous, 1 channels_last, 2 preserve
  std::uint64_t item_offset = 0;
  std::uint64_t item_bytes = 0;
  std::uint64_t payload_offset = 0;  // from the start of the file
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;
  std::vector<std::int64_t> global_sizes;  // these four: one length each, [D]
  std::vector<std::int64_t> offsets;       // of the chunk in the global tensor
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;  // of the stored payload
  std::string dtype;                  // of the stored payload, "float32"
  std::string prop_dtype;             // what the metadata says
  std::string layout;                 // "strided"
  std::string fqn;
  std::string path;  // JSON list of str | int from flattening, or empty
};

// Bytes of the row's binary form. Throws Error(kPlan) when a length does not fit.
std::uint64_t row_bytes(const IndexRow& row);
// Appends the row in its binary form. Throws Error(kPlan) as row_bytes does.
void append_row(const IndexRow& row, std::vector<std::byte>& out);

// Reads `item_count` rows of an index. `path` is for messages. Throws Error(kCorruption) when a row
// leaves the index, lengths disagree, or a range leaves [0, data_bytes).
std::vector<IndexRow> parse_index(const std::byte* index, std::uint64_t index_bytes,
                                  std::uint64_t item_count, std::uint64_t data_bytes,
                                  const std::string& path);

struct Tail {
  std::uint32_t rank = 0;
  FileId file_id{};
  SaveId save_id{};
  std::uint64_t file_bytes = 0;
  std::uint64_t data_bytes = 0;
  std::uint64_t index_offset = 0;
  std::uint64_t index_bytes = 0;
  std::uint64_t item_count = 0;
  std::uint64_t table_offset = 0;
  std::uint64_t block_count = 0;
  std::uint32_t index_crc = 0;
  std::uint32_t page_checks_crc = 0;
  std::uint32_t tail_crc = 0;  // what the file table calls footer_crc

  std::uint64_t page_count() const noexcept {
    return (block_count + kPageEntries - 1) / kPageEntries;
  }
  std::uint64_t page_checks_offset() const noexcept { return table_offset + 4 * block_count; }
};

// Lays out and encodes the whole footer, from tail.index_offset to the end of the file; fills in
// the tail's fields but rank, both ids and data_bytes, which the caller sets.
// `blocks` holds one CRC per started block of [0, data_bytes). The footer begins with the index, so
// an `index` with room for it all is moved, not copied.
std::vector<std::byte> encode_footer(std::vector<std::byte> index, std::uint64_t item_count,
                                     const std::vector<std::uint32_t>& blocks, Tail& tail);

// Bytes that encode_footer gives for these counts: a file's size is known before it is written.
std::uint64_t footer_bytes(std::uint64_t index_bytes, std::uint64_t block_count);

// Whether `raw`, the last kTailBytes of a file, claims to be a tail of ours.
bool has_tail_magic(const std::byte* raw);

// Throws Error(kCorruption), Error(kUnsupported) for a version that this build does not know.
Tail parse_tail(const std::byte* raw, std::uint64_t file_bytes, const std::string& path);

}  // namespace dcpx
