#include "engine/file_check.h"

#include <algorithm>
#include <cstring>

#include "common/bytes.h"
#include "engine/file_range.h"
#include "format/crc32.h"
#include "format/zip_parse.h"
#include "io/page_cache.h"

namespace dcpx::engine {
namespace {

constexpr std::uint64_t kScanBytes = 64 << 10;

std::vector<std::byte> read_bytes(const io::InputFile& file, std::uint64_t offset,
                                  std::uint64_t nbytes) {
  std::vector<std::byte> raw(static_cast<std::size_t>(nbytes));
  file.read_at(raw.data(), nbytes, offset);
  return raw;
}

void add(std::vector<Finding>& findings, FindingKind kind, const io::InputFile& file,
         std::uint64_t offset, std::uint64_t nbytes, std::string_view what,
         std::string_view expected = {}, std::string_view found = {}) {
  findings.push_back(
      {kind, corruption_error(file.path(), static_cast<std::int64_t>(offset),
                              static_cast<std::int64_t>(nbytes), what, expected, found)});
}

// Padding is less than a page long each time: what lies between parts of a footer.
void check_zeros(const io::InputFile& file, std::uint64_t begin, std::uint64_t end,
                 std::vector<Finding>& findings) {
  while (begin < end) {
    const std::uint64_t nbytes = std::min(end - begin, kScanBytes);
    const std::vector<std::byte> raw = read_bytes(file, begin, nbytes);
    const auto is_set = [](std::byte value) { return value != std::byte{0}; };
    const auto first = std::find_if(raw.begin(), raw.end(), is_set);
    if (first != raw.end()) {
      const auto last = std::find_if(raw.rbegin(), raw.rend(), is_set);
      add(findings, FindingKind::kPadding, file,
          begin + static_cast<std::uint64_t>(first - raw.begin()),
          static_cast<std::uint64_t>(last.base() - first), "padding that nobody reads", "zeros",
          "other bytes");
    }
    begin += nbytes;
  }
}

bool begins_as_zip(const io::InputFile& file, const ForeignItem& item) {
  static constexpr char kLocal[4] = {'P', 'K', 3, 4};
  static constexpr char kEnd[4] = {'P', 'K', 5, 6};
  static constexpr std::uint64_t kEndBytes = 22;
  if (item.nbytes < kEndBytes) return false;
  std::byte raw[4];
  file.read_at(raw, sizeof(raw), item.offset);
  if (std::memcmp(raw, kLocal, sizeof(raw)) == 0) return true;
  file.read_at(raw, sizeof(raw), item.offset + item.nbytes - kEndBytes);
  return std::memcmp(raw, kEnd, sizeof(raw)) == 0;
}

}  // namespace

bool is_hollow_footer(const io::InputFile& file, const Tail& tail) {
  static constexpr std::uint64_t kSmallBytes = 64 << 20;
  const std::uint64_t end = file.size_bytes();
  if (file.is_object()) return false;  // a store has none
  return end - tail.index_offset > kSmallBytes && io::has_hole(file.fd(), tail.index_offset, end);
}

FooterFacts check_footer(io::InputFile& file, std::vector<Finding>& findings) {
  FooterFacts facts;
  const std::uint64_t size = file.size_bytes();
  if (size < kTailBytes) {
    add(findings, FindingKind::kTail, file, 0, size, "no room for a footer");
    return facts;
  }
  const std::vector<std::byte> raw = read_bytes(file, size - kTailBytes, kTailBytes);
  try {
    facts.tail = parse_tail(raw.data(), size, file.path());
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorruption) throw;
    findings.push_back({FindingKind::kTail, error});
    return facts;
  }
  const Tail& tail = facts.tail;
  if (is_hollow_footer(file, tail)) {
    add(findings, FindingKind::kTail, file, tail.index_offset, size - tail.index_offset,
        kHollowFooter);
    return facts;
  }
  facts.has_tail = true;
  file.keep(tail.data_bytes, size - tail.data_bytes);
  check_zeros(file, tail.data_bytes, tail.index_offset, findings);
  check_zeros(file, tail.index_offset + tail.index_bytes, tail.table_offset, findings);
  check_zeros(file, tail.page_checks_offset() + 4 * tail.page_count(), size - kTailBytes, findings);
  const std::vector<std::byte> index = read_bytes(file, tail.index_offset, tail.index_bytes);
  const std::uint32_t crc = crc32(0, index.data(), index.size());
  if (crc != tail.index_crc) {
    add(findings, FindingKind::kIndex, file, tail.index_offset, tail.index_bytes, "index checksum",
        std::to_string(tail.index_crc), std::to_string(crc));
    return facts;
  }
  try {
    facts.rows =
        parse_index(index.data(), index.size(), tail.item_count, tail.data_bytes, file.path());
    facts.has_rows = true;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kCorruption) throw;
    add(findings, FindingKind::kIndex, file, tail.index_offset, tail.index_bytes,
        std::string("an index with the right checksum and wrong rows: ") + error.what());
  }
  return facts;
}

