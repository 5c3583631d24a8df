// One data file looked at for all that is wrong with it, not for the first thing.
//
// Its frame is looked at here: footer, index, block table, the zeros between them; of a file
// without a footer the zip items that the metadata names. What the checksums found here cover is
// left to VerifyJob, which reads the file once.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/error.h"
#include "format/file_footer.h"
#include "io/file.h"

namespace dcpx::engine {

enum class FindingKind : std::uint8_t {
  kUnreadable,  // a read failed
  kTail,        // no whole tail
  kIndex,
  kTable,    // the block table or its page checks
  kData,     // bytes that a checksum covers
  kItem,     // framing of an item of stock's
  kPadding,  // not zero, and nobody needs it
  kUnchecked,
};

// What is wrong with a range of bytes: Error has the range, what was expected and what was found.
struct Finding {
  FindingKind kind = FindingKind::kData;
  Error error;
};

// Bytes with a checksum of their own, in a file without a footer.
struct SummedRange {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::uint32_t crc = 0;
};

// What a footer says; `rows` are those of a whole index.
struct FooterFacts {
  bool has_tail = false;
  bool has_rows = false;
  Tail tail{};
  std::vector<IndexRow> rows;
};

// Whether a footer of more than 64 MiB was not written whole: a file of 4 KiB on the disk may claim
// terabytes of index and table, for which nobody is to take memory. REQUIRES: `tail` is the file's.
bool is_hollow_footer(const io::InputFile& file, const Tail& tail);
inline constexpr const char* kHollowFooter = "a footer with a hole, to which nothing was written";

// Reads tail and index, and looks for bytes between them that are not zero. Blocks. As the next
// two, it keeps of an object what it reads. Throws what cannot be read at all; adds the rest to
// `findings`.
FooterFacts check_footer(io::InputFile& file, std::vector<Finding>& findings);

// The checksums of the blocks [0, tail.block_count). `is_known` has one flag per page of the table:
// false where the table itself is damaged, which is then one of the findings. Blocks.
struct BlockSums {
  std::vector<std::uint32_t> crcs;
  std::vector<bool> is_known;
};
BlockSums read_block_sums(io::InputFile& file, const Tail& tail, std::vector<Finding>& findings);

// An item of a file without a footer, as the metadata names it.
struct ForeignItem {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  bool is_tensor = true;
};

// Finds the checksums of stock's zip items, in the order of the file. REQUIRES: items ascending,
// none overlapping. Blocks. Throws what cannot be read at all; adds the rest to `findings`.
std::vector<SummedRange> check_items(io::InputFile& file, const std::vector<ForeignItem>& items,
                                     std::vector<Finding>& findings);

}  // namespace dcpx::engine
