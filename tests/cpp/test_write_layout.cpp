#include <algorithm>

#include "check.h"
#include "common/bytes.h"
#include "engine/write_layout.h"
#include "io/file.h"
#include "random_source.h"

namespace {

using dcpx::align_up;
using dcpx::ItemKind;
using dcpx::engine::kMinSegmentBytes;
using dcpx::engine::kNoItem;
using dcpx::engine::kPackAlignment;
using dcpx::engine::min_body_bytes;
using dcpx::engine::Piece;
using dcpx::engine::PieceKind;
using dcpx::engine::Segment;
using dcpx::engine::SegmentBytes;
using dcpx::engine::WriteItem;
using dcpx::engine::WriteLayout;
using dcpx::io::kDirectAlignment;

constexpr std::uint64_t kMiB = 1 << 20;
const dcpx::TensorFraming kBytesFraming{"torch", "ByteStorage", ""};

std::uint64_t random_payload(RandomSource& random) {
  const std::uint64_t border = random.pick<std::uint64_t>(
      {0, 1, 64, 4096, kMinSegmentBytes / 2, 256 << 10, kMiB / 2, kMiB, 2 * kMiB, 4 * kMiB});
  const std::uint64_t around = random.below(3);
  return random.chance(4) ? random.below(3 * kMiB) : border + around - (border > 0 ? 1 : 0);
}

// Addresses are only looked at, never followed.
WriteItem random_item(RandomSource& random) {
  WriteItem item;
  item.row.payload_bytes = random_payload(random);
  const std::uint64_t address = 0x7f0000000000 + random.below(4 * kDirectAlignment);
  item.source = reinterpret_cast<const std::byte*>(static_cast<std::uintptr_t>(address));
  item.is_in_place = random.chance(2);
  if (random.chance(3)) {
    item.row.kind = ItemKind::kBytes;
    return item;
  }
  item.is_dense = item.is_in_place || !random.chance(3) || item.row.payload_bytes == 0;
  item.row.sizes = {static_cast<std::int64_t>(item.row.payload_bytes)};
  item.row.strides = {1};
  item.zip.emplace(dcpx::ZipItemSpec{&kBytesFraming, item.row.sizes, item.row.strides,
                                     item.row.payload_bytes, 1});
  return item;
}

// The bytes that a piece stands for, as a range of the file.
std::pair<std::uint64_t, std::uint64_t> file_range(const WriteItem& item, const Piece& piece) {
  const std::uint64_t payload_end = item.row.payload_offset + item.row.payload_bytes;
  switch (piece.kind) {
    case PieceKind::kItem:
      return {item.row.item_offset, item.row.item_offset + item.row.item_bytes};
    case PieceKind::kHead:
      return {item.row.item_offset, item.row.payload_offset};
    case PieceKind::kPayload:
      return {item.row.payload_offset + piece.begin, item.row.payload_offset + piece.end};
    case PieceKind::kTail:
      break;
  }
  return {payload_end, item.row.item_offset + item.row.item_bytes};
}

std::uint64_t phase_of(const void* source) {
  return reinterpret_cast<std::uintptr_t>(source) % kDirectAlignment;
}

void check_item(const WriteItem& item, std::uint64_t segment_bytes) {
  const auto& row = item.row;
  const bool is_large = row.payload_bytes >= min_body_bytes(segment_bytes);
  const std::uint64_t phase = item.is_in_place ? phase_of(item.source) : 0;
  if (is_large) {
    CHECK_EQ(row.payload_offset % kDirectAlignment, phase);
  } else {
    CHECK_EQ(row.payload_offset % kPackAlignment, 0U);
  }
  if (!item.zip) {
    CHECK_EQ(row.payload_offset, row.item_offset);
    CHECK_EQ(row.item_bytes, row.payload_bytes);
    return;
  }
  CHECK_EQ(row.item_offset % kPackAlignment, 0U);
  CHECK_EQ(row.payload_offset - row.item_offset, item.zip->head_bytes() + item.pad_bytes);
  CHECK_EQ(row.item_bytes, item.zip->item_bytes(item.pad_bytes));  // throws for a bad padding
}

void check_segments(const std::vector<WriteItem>& items, const WriteLayout& layout,
                    std::uint64_t cursor, const SegmentBytes& max, std::uint64_t data_end) {
  std::uint64_t last_end = cursor;
  std::uint64_t last_byte = cursor;  // behind the last piece
  std::uint32_t next_piece = 0;
  for (const Segment& segment : layout.segments) {
    CHECK(segment.begin % kDirectAlignment == 0 && segment.end % kDirectAlignment == 0);
    CHECK(segment.begin >= last_end && segment.begin < segment.end);
    CHECK(segment.end - segment.begin <= (segment.is_in_place ? max.in_place : max.slot));
    CHECK_EQ(segment.first_piece, next_piece);
    CHECK(segment.piece_count > 0);
    last_end = segment.end;
    bool is_aligned_piece = segment.piece_count == 1;
    for (; next_piece < segment.first_piece + segment.piece_count; ++next_piece) {
      const Piece& piece = layout.pieces[next_piece];
      const WriteItem& item = items[piece.item];
      const auto [begin, end] = file_range(item, piece);
      CHECK(begin >= last_byte && begin < end);
      CHECK(begin >= segment.begin && end <= segment.content_end);
      last_byte = end;
      is_aligned_piece = is_aligned_piece && piece.kind == PieceKind::kPayload &&
                         begin == segment.begin && end == segment.end;
      if (segment.is_in_place) CHECK_EQ(phase_of(item.source + piece.begin), 0U);
    }
    CHECK_EQ(last_byte, segment.content_end);
    CHECK_EQ(align_up(segment.content_end, kDirectAlignment), segment.end);
    const WriteItem& first = items[layout.pieces[segment.first_piece].item];
    CHECK_EQ(segment.is_in_place, is_aligned_piece && first.is_in_place);
  }
  CHECK_EQ(next_piece, layout.pieces.size());
  CHECK(last_byte <= data_end);
  std::uint64_t planned_bytes = 0, placed_bytes = 0;
  for (const WriteItem& item : items) planned_bytes += item.row.payload_bytes;
  for (const Segment& segment : layout.segments) placed_bytes += segment.payload_bytes;
  CHECK_EQ(placed_bytes, planned_bytes);
}

// Pieces of each item: head, payload from front to back without a gap, tail.
void check_pieces(const std::vector<WriteItem>& items, const WriteLayout& layout) {
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    std::uint64_t at = items[i].row.item_offset;
    for (std::uint32_t p = layout.first_piece[i]; p < layout.first_piece[i + 1]; ++p) {
      CHECK_EQ(layout.pieces[p].item, i);
      const auto [begin, end] = file_range(items[i], layout.pieces[p]);
      CHECK_EQ(begin, at);
      at = end;
    }
    CHECK_EQ(at, items[i].row.item_offset + items[i].row.item_bytes);
  }
  CHECK_EQ(layout.first_piece[items.size()], layout.pieces.size());
}

