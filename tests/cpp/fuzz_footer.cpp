// Any bytes as the end of a file, its tail sealed with a right checksum: the parsers throw
// dcpx::Error, or what they return lies inside the file.
#include "common/error.h"
#include "footer_invariants.h"
#include "fuzz.h"

namespace {

template <typename Parse>
void expect_error_or_success(Parse parse) {
  try {
    parse();
  } catch (const dcpx::Error& error) {
    if (error.code() != dcpx::ErrorCode::kCorruption &&
        error.code() != dcpx::ErrorCode::kUnsupported) {
      __builtin_trap();
    }
  }
}

void parse_rows(const std::byte* index, std::uint64_t index_bytes, std::uint64_t item_count,
                std::uint64_t data_bytes) {
  for (const dcpx::IndexRow& row :
       dcpx::parse_index(index, index_bytes, item_count, data_bytes, "f")) {
    if (!lies_inside(row, data_bytes)) __builtin_trap();
  }
}

}  // namespace

FUZZ(footer) {
  if (size < dcpx::kTailBytes) return;
  const auto* first = reinterpret_cast<const std::byte*>(data);
  std::vector<std::byte> file(first, first + size);
  std::byte* const raw = file.data() + size - dcpx::kTailBytes;
  seal_tail(raw);
  expect_error_or_success([&] {
    const dcpx::Tail tail = dcpx::parse_tail(raw, size, "f");
    if (!lies_inside(tail, size)) __builtin_trap();
    if (std::memcmp(tail.save_id.data(), raw + 100, tail.save_id.size()) != 0) __builtin_trap();
    // A copy of its own, so that ASan sees a read behind the index.
    const auto index = file.begin() + static_cast<std::ptrdiff_t>(tail.index_offset);
    const std::vector<std::byte> rows(index, index + static_cast<std::ptrdiff_t>(tail.index_bytes));
    parse_rows(rows.data(), rows.size(), tail.item_count, tail.data_bytes);
  });
  // The same bytes as an index, with counts that the tail might have claimed.
  for (const std::uint64_t item_count : {std::uint64_t{1}, std::uint64_t{3}, size / 64}) {
    expect_error_or_success([&] { parse_rows(first, size, item_count, 1 << 20); });
  }
}
