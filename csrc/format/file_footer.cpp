#include "format/file_footer.h"

#include <cstring>
#include <limits>

#include "common/bytes.h"
#include "format/crc32.h"

namespace dcpx {
namespace {

constexpr char kMagic[8] = {'D', 'C', 'P', 'X', 'D', 'A', 'T', 'A'};
constexpr std::uint64_t kRowFixedBytes = 64;

void pad_to(std::vector<std::byte>& out, std::uint64_t nbytes) {
  out.resize(static_cast<std::size_t>(nbytes), std::byte{0});
}

template <typename T>
void put_at(std::byte* raw, std::size_t at, T value) {
  std::memcpy(raw + at, &value, sizeof(T));
}

template <typename Narrow>
void check_narrow(std::uint64_t value, const char* what) {
  DCPX_CHECK(value <= std::numeric_limits<Narrow>::max(),
             std::string(what) + " of " + std::to_string(value) + " B is too long for the index");
}

}  // namespace

std::uint64_t row_bytes(const IndexRow& row) {
  const std::size_t ndim = row.sizes.size();
  DCPX_CHECK(ndim <= 255 && row.global_sizes.size() == ndim && row.offsets.size() == ndim &&
                 row.strides.size() == ndim,
             "sizes, offsets and strides of '" + row.fqn + "' differ in length");
  check_narrow<std::uint16_t>(row.dtype.size(), "dtype");
  check_narrow<std::uint16_t>(row.prop_dtype.size(), "dtype");
  check_narrow<std::uint16_t>(row.layout.size(), "layout");
  check_narrow<std::uint32_t>(row.fqn.size(), "fqn");
  check_narrow<std::uint32_t>(row.path.size(), "path");
  const std::uint64_t nbytes =
      align_up(kRowFixedBytes + 32 * ndim + row.dtype.size() + row.prop_dtype.size() +
                   row.layout.size() + row.fqn.size() + row.path.size(),
               8);
  check_narrow<std::uint32_t>(nbytes, "row");
  return nbytes;
}

void append_row(const IndexRow& row, std::vector<std::byte>& out) {
  const std::uint64_t nbytes = row_bytes(row);
  const std::size_t begin = out.size();
  out.resize(begin + static_cast<std::size_t>(nbytes), std::byte{0});
  std::byte* raw = out.data() + begin;
  put_at(raw, 0, static_cast<std::uint32_t>(nbytes));
  put_at(raw, 4, static_cast<std::uint8_t>(row.kind));
  put_at(raw, 5, row.flags);
  put_at(raw, 6, row.memory_format);
  put_at(raw, 7, static_cast<std::uint8_t>(row.sizes.size()));
  put_at(raw, 8, row.item_offset);
  put_at(raw, 16, row.item_bytes);
  put_at(raw, 24, row.payload_offset);
  put_at(raw, 32, row.payload_bytes);
  put_at(raw, 40, row.payload_crc);
  put_at(raw, 44, static_cast<std::uint16_t>(row.dtype.size()));
  put_at(raw, 46, static_cast<std::uint16_t>(row.prop_dtype.size()));
  put_at(raw, 48, static_cast<std::uint16_t>(row.layout.size()));
  put_at(raw, 52, static_cast<std::uint32_t>(row.fqn.size()));
  put_at(raw, 56, static_cast<std::uint32_t>(row.path.size()));
  std::byte* to = raw + kRowFixedBytes;
  for (const std::vector<std::int64_t>* dims :
       {&row.global_sizes, &row.offsets, &row.sizes, &row.strides}) {
    for (const std::int64_t value : *dims) {
      put_at(to, 0, value);
      to += sizeof(value);
    }
  }
  for (const std::string* text : {&row.dtype, &row.prop_dtype, &row.layout, &row.fqn, &row.path}) {
    std::memcpy(to, text->data(), text->size());
    to += text->size();
  }
}

std::vector<IndexRow> parse_index(const std::byte* index, std::uint64_t index_bytes,
                                  std::uint64_t item_count, std::uint64_t data_bytes,
                                  const std::string& path) {
  const auto corrupt = [&](std::uint64_t at, const char* what) {
    return corruption_error(path, static_cast<std::int64_t>(at), 4,
                            std::string("index row ") + what);
  };
  if (item_count > index_bytes / kRowFixedBytes) throw corrupt(0, "count exceeds the index");
  std::vector<IndexRow> rows;
  rows.reserve(static_cast<std::size_t>(item_count));
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < item_count; ++i) {
    if (index_bytes - at < kRowFixedBytes) throw corrupt(at, "leaves the index");
    const std::byte* raw = index + at;
    const std::uint64_t row_bytes = get<std::uint32_t>(raw);
    const std::uint64_t ndim = get<std::uint8_t>(raw + 7);
    const std::uint64_t lengths[5] = {get<std::uint16_t>(raw + 44), get<std::uint16_t>(raw + 46),
                                      get<std::uint16_t>(raw + 48), get<std::uint32_t>(raw + 52),
                                      get<std::uint32_t>(raw + 56)};
    std::uint64_t needed = kRowFixedBytes + 32 * ndim;  // four i64 a dimension
    for (const std::uint64_t length : lengths) needed += length;
    if (row_bytes > index_bytes - at || row_bytes % 8 != 0 || needed > row_bytes) {
      throw corrupt(at, "has a wrong length");
    }
    IndexRow row;
    const auto kind = get<std::uint8_t>(raw + 4);
    if (kind > 2) throw corrupt(at, "has an unknown kind");
    row.kind = static_cast<ItemKind>(kind);
    row.flags = get<std::uint8_t>(raw + 5);
    row.memory_format = get<std::uint8_t>(raw + 6);
    row.item_offset = get<std::uint64_t>(raw + 8);
    row.item_bytes = get<std::uint64_t>(raw + 16);
    row.payload_offset = get<std::uint64_t>(raw + 24);
    row.payload_bytes = get<std::uint64_t>(raw + 32);
    row.payload_crc = get<std::uint32_t>(raw + 40);
    if (row.item_offset > data_bytes || row.item_bytes > data_bytes - row.item_offset ||
        row.payload_offset < row.item_offset ||
        row.payload_offset - row.item_offset > row.item_bytes ||
        row.payload_bytes > row.item_bytes - (row.payload_offset - row.item_offset)) {
      throw corrupt(at, "names bytes outside of the data");
    }
    const std::byte* from = raw + kRowFixedBytes;
    for (std::vector<std::int64_t>* dims :
         {&row.global_sizes, &row.offsets, &row.sizes, &row.strides}) {
      for (std::uint64_t d = 0; d < ndim; ++d, from += 8) {
        dims->push_back(get<std::int64_t>(from));
        if (dims->back() < 0) throw corrupt(at, "has a negative size, offset or stride");
      }
    }
    std::string* const texts[5] = {&row.dtype, &row.prop_dtype, &row.layout, &row.fqn, &row.path};
    for (int t = 0; t < 5; ++t) {
      texts[t]->assign(reinterpret_cast<const char*>(from), static_cast<std::size_t>(lengths[t]));
      from += lengths[t];
    }
    rows.push_back(std::move(row));
    at += row_bytes;
  }
  if (at != index_bytes) throw corrupt(at, "count does not fill the index");
  return rows;
}

