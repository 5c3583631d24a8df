#include "check.h"
#include "common/bytes.h"
#include "footer_invariants.h"
#include "random_source.h"

namespace {

using dcpx::crc32;
using dcpx::ErrorCode;
using dcpx::IndexRow;
using dcpx::ItemKind;
using dcpx::kTailBytes;
using dcpx::Tail;

constexpr std::uint64_t kDataBytes = 200'000;
const std::uint64_t kHostile[] = {0,
                                  1,
                                  63,
                                  64,
                                  65536,
                                  0x7fffffff,
                                  1UL << 32,
                                  1UL << 40,
                                  1UL << 62,
                                  INT64_MAX,
                                  1UL << 63,
                                  UINT64_MAX - 4095,
                                  UINT64_MAX - 1,
                                  UINT64_MAX};

IndexRow random_row(RandomSource& random) {
  IndexRow row;
  row.kind = static_cast<ItemKind>(random.below(3));
  row.flags = static_cast<std::uint8_t>(random.below(4));
  row.memory_format = static_cast<std::uint8_t>(random.below(3));
  row.item_offset = random.below(kDataBytes);
  row.item_bytes = random.below(kDataBytes - row.item_offset + 1);
  row.payload_offset = row.item_offset + random.below(row.item_bytes + 1);
  row.payload_bytes = random.below(row.item_offset + row.item_bytes - row.payload_offset + 1);
  row.payload_crc = static_cast<std::uint32_t>(random.below(UINT32_MAX));
  const std::uint64_t dims = random.pick<std::uint64_t>({0, 1, 2, 5, 255});
  for (auto* values : {&row.global_sizes, &row.offsets, &row.sizes, &row.strides}) {
    for (std::uint64_t d = 0; d < dims; ++d) {
      values->push_back(static_cast<std::int64_t>(random.below(INT64_MAX)));
    }
  }
  for (std::string* text : {&row.dtype, &row.prop_dtype, &row.layout, &row.fqn, &row.path}) {
    text->assign(random.below(40), static_cast<char>('a' + random.below(26)));
  }
  return row;
}

bool is_same(const IndexRow& a, const IndexRow& b) {
  return a.kind == b.kind && a.flags == b.flags && a.memory_format == b.memory_format &&
         a.item_offset == b.item_offset && a.item_bytes == b.item_bytes &&
         a.payload_offset == b.payload_offset && a.payload_bytes == b.payload_bytes &&
         a.payload_crc == b.payload_crc && a.global_sizes == b.global_sizes &&
         a.offsets == b.offsets && a.sizes == b.sizes && a.strides == b.strides &&
         a.dtype == b.dtype && a.prop_dtype == b.prop_dtype && a.layout == b.layout &&
         a.fqn == b.fqn && a.path == b.path;
}

struct Sample {
  std::vector<IndexRow> rows;
  std::vector<std::byte> index;
  std::vector<std::byte> footer;
  std::vector<std::uint32_t> blocks;
  Tail tail;

