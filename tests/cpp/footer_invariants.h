// What must hold for whatever the footer's parsers return without throwing, for tests and fuzzers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "format/crc32.h"
#include "format/file_footer.h"

// Every later read is sized by the tail: all of its ranges lie inside the file, in order.
inline bool lies_inside(const dcpx::Tail& tail, std::uint64_t file_bytes) {
  return tail.file_bytes == file_bytes && tail.data_bytes <= tail.index_offset &&
         tail.index_offset <= file_bytes && tail.index_bytes <= file_bytes - tail.index_offset &&
         tail.table_offset >= tail.index_offset + tail.index_bytes &&
         tail.table_offset <= file_bytes &&
         tail.block_count <= (file_bytes - tail.table_offset) / 4 &&
         tail.page_checks_offset() + 4 * tail.page_count() <= file_bytes - dcpx::kTailBytes;
}

inline bool lies_inside(const dcpx::IndexRow& row, std::uint64_t data_bytes) {
  const std::size_t dims = row.sizes.size();
  if (row.strides.size() != dims || row.offsets.size() != dims || row.global_sizes.size() != dims) {
    return false;
  }
  for (const auto* values : {&row.sizes, &row.strides, &row.offsets, &row.global_sizes}) {
    for (const std::int64_t value : *values) {
      if (value < 0) return false;
    }
  }
  return row.item_offset <= data_bytes && row.item_bytes <= data_bytes - row.item_offset &&
         row.payload_offset >= row.item_offset &&
         row.payload_offset - row.item_offset <= row.item_bytes &&
         row.payload_bytes <= row.item_bytes - (row.payload_offset - row.item_offset);
}

// Makes the tail's own checksum right again, so that what it says is looked at.
inline void seal_tail(std::byte* raw) {
  const std::uint32_t crc = dcpx::crc32(0, raw, dcpx::kTailBytes - 4);
  std::memcpy(raw + dcpx::kTailBytes - 4, &crc, sizeof(crc));
}