BlockSums read_block_sums(io::InputFile& file, const Tail& tail, std::vector<Finding>& findings) {
  BlockSums sums;
  const std::uint64_t checks_end = tail.page_checks_offset() + 4 * tail.page_count();
  file.keep(tail.table_offset, checks_end - tail.table_offset);
  sums.is_known.assign(static_cast<std::size_t>(tail.page_count()), false);
  const std::vector<std::byte> table = read_bytes(file, tail.table_offset, 4 * tail.block_count);
  const std::vector<std::byte> checks =
      read_bytes(file, tail.page_checks_offset(), 4 * tail.page_count());
  const std::uint32_t checks_crc = crc32(0, checks.data(), checks.size());
  // Where these are damaged each page is still compared with its own: what agrees by 32 bits is
  // right.
  if (checks_crc != tail.page_checks_crc) {
    add(findings, FindingKind::kTable, file, tail.page_checks_offset(), checks.size(),
        "checksum of the page checks", std::to_string(tail.page_checks_crc),
        std::to_string(checks_crc));
  }
  for (std::uint64_t page = 0; page < tail.page_count(); ++page) {
    const std::uint64_t at = 4 * page * kPageEntries;
    const std::uint64_t nbytes = std::min<std::uint64_t>(4 * kPageEntries, table.size() - at);
    const std::uint32_t crc = crc32(0, table.data() + at, static_cast<std::size_t>(nbytes));
    const auto expected = get<std::uint32_t>(checks.data() + 4 * page);
    sums.is_known[static_cast<std::size_t>(page)] = crc == expected;
    if (crc == expected || checks_crc != tail.page_checks_crc) continue;
    add(findings, FindingKind::kTable, file, tail.table_offset + at, nbytes,
        "checksum of the block table", std::to_string(expected), std::to_string(crc));
  }
  sums.crcs.resize(static_cast<std::size_t>(tail.block_count));
  for (std::size_t b = 0; b < sums.crcs.size(); ++b)
    sums.crcs[b] = get<std::uint32_t>(table.data() + 4 * b);
  return sums;
}

std::vector<SummedRange> check_items(io::InputFile& file, const std::vector<ForeignItem>& items,
                                     std::vector<Finding>& findings) {
  std::vector<SummedRange> ranges;
  for (const ForeignItem& item : items) {
    if (item.offset > file.size_bytes() || item.nbytes > file.size_bytes() - item.offset) {
      add(findings, FindingKind::kItem, file, item.offset, item.nbytes,
          "the metadata names bytes behind the end of the file: truncated?", {},
          std::to_string(file.size_bytes()) + " B");
      continue;
    }
    const auto unchecked = [&](std::uint64_t offset, std::uint64_t nbytes, const char* why) {
      add(findings, FindingKind::kUnchecked, file, offset, nbytes, why);
    };
    keep_zip_ends(file, item.offset, item.nbytes);
    if (!item.is_tensor && !begins_as_zip(file, item)) {
      unchecked(item.offset, item.nbytes, "bytes without any checksum");
      continue;
    }
    FileRange reader(file, item.offset);
    std::vector<ZipRecord> records;
    try {
      ParsedTensor parsed;  // the contents of data.pkl against the record of the payload
      if (item.is_tensor) parse_zip_item(reader, item.nbytes, &parsed);
      if (!item.is_tensor || begins_as_zip(file, item)) {
        records = list_zip_records(reader, item.nbytes);
      }
    } catch (const Error& error) {
      if (error.code() != ErrorCode::kCorruption) throw;
      findings.push_back({FindingKind::kItem, error});
      continue;
    }
    // torch.serialization.set_crc32_options(False) writes 0 for every CRC.
    const bool has_crcs = std::any_of(records.begin(), records.end(),
                                      [](const ZipRecord& record) { return record.crc != 0; });
    if (!has_crcs) {
      unchecked(item.offset, item.nbytes, "an item without any checksum");
      continue;
    }
    for (const ZipRecord& record : records) {
      const std::uint64_t begin = item.offset + record.offset;
      if (record.method != 0) {
        unchecked(begin, record.nbytes, "a compressed record, whose checksum is of other bytes");
      } else if (record.nbytes > 0) {
        ranges.push_back({begin, record.nbytes, record.crc});
      }
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const SummedRange& a, const SummedRange& b) { return a.offset < b.offset; });
  return ranges;
}

}  // namespace dcpx::engine
