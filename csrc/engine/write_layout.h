// Where every byte of a save goes: items to offsets, offsets to segments. Pure arithmetic, no I/O.
//
// A file is cut into segments, each written by one worker in one call. Items are packed, many to a
// segment, and copied on the way. Only an item that fills one (15/16 of it) is taken apart: a head
// (in the segment before), a body of whole aligned segments that any worker takes, and a seam: the
// last partial page, the zip tail with the payload's CRC, and whatever follows. A seam waits until
// the pieces before it are checksummed; nobody blocks for it, the worker that finishes the last
// piece goes on with the seam.
//
// A body goes through slots as well, unless its item is to be written in place: from the memory
// where it lies, whose address the file's offset then agrees with modulo a page.
//
// A body costs a small write at each seam, in place or not: of a disk's rate, items of 128
// KiB get 0.79 packed and 0.32 with bodies, 256 KiB 0.88 and 0.52, 512 KiB 0.72 and 0.46. Packed
// payloads begin on kPackAlignment whatever their size: a page would cost 3 % of the file at 64 KiB
// and serve nobody, for a load too reads runs of such items into a slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "format/file_footer.h"
#include "format/zip_item.h"
#include "plan/region_copy.h"

namespace dcpx::engine {

inline constexpr std::uint64_t kPackAlignment = 64;
inline constexpr std::uint64_t kMinSegmentBytes = 256 << 10;
// Segments that are written from the source's own memory need no slot, so they may be longer. From
// small pages, of raw 4 MiB x 4 threads, by 4 workers, in three noisy runs: 1 MiB 0.75 and 0.89,
// 4 MiB 0.90 and 1.03, 8 MiB 1.16 in the second and 0.81 in the third, which had no other length.
inline constexpr std::uint64_t kMaxInPlaceBytes = 8 << 20;

// Payloads from here on have a body of their own; smaller ones are packed.
constexpr std::uint64_t min_body_bytes(std::uint64_t segment_bytes) {
  return segment_bytes / 16 * 15;
}

// One item to write. `row` is its index row; the layout fills in its offsets and lengths.
struct WriteItem {
  IndexRow row;
  std::uint32_t file = 0;             // index into the job's files
  const std::byte* source = nullptr;  // memory of `device`; must stay valid until write() returns
  int device = -1;                    // -1: host memory. Else a CUDA device's, not to be read here
  std::uint64_t elem_bytes = 1;
  bool is_dense = true;         // [source, source + payload_bytes) is the payload as it is
  bool is_lasting = true;       // `source` stays valid until the job's end, not only the call's
  bool is_in_place = false;     // to be written from there; REQUIRES: is_dense, host memory
  plan::Region gather;          // else: source strides of the C-order payload
  std::optional<ZipItem> zip;   // the framing of kTensor items
  std::uint64_t pad_bytes = 0;  // zip padding before the payload
};

enum class PieceKind : std::uint8_t {
  kItem,  // all of a packed item
  kHead,
  kPayload,
  kTail,
};

// A run of bytes of one item inside a segment. [begin, end) counts from the payload's start for
// kPayload and is unused otherwise.
struct Piece {
  std::uint32_t item = 0;
  PieceKind kind = PieceKind::kHead;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

inline constexpr std::uint32_t kNoItem = 0xffffffffu;

struct Segment {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;  // file range, both ends on kDirectAlignment
  std::uint64_t end = 0;
  std::uint64_t payload_bytes = 0;
  std::uint64_t content_end = 0;  // behind the last byte of an item; the rest up to `end` is zero
  std::uint32_t first_piece = 0;
  std::uint32_t piece_count = 0;
  std::uint32_t waits_for = kNoItem;  // item whose earlier pieces must be checksummed first
  bool is_in_place = false;           // one dense payload piece, congruent: written from its memory
};

struct WriteLayout {
  std::vector<Segment> segments;
  std::vector<Piece> pieces;
  // Per item: number of segments that hold payload bytes before the one with its tail.
  std::vector<std::uint32_t> pieces_before_seam;
  // Item i has the pieces [first_piece[i], first_piece[i + 1]), in the order of the file.
  std::vector<std::uint32_t> first_piece;
};

// How long segments may be. REQUIRES: multiples of kDirectAlignment; in_place >= slot >=
// kMinSegmentBytes.
struct SegmentBytes {
  std::uint64_t slot = 0;      // what passes through a worker's slot
  std::uint64_t in_place = 0;  // what is written from the source's memory
};

// Returns the lengths for `payload_bytes` over `workers`: each of them gets several segments.
SegmentBytes segment_bytes_for(std::uint64_t slot_bytes, std::uint64_t payload_bytes,
                               unsigned workers);

// Lays `items` (all of one file) out from `cursor` on, which is a multiple of kDirectAlignment.
// Appends to `layout`, fills in the items' rows, and returns the new end of data (unaligned).
// `first_item` is the index of items[0] in the job's table. Throws Error(kPlan).
std::uint64_t lay_out(std::vector<WriteItem>& items, std::uint32_t first_item,
                      std::uint32_t item_count, std::uint64_t cursor,
                      const SegmentBytes& segment_bytes, WriteLayout& layout);

// Returns the segments that wait for nothing, in the order in which workers take them: one of each
// of `files_at_once` files in turn, the next file taking the place of one that is used up. With 1
// that is the order of the files.
std::vector<std::uint32_t> ready_segments(const WriteLayout& layout, unsigned files_at_once);

}  // namespace dcpx::engine