std::uint64_t footer_bytes(std::uint64_t index_bytes, std::uint64_t block_count) {
  const std::uint64_t pages = (block_count + kPageEntries - 1) / kPageEntries;
  return align_up(align_up(index_bytes, 64) + 4 * block_count + 4 * pages + kTailBytes,
                  kFileAlignment);
}

std::vector<std::byte> encode_footer(std::vector<std::byte> index, std::uint64_t item_count,
                                     const std::vector<std::uint32_t>& blocks, Tail& tail) {
  DCPX_CHECK(blocks.size() == (tail.data_bytes + kBlockBytes - 1) / kBlockBytes,
             "one checksum per block of the data");
  tail.index_offset = align_up(tail.data_bytes, kFileAlignment);
  tail.index_bytes = index.size();
  tail.item_count = item_count;
  tail.table_offset = tail.index_offset + align_up(tail.index_bytes, 64);
  tail.block_count = blocks.size();
  tail.file_bytes = tail.index_offset + footer_bytes(tail.index_bytes, tail.block_count);

  tail.index_crc = crc32(0, index.data(), index.size());
  std::vector<std::byte> out(std::move(index));
  pad_to(out, tail.table_offset - tail.index_offset);
  for (const std::uint32_t crc : blocks) put(out, crc);
  const std::byte* table = out.data() + (tail.table_offset - tail.index_offset);
  std::vector<std::byte> checks;
  for (std::uint64_t page = 0; page < tail.page_count(); ++page) {
    const std::uint64_t first = page * kPageEntries;
    const std::uint64_t entries = std::min(kPageEntries, tail.block_count - first);
    put(checks, crc32(0, table + 4 * first, static_cast<std::size_t>(4 * entries)));
  }
  out.insert(out.end(), checks.begin(), checks.end());
  tail.page_checks_crc = crc32(0, checks.data(), checks.size());
  pad_to(out, tail.file_bytes - tail.index_offset);

  std::byte* raw = out.data() + out.size() - kTailBytes;
  std::memcpy(raw, kMagic, sizeof(kMagic));
  put_at(raw, 8, kFooterVersion);
  put_at(raw, 12, tail.rank);
  std::memcpy(raw + 16, tail.file_id.data(), tail.file_id.size());
  put_at(raw, 32, tail.file_bytes);
  put_at(raw, 40, tail.data_bytes);
  put_at(raw, 48, tail.index_offset);
  put_at(raw, 56, tail.index_bytes);
  put_at(raw, 64, tail.item_count);
  put_at(raw, 72, tail.table_offset);
  put_at(raw, 80, tail.block_count);
  put_at(raw, 88, static_cast<std::uint32_t>(kBlockBytes));
  put_at(raw, 92, tail.index_crc);
  put_at(raw, 96, tail.page_checks_crc);
  std::memcpy(raw + 100, tail.save_id.data(), tail.save_id.size());
  tail.tail_crc = crc32(0, raw, kTailBytes - 4);
  put_at(raw, kTailBytes - 4, tail.tail_crc);
  return out;
}

