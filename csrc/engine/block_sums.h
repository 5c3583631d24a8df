// Checksums of a file's blocks from checksums of its pieces, each byte summed once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace dcpx::engine {

// The CRC of [begin, begin + nbytes), which crosses no block border.
struct BlockPart {
  std::uint64_t begin = 0;
  std::uint32_t nbytes = 0;
  std::uint32_t crc = 0;
};

// A CRC as messages show it.
std::string hex32(std::uint32_t crc);

// crc32_combine, prepared for whole blocks.
std::uint32_t join_crc(std::uint32_t a, std::uint32_t b, std::uint64_t b_bytes);

// Sums the pieces of one segment, front to back. One worker's.
class SegmentSummer {
 public:
  // Sums `nbytes` bytes that lie at `offset` of the file and returns their CRC.
  // REQUIRES: `offset` is where the last piece ended, or the first one.
  std::uint32_t add(std::uint64_t offset, const std::byte* data, std::uint64_t nbytes);
  // The same where nobody asks for the CRC of these bytes alone: costs no join.
  void add_frame(std::uint64_t offset, const std::byte* data, std::uint64_t nbytes);
  std::vector<BlockPart> take() { return std::move(parts_); }

 private:
  std::vector<BlockPart> parts_;
};

// Joins the parts of all segments of a file to one CRC per block; gaps between them count as zeros.
class BlockTable {
 public:
  // REQUIRES: parts in ascending order, behind those of earlier calls.
  void append(const std::vector<BlockPart>& parts);
  // Ends the table at `data_bytes`. REQUIRES: no part reaches further.
  std::vector<std::uint32_t> finish(std::uint64_t data_bytes);

 private:
  void append_zeros(std::uint64_t end);
  void append_part(std::uint64_t nbytes, std::uint32_t crc);

  std::vector<std::uint32_t> blocks_;  // complete ones
  std::uint64_t end_ = 0;
  std::uint32_t open_crc_ = 0;  // of the block that `end_` lies in
};

}  // namespace dcpx::engine