  std::byte* raw_tail() { return footer.data() + footer.size() - kTailBytes; }
};

Sample random_sample(RandomSource& random, std::uint64_t data_bytes = kDataBytes) {
  Sample sample;
  for (std::uint64_t rows = random.below(6); rows > 0; --rows) {
    sample.rows.push_back(random_row(random));
    append_row(sample.rows.back(), sample.index);
  }
  for (std::uint64_t at = 0; at < data_bytes; at += dcpx::kBlockBytes) {
    sample.blocks.push_back(static_cast<std::uint32_t>(random.below(UINT32_MAX)));
  }
  sample.tail.rank = 3;
  sample.tail.file_id[5] = std::byte{9};
  for (std::byte& part : sample.tail.save_id) part = static_cast<std::byte>(random.below(256));
  sample.tail.data_bytes = data_bytes;
  sample.footer = dcpx::encode_footer(sample.index, sample.rows.size(), sample.blocks, sample.tail);
  return sample;
}

// 0: an error, as it must be. 1: parsed to exactly what was written. 2: parsed to something else.
int outcome(Sample& sample, const std::vector<std::byte>& index) {
  try {
    const auto rows =
        dcpx::parse_index(index.data(), index.size(), sample.rows.size(), kDataBytes, "f");
    for (const IndexRow& row : rows) CHECK(lies_inside(row, kDataBytes));
    return rows.size() == sample.rows.size() &&
                   std::equal(rows.begin(), rows.end(), sample.rows.begin(), is_same)
               ? 1
               : 2;
  } catch (const dcpx::Error& error) {
    CHECK(error.code() == ErrorCode::kCorruption);
    return 0;
  }
}

TEST(footer_of_random_rows_and_any_length_of_data_parses_back) {
  RandomSource random(40);
  for (const std::uint64_t data_bytes : {0UL, 1UL, 4096UL, 65535UL, 65536UL, 65537UL, kDataBytes,
                                         64UL << 20, (64UL << 20) + 1, (200UL << 20) + 77}) {
    Sample sample = random_sample(random, data_bytes);
    const Tail found = dcpx::parse_tail(sample.raw_tail(), sample.tail.file_bytes, "f");
    CHECK(lies_inside(found, sample.tail.file_bytes));
    CHECK_EQ(found.rank, 3U);
    CHECK(found.file_id == sample.tail.file_id);
    CHECK(found.save_id == sample.tail.save_id);
    CHECK_EQ(found.data_bytes, data_bytes);
    CHECK_EQ(found.item_count, sample.rows.size());
    CHECK_EQ(found.tail_crc, sample.tail.tail_crc);
    CHECK_EQ(found.file_bytes, found.index_offset + sample.footer.size());
    CHECK_EQ(found.index_crc, crc32(0, sample.footer.data(), found.index_bytes));
    const std::byte* table = sample.footer.data() + (found.table_offset - found.index_offset);
    for (std::size_t b = 0; b < sample.blocks.size(); ++b) {
      CHECK_EQ(dcpx::get<std::uint32_t>(table + 4 * b), sample.blocks[b]);
    }
    const std::byte* checks = table + 4 * sample.blocks.size();
    CHECK_EQ(crc32(0, checks, 4 * found.page_count()), found.page_checks_crc);
    for (std::uint64_t page = 0; page < found.page_count(); ++page) {
      const std::uint64_t entries =
          std::min<std::uint64_t>(dcpx::kPageEntries, found.block_count - 1024 * page);
      CHECK_EQ(dcpx::get<std::uint32_t>(checks + 4 * page),
               crc32(0, table + 4096 * page, 4 * entries));
    }
  }
}

TEST(index_of_random_rows_parses_back) {
  RandomSource random(41);
  for (int round = 0; round < 300; ++round) {
    Sample sample = random_sample(random);
    CHECK_EQ(outcome(sample, sample.index), 1);
  }
}

TEST(every_flipped_byte_of_a_tail_is_an_error) {
  RandomSource random(42);
  Sample sample = random_sample(random);
  for (std::size_t at = 0; at < kTailBytes; ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      sample.raw_tail()[at] ^= std::byte{1} << bit;
      CHECK_THROWS(dcpx::parse_tail(sample.raw_tail(), sample.tail.file_bytes, "f"),
                   ErrorCode::kCorruption);
      sample.raw_tail()[at] ^= std::byte{1} << bit;
    }
  }
  for (const std::uint64_t file_bytes : kHostile) {
    if (file_bytes == sample.tail.file_bytes) continue;
    CHECK_THROWS(dcpx::parse_tail(sample.raw_tail(), file_bytes, "f"), ErrorCode::kCorruption);
  }
}

TEST(footer_of_an_older_version_names_no_save_and_what_is_reserved_says_nothing) {
  RandomSource random(47);
  Sample sample = random_sample(random);
  std::memset(sample.raw_tail() + 116, 0xff, 8);
  seal_tail(sample.raw_tail());
  CHECK(dcpx::parse_tail(sample.raw_tail(), sample.tail.file_bytes, "f").save_id ==
        sample.tail.save_id);
  std::memset(sample.raw_tail() + 100, 0, 24);
  seal_tail(sample.raw_tail());
  CHECK(dcpx::parse_tail(sample.raw_tail(), sample.tail.file_bytes, "f").save_id == dcpx::SaveId{});
}