bool has_tail_magic(const std::byte* raw) { return std::memcmp(raw, kMagic, sizeof(kMagic)) == 0; }

Tail parse_tail(const std::byte* raw, std::uint64_t file_bytes, const std::string& path) {
  const auto corrupt = [&](const std::string& what, const std::string& expected,
                           const std::string& found) {
    return corruption_error(path, static_cast<std::int64_t>(file_bytes - kTailBytes),
                            static_cast<std::int64_t>(kTailBytes), "footer " + what, expected,
                            found);
  };
  if (!has_tail_magic(raw)) throw corrupt("is missing", "DCPXDATA", "other bytes");
  Tail tail;
  tail.tail_crc = get<std::uint32_t>(raw + kTailBytes - 4);
  const std::uint32_t found_crc = crc32(0, raw, kTailBytes - 4);
  if (found_crc != tail.tail_crc) {
    throw corrupt("checksum", std::to_string(tail.tail_crc), std::to_string(found_crc));
  }
  const auto version = get<std::uint32_t>(raw + 8);
  if (version != kFooterVersion) {
    Error error(ErrorCode::kUnsupported,
                "'" + path + "' has footer version " + std::to_string(version) +
                    "; this build reads version " + std::to_string(kFooterVersion));
    error.path = path;
    throw error;
  }
  tail.rank = get<std::uint32_t>(raw + 12);
  std::memcpy(tail.file_id.data(), raw + 16, tail.file_id.size());
  tail.file_bytes = get<std::uint64_t>(raw + 32);
  tail.data_bytes = get<std::uint64_t>(raw + 40);
  tail.index_offset = get<std::uint64_t>(raw + 48);
  tail.index_bytes = get<std::uint64_t>(raw + 56);
  tail.item_count = get<std::uint64_t>(raw + 64);
  tail.table_offset = get<std::uint64_t>(raw + 72);
  tail.block_count = get<std::uint64_t>(raw + 80);
  tail.index_crc = get<std::uint32_t>(raw + 92);
  tail.page_checks_crc = get<std::uint32_t>(raw + 96);
  std::memcpy(tail.save_id.data(), raw + 100, tail.save_id.size());
  if (tail.file_bytes != file_bytes) {
    throw corrupt("size", std::to_string(tail.file_bytes), std::to_string(file_bytes));
  }
  // Every later read is sized by these: each must follow from the others before it is used.
  if (get<std::uint32_t>(raw + 88) != kBlockBytes || tail.data_bytes > file_bytes ||
      tail.index_offset != align_up(tail.data_bytes, kFileAlignment) ||
      tail.index_bytes > file_bytes ||
      tail.block_count != (tail.data_bytes + kBlockBytes - 1) / kBlockBytes ||
      tail.table_offset != tail.index_offset + align_up(tail.index_bytes, 64) ||
      tail.file_bytes != tail.index_offset + footer_bytes(tail.index_bytes, tail.block_count)) {
    throw corrupt("offsets", "a consistent layout", "another");
  }
  return tail;
}

}  // namespace dcpx
