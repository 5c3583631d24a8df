#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "format/stored_table.h"

namespace {

using dcpx::StoredTable;

// Two chunks of a tensor [4, 3], and bytes. Each column a heap block of its own.
struct Sample {
  std::map<std::string, std::vector<std::int64_t>> i64 = {
      {"tensor_ndim", {2}},
      {"tensor_chunk_count", {2}},
      {"tensor_stride_count", {2}},
      {"tensor_sizes", {4, 3}},
      {"chunk_offsets", {0, 0, 2, 0}},
      {"chunk_sizes", {2, 3, 2, 3}},
      {"tensor_strides", {3, 1}},
      {"tensor_dtype", {0}},
      {"tensor_layout", {1}},
      {"storage_fqn", {2, 2, 3}},
      {"storage_ndim", {2, 2, -1}},
      {"storage_offsets", {0, 0, 2, 0}},
      {"storage_hint", {0, 1, -1}},
      {"storage_path", {4, 4, 4}},
      {"storage_offset", {0, 64, 128}},
      {"storage_bytes", {24, 24, 9}},
      {"storage_descriptors", {-1, -1, 0}},
  };
  std::map<std::string, std::vector<std::uint8_t>> u8 = {
      {"entry_kind", {0, 1}},
      {"chunk_flags", {0, 0}},
      {"tensor_flags", {3}},
      {"tensor_memory_format", {2}},
  };

  StoredTable table() const {
    const auto find = [this](const std::string& name) -> dcpx::RawColumn {
      const auto bytes = u8.find(name);
      if (bytes != u8.end()) return raw(bytes->second);
      return raw(i64.at(name));
    };
    return {find, /*string_count=*/5, /*descriptor_count=*/1, /*has_strides=*/true};
  }

 private:
  template <typename T>
  static dcpx::RawColumn raw(const std::vector<T>& column) {
    return {reinterpret_cast<const std::byte*>(column.data()), column.size() * sizeof(T)};
  }
};

void expect_refused(const Sample& sample) { CHECK_THROWS(sample.table(), dcpx::ErrorCode::kPlan); }

TEST(stored_table_says_what_the_columns_say) {
  const Sample sample;
  const StoredTable table = sample.table();
  const StoredTable::Tensor tensor = table.tensor(0);
  CHECK_EQ(tensor.ndim, 2U);
  CHECK_EQ(tensor.sizes[1], 3);
  CHECK_EQ(tensor.chunks, 2U);
  CHECK_EQ(tensor.offsets[2], 2);
  CHECK_EQ(tensor.lengths[3], 3);
  CHECK_EQ(table.storage_offsets[table.offset_begins[1]], 2);
  CHECK_THROWS(table.tensor(1), dcpx::ErrorCode::kPlan);  // bytes
  CHECK_THROWS(table.tensor(2), dcpx::ErrorCode::kPlan);
  CHECK_THROWS(table.tensor(-1), dcpx::ErrorCode::kPlan);
}

TEST(stored_table_refuses_columns_of_another_length) {
  for (const auto& [name, values] : Sample().i64) {
    Sample shorter;
    shorter.i64[name].pop_back();
    expect_refused(shorter);
    Sample longer;
    longer.i64[name].push_back(0);
    expect_refused(longer);
  }
  for (const auto& [name, values] : Sample().u8) {
    if (name == "entry_kind") continue;  // another byte is another entry of bytes
    Sample shorter;
    shorter.u8[name].pop_back();
    expect_refused(shorter);
    Sample longer;
    longer.u8[name].push_back(0);
    expect_refused(longer);
  }
}

TEST(stored_table_refuses_numbers_that_lie) {
  const auto refused_with = [](const char* name, std::int64_t value) {
    Sample sample;
    sample.i64[name][0] = value;
    expect_refused(sample);
  };
  for (const char* name : {"tensor_ndim", "tensor_chunk_count"}) {
    for (const std::int64_t value : {std::int64_t{-1}, std::int64_t{1} << 62, INT64_MAX}) {
      refused_with(name, value);
    }
  }
  refused_with("tensor_stride_count", INT64_MAX);
  refused_with("storage_ndim", INT64_MAX);
  for (const char* name : {"storage_fqn", "storage_path"}) {
    refused_with(name, 5);
    refused_with(name, -1);
  }
  refused_with("storage_descriptors", 1);
  refused_with("storage_descriptors", -2);
}

TEST(total_is_too_many_where_it_leaves_int64) {
  const std::vector<std::int64_t> counts{INT64_MAX, -5, 1};
  const std::vector<std::int64_t> widths{1, 9, 1};
  const auto numbers = [](const std::vector<std::int64_t>& from, std::size_t count) {
    return dcpx::RawNumbers({reinterpret_cast<const std::byte*>(from.data()), 8 * count});
  };
  const dcpx::RawNumbers each = numbers(widths, 3);
  CHECK_EQ(dcpx::total(numbers(counts, 3), nullptr), dcpx::kTooMany);
  CHECK_EQ(dcpx::total(numbers(counts, 3), &each), dcpx::kTooMany);
  CHECK_EQ(dcpx::total(numbers(counts, 2), nullptr), static_cast<std::uint64_t>(INT64_MAX));
  CHECK(!dcpx::have_ends(numbers(counts, 3), each));
  CHECK(dcpx::are_within(numbers(counts, 3), -5, INT64_MAX));
  CHECK(!dcpx::are_within(numbers(counts, 3), -4, INT64_MAX));
}

}  // namespace