TEST(hostile_tail_with_a_right_checksum_is_an_error) {
  RandomSource random(43);
  const Sample original = random_sample(random);
  // Offsets of the fields that size later reads; 64 is item_count, which parse_index checks.
  for (const std::size_t field : {32U, 40U, 48U, 56U, 72U, 80U}) {
    for (const std::uint64_t value : kHostile) {
      Sample sample = original;
      if (dcpx::get<std::uint64_t>(sample.raw_tail() + field) == value) continue;
      std::memcpy(sample.raw_tail() + field, &value, 8);
      seal_tail(sample.raw_tail());
      CHECK_THROWS(dcpx::parse_tail(sample.raw_tail(), sample.tail.file_bytes, "f"),
                   ErrorCode::kCorruption);
      // Nor does it help to claim the file's size to match.
      if (field != 32) continue;
      CHECK_THROWS(dcpx::parse_tail(sample.raw_tail(), value, "f"), ErrorCode::kCorruption);
    }
  }
  Sample sample = original;
  // Lengths that agree with each other once their sums have wrapped around.
  for (const std::size_t field : {40U, 56U}) {  // data_bytes, index_bytes
    std::uint64_t fields[7] = {};               // of the tail, from file_bytes on
    fields[(field - 32) / 8] = UINT64_MAX;
    fields[0] = dcpx::footer_bytes(fields[3], 0);
    fields[5] = dcpx::align_up(fields[3], 64);  // table_offset
    std::memcpy(sample.raw_tail() + 32, fields, sizeof(fields));
    seal_tail(sample.raw_tail());
    CHECK_THROWS(dcpx::parse_tail(sample.raw_tail(), fields[0], "f"), ErrorCode::kCorruption);
  }
  sample = original;
  sample.raw_tail()[8] = std::byte{2};
  seal_tail(sample.raw_tail());
  CHECK_THROWS(dcpx::parse_tail(sample.raw_tail(), sample.tail.file_bytes, "f"),
               ErrorCode::kUnsupported);
}

TEST(truncated_index_or_wrong_count_is_an_error) {
  RandomSource random(46);
  for (int round = 0; round < 5; ++round) {
    Sample sample = random_sample(random);
    for (std::size_t nbytes = 0; nbytes < sample.index.size(); ++nbytes) {
      const std::vector<std::byte> index(
          sample.index.begin(), sample.index.begin() + static_cast<std::ptrdiff_t>(nbytes));
      CHECK_EQ(outcome(sample, index), 0);
    }
    const std::size_t nbytes = sample.index.size();
    for (const std::uint64_t count : kHostile) {
      if (count == sample.rows.size()) continue;
      CHECK_THROWS(dcpx::parse_index(sample.index.data(), nbytes, count, kDataBytes, "f"),
                   ErrorCode::kCorruption);
    }
  }
}

TEST(hostile_index_numbers_are_errors) {
  IndexRow row;
  row.item_bytes = row.payload_bytes = 100;
  row.sizes = row.strides = row.offsets = row.global_sizes = {7};
  std::vector<std::byte> original;
  append_row(row, original);
  // item_offset, item_bytes, payload_offset, payload_bytes, then the four dimensions.
  for (const std::size_t field : {8U, 16U, 24U, 32U, 64U, 72U, 80U, 88U}) {
    for (const std::uint64_t value : kHostile) {
      std::vector<std::byte> index = original;
      std::memcpy(index.data() + field, &value, 8);
      try {
        const auto rows = dcpx::parse_index(index.data(), index.size(), 1, 100, "f");
        CHECK(lies_inside(rows.at(0), 100));
        CHECK(field >= 64 || value <= 100);
      } catch (const dcpx::Error& error) {
        CHECK(error.code() == ErrorCode::kCorruption);
      }
    }
  }
  for (const std::size_t field : {0U, 4U, 7U, 44U, 46U, 48U, 52U, 56U}) {  // lengths and kind
    std::vector<std::byte> index = original;
    index[field] = std::byte{0xff};
    CHECK_THROWS(dcpx::parse_index(index.data(), index.size(), 1, 100, "f"),
                 ErrorCode::kCorruption);
  }
}

TEST(row_that_does_not_fit_the_index_is_refused) {
  std::vector<std::byte> out;
  IndexRow row;
  row.sizes = {1};
  CHECK_THROWS(append_row(row, out), ErrorCode::kPlan);
  row = {};
  row.sizes = row.strides = row.offsets = row.global_sizes = std::vector<std::int64_t>(256, 1);
  CHECK_THROWS(append_row(row, out), ErrorCode::kPlan);
  row = {};
  row.dtype.assign(65536, 'x');
  CHECK_THROWS(append_row(row, out), ErrorCode::kPlan);
}

}  // namespace
