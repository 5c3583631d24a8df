#include <string>
#include <vector>

#include "check.h"
#include "format/metadata_pickle.h"
#include "format/pickle_scan.h"

namespace {

using dcpx::Column;
using dcpx::ErrorCode;

// Owns what MetadataColumns views; each column a heap block of its own, so that ASan sees a read
// beyond its end.
struct Sample {
  std::string text = "float32stridedwa/bfile";
  std::vector<std::int64_t> ends{7, 14, 15, 18, 22};  // float32, strided, w, a/b, file
  std::vector<std::vector<std::int64_t>> i64 = {
      {2, 3},        // entry_fqn
      {0},           // tensor_dtype
      {1},           // tensor_layout
      {2},           // tensor_ndim
      {2},           // tensor_chunk_count
      {4, 3},        // tensor_sizes
      {0, 0, 2, 0},  // chunk_offsets
      {2, 3, 2, 3},  // chunk_sizes
      {2, 2, 3},     // storage_fqn
      {2, 2, -1},    // storage_ndim
      {0, 1, -1},    // storage_hint
      {4, 4, 4},     // storage_path
      {-1, -1, 0},   // storage_descriptors
      {0, 0, 2, 0},  // storage_offsets
      {0, 64, 1 << 20},
      {1, 65536, INT64_MAX},
      {2, 3},                           // planner_fqn
      {1, 4},                           // planner_len
      {2, 3, INT64_MIN, -129, 1 << 30}  // planner_value
  };
  std::vector<std::vector<std::uint8_t>> u8 = {{0, 1}, {3}, {2}, {0, 0, 1, 1, 1}};
  dcpx::MetadataRest rest{{{"zstd", "w"}}, dcpx::StockStorageMeta{"id", {}, {"w", "m"}}, "1.0.0"};

  std::vector<std::byte> pickle() const {
    dcpx::MetadataColumns c;
    c.strings = {text.data(), text.size()};
    c.string_ends = {ends.data(), ends.size()};
    c.has_planner = true;
    Column<std::int64_t>* columns[] = {
        &c.entry_fqn,           &c.tensor_dtype,    &c.tensor_layout,  &c.tensor_ndim,
        &c.tensor_chunk_count,  &c.tensor_sizes,    &c.chunk_offsets,  &c.chunk_sizes,
        &c.storage_fqn,         &c.storage_ndim,    &c.storage_hint,   &c.storage_path,
        &c.storage_descriptors, &c.storage_offsets, &c.storage_offset, &c.storage_bytes,
        &c.planner_fqn,         &c.planner_len,     &c.planner_value};
    for (std::size_t at = 0; at < i64.size(); ++at) *columns[at] = {i64[at].data(), i64[at].size()};
    Column<std::uint8_t>* bytes[] = {&c.entry_kind, &c.tensor_flags, &c.tensor_memory_format,
                                     &c.planner_tag};
    for (std::size_t at = 0; at < u8.size(); ++at) *bytes[at] = {u8[at].data(), u8[at].size()};
    return dcpx::pickle_metadata(c, rest);
  }
};

TEST(metadata_pickle_of_every_damaged_column_throws_or_is_whole) {
  const auto check_whole = [](const Sample& sample) {
    try {
      const std::vector<std::byte> pickle = sample.pickle();
      CHECK_EQ(dcpx::scan_pickle(pickle.data(), pickle.size(), {}).stop_bytes, pickle.size());
    } catch (const dcpx::Error& error) {
      CHECK(error.code() == ErrorCode::kPlan);
    }
  };
  const Sample whole;
  for (std::size_t column = 0; column < whole.i64.size(); ++column) {
    for (std::size_t count = 0; count < whole.i64[column].size(); ++count) {
      Sample sample;
      sample.i64[column].assign(whole.i64[column].begin(),
                                whole.i64[column].begin() + static_cast<std::ptrdiff_t>(count));
      check_whole(sample);
    }
  }
  for (std::size_t column = 0; column < whole.u8.size(); ++column) {
    Sample sample;
    sample.u8[column].clear();
    sample.u8[column].shrink_to_fit();
    CHECK_THROWS(sample.pickle(), ErrorCode::kPlan);
  }
  // One value changed, also to what no column of ours holds.
  for (std::size_t column = 0; column < whole.i64.size(); ++column) {
    for (std::size_t at = 0; at < whole.i64[column].size(); ++at) {
      for (const std::int64_t value : {INT64_MIN, std::int64_t{-2}, std::int64_t{-1},
                                       std::int64_t{0}, std::int64_t{5}, INT64_MAX}) {
        Sample sample;
        sample.i64[column][at] = value;
        check_whole(sample);
      }
    }
  }
}

TEST(metadata_pickle_of_a_pool_whose_ends_do_not_ascend_throws) {
  for (const std::vector<std::int64_t>& ends :
       {std::vector<std::int64_t>{7, 6, 15, 18, 22}, {-1, 14, 15, 18, 22}, {7, 14, 15, 18, 23}}) {
    Sample sample;
    sample.ends = ends;
    CHECK_THROWS(sample.pickle(), ErrorCode::kPlan);
  }
}

}  // namespace