// A seam waits for exactly the payload pieces before it; a packed item never waits.
void check_seams(const std::vector<WriteItem>& items, const WriteLayout& layout,
                 std::uint64_t segment_bytes) {
  std::vector<std::uint32_t> segment_of(layout.pieces.size());
  std::vector<std::uint32_t> seams(items.size(), 0);
  for (std::uint32_t s = 0; s < layout.segments.size(); ++s) {
    const Segment& segment = layout.segments[s];
    std::fill_n(segment_of.begin() + segment.first_piece, segment.piece_count, s);
    if (segment.waits_for != kNoItem) ++seams[segment.waits_for];
  }
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    const bool is_large = items[i].row.payload_bytes >= min_body_bytes(segment_bytes);
    const std::uint32_t pieces = layout.first_piece[i + 1] - layout.first_piece[i];
    if (!is_large) CHECK_EQ(pieces, items[i].row.item_bytes > 0 ? 1U : 0U);
    std::uint32_t before = 0;
    for (std::uint32_t p = layout.first_piece[i]; p < layout.first_piece[i + 1]; ++p) {
      const bool is_in_seam = layout.segments[segment_of[p]].waits_for == i;
      if (layout.pieces[p].kind == PieceKind::kPayload && is_large && !is_in_seam) ++before;
      CHECK_EQ(layout.pieces[p].kind == PieceKind::kItem, !is_large);
      if (layout.pieces[p].kind == PieceKind::kTail) CHECK(is_in_seam);
    }
    CHECK_EQ(layout.pieces_before_seam[i], before);
    CHECK(seams[i] <= 1U && (is_large || seams[i] == 0));
    if (is_large && items[i].zip) CHECK_EQ(seams[i], 1U);
  }
}

