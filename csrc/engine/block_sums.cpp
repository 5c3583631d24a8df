#include "engine/block_sums.h"

#include <algorithm>
#include <array>
#include <cstdio>

#include "common/error.h"
#include "format/crc32.h"
#include "format/file_footer.h"

namespace dcpx::engine {
namespace {

// Up to here a second look at bytes in cache costs less than a join (measured: about 110 ns).
constexpr std::uint64_t kSumTwiceBytes = 4096;

}  // namespace

std::string hex32(std::uint32_t crc) {
  char text[11];
  std::snprintf(text, sizeof(text), "0x%08x", crc);
  return text;
}

std::uint32_t join_crc(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes) {
  static const Crc32Shift whole_block(kBlockBytes);
  return b_bytes == kBlockBytes ? whole_block.combine(a, b) : crc32_combine(a, b, b_bytes);
}

std::uint32_t SegmentSummer::add(std::uint64_t offset, const std::byte* data,
                                 std::uint64_t nbytes) {
  std::uint32_t whole = 0;
  for (std::uint64_t at = 0; at < nbytes;) {
    const std::uint64_t to_border = kBlockBytes - (offset + at) % kBlockBytes;
    const std::uint64_t count = std::min(to_border, nbytes - at);
    const std::uint32_t crc = crc32(0, data + at, static_cast<std::size_t>(count));
    whole = at == 0 ? crc : join_crc(whole, crc, count);
    const bool starts_block = to_border == kBlockBytes;
    if (parts_.empty() || starts_block) {
      parts_.push_back({offset + at, static_cast<std::uint32_t>(count), crc});
    } else {
      BlockPart& part = parts_.back();
      part.crc = count <= kSumTwiceBytes
                     ? crc32(part.crc, data + at, static_cast<std::size_t>(count))
                     : join_crc(part.crc, crc, count);
      part.nbytes += static_cast<std::uint32_t>(count);
    }
    at += count;
  }
  return whole;
}

void SegmentSummer::add_frame(std::uint64_t offset, const std::byte* data, std::uint64_t nbytes) {
  for (std::uint64_t at = 0; at < nbytes;) {
    const std::uint64_t to_border = kBlockBytes - (offset + at) % kBlockBytes;
    const std::uint64_t count = std::min(to_border, nbytes - at);
    const bool starts_block = to_border == kBlockBytes;
    if (parts_.empty() || starts_block) parts_.push_back({offset + at, 0, 0});
    BlockPart& part = parts_.back();
    part.crc = crc32(part.crc, data + at, static_cast<std::size_t>(count));
    part.nbytes += static_cast<std::uint32_t>(count);
    at += count;
  }
}

void BlockTable::append(const std::vector<BlockPart>& parts) {
  for (const BlockPart& part : parts) {
    append_zeros(part.begin);
    append_part(part.nbytes, part.crc);
  }
}

std::vector<std::uint32_t> BlockTable::finish(std::uint64_t data_bytes) {
  append_zeros(data_bytes);
  DCPX_CHECK(end_ == data_bytes, "block checksums reach behind the data");
  if (end_ % kBlockBytes != 0) blocks_.push_back(open_crc_);
  return std::move(blocks_);
}

void BlockTable::append_zeros(std::uint64_t end) {
  static const std::array<std::byte, kBlockBytes> zeros{};
  while (end_ < end) {
    const std::uint64_t count = std::min(kBlockBytes - end_ % kBlockBytes, end - end_);
    append_part(count, crc32(0, zeros.data(), static_cast<std::size_t>(count)));
  }
}

void BlockTable::append_part(std::uint64_t nbytes, std::uint32_t crc) {
  open_crc_ = end_ % kBlockBytes == 0 ? crc : join_crc(open_crc_, crc, nbytes);
  end_ += nbytes;
  if (end_ % kBlockBytes == 0) blocks_.push_back(open_crc_);
}

}  // namespace dcpx::engine