TEST(layout_of_random_items_tiles_them_in_aligned_segments) {
  RandomSource random(30);
  std::size_t in_place = 0;
  for (int round = 0; round < 600; ++round) {
    const std::uint64_t segment_bytes =
        random.pick<std::uint64_t>({256 << 10, 260 << 10, kMiB, 3 * kMiB});
    const std::uint64_t in_place_bytes = random.chance(2) ? segment_bytes : 8 * kMiB;
    std::vector<WriteItem> items;
    for (std::uint64_t count = random.between(1, 30); count > 0; --count) {
      items.push_back(random_item(random));
    }
    const std::uint64_t cursor = random.below(1000) * kDirectAlignment;
    const auto count = static_cast<std::uint32_t>(items.size());
    WriteLayout layout;
    const std::uint64_t data_end =
        dcpx::engine::lay_out(items, 0, count, cursor, {segment_bytes, in_place_bytes}, layout);
    for (const WriteItem& item : items) check_item(item, segment_bytes);
    check_segments(items, layout, cursor, {segment_bytes, in_place_bytes}, data_end);
    check_pieces(items, layout);
    check_seams(items, layout, segment_bytes);
    const auto& last = items.back().row;
    CHECK_EQ(data_end, last.item_offset + last.item_bytes);
    for (const Segment& segment : layout.segments) in_place += segment.is_in_place;
  }
  CHECK(in_place > 600);
}

TEST(ready_segments_come_from_a_few_files_in_turn) {
  constexpr std::uint32_t kFiles = 5;
  RandomSource random(33);
  std::vector<WriteItem> items;
  for (std::uint32_t i = 0; i < 40; ++i) {
    items.push_back(random_item(random));
    items.back().file = i * kFiles / 40;
  }
  WriteLayout layout;
  for (std::uint32_t first = 0; first < 40; first += 8) {
    dcpx::engine::lay_out(items, first, 8, 0, {256 << 10, 256 << 10}, layout);
  }
  std::vector<std::uint32_t> left(kFiles);  // ready segments of each file
  std::vector<std::uint32_t> in_order;
  for (std::uint32_t s = 0; s < layout.segments.size(); ++s) {
    if (layout.segments[s].waits_for != kNoItem) continue;
    in_order.push_back(s);
    ++left[layout.segments[s].file];
  }
  CHECK(dcpx::engine::ready_segments(layout, 1) == in_order);
  for (const unsigned files_at_once : {2U, 3U, kFiles, 100U}) {
    const std::vector<std::uint32_t> ready = dcpx::engine::ready_segments(layout, files_at_once);
    std::vector<std::uint32_t> sorted = ready;
    std::sort(sorted.begin(), sorted.end());
    CHECK(sorted == in_order);
    std::vector<std::uint32_t> taken(kFiles);
    for (const std::uint32_t s : ready) {
      ++taken[layout.segments[s].file];
      std::uint32_t begun = 0;
      for (std::uint32_t f = 0; f < kFiles; ++f) begun += taken[f] > 0 && taken[f] < left[f];
      CHECK(begun <= files_at_once);
      // Of the files that were begun and are not used up, none is a turn ahead of another one
      // that was begun earlier.
      for (std::uint32_t f = 1; f < kFiles; ++f) {
        if (taken[f] > 0 && taken[f - 1] < left[f - 1]) CHECK(taken[f] <= taken[f - 1]);
      }
    }
  }
}

TEST(segments_in_place_are_long_where_every_worker_gets_several) {
  using dcpx::engine::kMaxInPlaceBytes;
  using dcpx::engine::segment_bytes_for;
  RandomSource random(34);
  for (int round = 0; round < 1000; ++round) {
    const std::uint64_t slot = random.pick<std::uint64_t>({kMinSegmentBytes, kMiB, 16 * kMiB});
    const auto workers = static_cast<unsigned>(random.between(1, 16));
    const std::uint64_t payload = random.below(std::uint64_t{1} << random.between(1, 36));
    const SegmentBytes found = segment_bytes_for(slot, payload, workers);
    CHECK_EQ(found.slot, slot);
    CHECK_EQ(found.in_place % kDirectAlignment, 0U);
    CHECK(found.in_place >= slot && found.in_place <= std::max(slot, kMaxInPlaceBytes));
    if (found.in_place > slot) CHECK(4 * workers * found.in_place <= payload);
  }
  CHECK_EQ(segment_bytes_for(kMiB, std::uint64_t{2} << 30, 4).in_place, kMaxInPlaceBytes);
  CHECK_EQ(segment_bytes_for(kMiB, 64 * kMiB, 4).in_place, 4 * kMiB);
}

}  // namespace
