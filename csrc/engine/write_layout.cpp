#include "engine/write_layout.h"

#include <algorithm>

#include "common/bytes.h"
#include "io/file.h"

namespace dcpx::engine {
namespace {

using io::kDirectAlignment;

// Builds segments of one file in ascending order.
class Builder {
 public:
  Builder(WriteLayout& layout, std::uint32_t file, std::uint64_t cursor,
          const SegmentBytes& segment_bytes)
      : layout_(layout), file_(file), cursor_(cursor), segment_bytes_(segment_bytes) {
    start_segment(kNoItem);
  }

  std::uint64_t cursor() const noexcept { return cursor_; }

  void add(WriteItem& item, std::uint32_t index) {
    IndexRow& row = item.row;
    layout_.first_piece[index] = static_cast<std::uint32_t>(layout_.pieces.size());
    const bool is_large = row.payload_bytes >= min_body_bytes(segment_bytes_.slot);
    // What is written in place begins where file offset and address are congruent; a body that
    // passes through slots begins on a page.
    const std::uint64_t phase =
        is_large && item.is_in_place
            ? reinterpret_cast<std::uintptr_t>(item.source) & (kDirectAlignment - 1)
            : 0;
    const std::uint64_t grid = is_large ? kDirectAlignment : kPackAlignment;
    place(item, phase, grid);
    if (!fits(item, is_large)) {
      close_segment();
      start_segment(kNoItem);
      place(item, phase, grid);
    }
    if (is_large) {
      if (item.zip) add_piece({index, PieceKind::kHead, 0, 0}, row.payload_offset);
      add_body(item, index);
      if (item.zip) add_piece({index, PieceKind::kTail, 0, 0}, end_of(item));
    } else if (row.item_bytes > 0) {
      add_piece({index, PieceKind::kItem, 0, 0}, end_of(item));
      segment_.payload_bytes += row.payload_bytes;
    }
    cursor_ = end_of(item);
  }

  std::uint64_t finish() {
    const std::uint64_t data_end = cursor_;
    close_segment();
    return data_end;
  }

 private:
  static std::uint64_t end_of(const WriteItem& item) {
    return item.row.item_offset + item.row.item_bytes;
  }

  // Chooses where the item and its payload begin, given the segment under construction.
  void place(WriteItem& item, std::uint64_t phase, std::uint64_t grid) {
    IndexRow& row = item.row;
    if (!item.zip) {
      row.item_offset = congruent(cursor_, phase, grid);
      row.payload_offset = row.item_offset;
      row.item_bytes = row.payload_bytes;
      return;
    }
    row.item_offset = align_up(cursor_, kPackAlignment);
    const std::uint64_t earliest = row.item_offset + item.zip->head_bytes();
    row.payload_offset = congruent(earliest, phase, grid);
    // The extra field that carries the padding has a head of 4 bytes itself.
    if (row.payload_offset != earliest && row.payload_offset - earliest < ZipItem::kMinPadBytes)
      row.payload_offset += grid;
    item.pad_bytes = row.payload_offset - earliest;
    row.item_bytes = item.zip->item_bytes(item.pad_bytes);
  }

  // The smallest offset >= `from` that is `phase` modulo `grid`.
  static std::uint64_t congruent(std::uint64_t from, std::uint64_t phase, std::uint64_t grid) {
    const std::uint64_t base = align_down(from, grid) + phase;
    return base >= from ? base : base + grid;
  }

  // Whether what the item puts into the segment under construction has room there: all of it, or
  // of a large one the head and the payload's first partial page.
  bool fits(const WriteItem& item, bool is_large) const {
    const std::uint64_t end =
        is_large ? align_up(item.row.payload_offset, kDirectAlignment) : end_of(item);
    return end - segment_.begin <= segment_bytes_.slot;
  }

  void add_body(const WriteItem& item, std::uint32_t index) {
    const IndexRow& row = item.row;
    const std::uint64_t payload_end = row.payload_offset + row.payload_bytes;
    const std::uint64_t body_begin = align_up(row.payload_offset, kDirectAlignment);
    const std::uint64_t body_end = align_down(payload_end, kDirectAlignment);
    if (body_begin > row.payload_offset) {
      add_piece({index, PieceKind::kPayload, 0, body_begin - row.payload_offset}, body_begin);
      segment_.payload_bytes += body_begin - row.payload_offset;
      ++layout_.pieces_before_seam[index];
    }
    cursor_ = body_begin;
    close_segment();
    const std::uint64_t max_bytes =
        item.is_in_place ? segment_bytes_.in_place : segment_bytes_.slot;
    for (std::uint64_t begin = body_begin; begin < body_end;) {
      const std::uint64_t to_grid = max_bytes - begin % max_bytes;
      const std::uint64_t end = std::min(begin + to_grid, body_end);
      cursor_ = begin;
      start_segment(kNoItem);
      segment_.is_in_place = item.is_in_place;
      add_piece({index, PieceKind::kPayload, begin - row.payload_offset, end - row.payload_offset},
                end);
      segment_.payload_bytes = end - begin;
      ++layout_.pieces_before_seam[index];
      cursor_ = end;
      close_segment();
      begin = end;
    }
    start_segment(index);
    if (payload_end > body_end) {
      add_piece({index, PieceKind::kPayload, body_end - row.payload_offset, row.payload_bytes},
                payload_end);
      segment_.payload_bytes += payload_end - body_end;
    }
  }

  void start_segment(std::uint32_t waits_for) {
    segment_ = Segment{};
    segment_.file = file_;
    segment_.begin = align_up(cursor_, kDirectAlignment);
    segment_.content_end = segment_.begin;
    segment_.first_piece = static_cast<std::uint32_t>(layout_.pieces.size());
    segment_.waits_for = waits_for;
    cursor_ = segment_.begin;
  }

  void add_piece(const Piece& piece, std::uint64_t content_end) {
    layout_.pieces.push_back(piece);
    ++segment_.piece_count;
    segment_.content_end = content_end;
  }

  void close_segment() {
    if (segment_.piece_count == 0) return;
    segment_.end = align_up(segment_.content_end, kDirectAlignment);
    layout_.segments.push_back(segment_);
    cursor_ = segment_.end;
    segment_.piece_count = 0;
  }

  WriteLayout& layout_;
  std::uint32_t file_;
  std::uint64_t cursor_;
  SegmentBytes segment_bytes_;
  Segment segment_;
};

}  // namespace

SegmentBytes segment_bytes_for(std::uint64_t slot_bytes, std::uint64_t payload_bytes,
                               unsigned workers) {
  // Four for each worker: the last one to end keeps the others waiting for a quarter of its share.
  const std::uint64_t share = align_down(payload_bytes / 4 / workers, kDirectAlignment);
  return {slot_bytes, std::max(slot_bytes, std::min(share, kMaxInPlaceBytes))};
}

std::uint64_t lay_out(std::vector<WriteItem>& items, std::uint32_t first_item,
                      std::uint32_t item_count, std::uint64_t cursor,
                      const SegmentBytes& segment_bytes, WriteLayout& layout) {
  layout.pieces_before_seam.resize(items.size(), 0);
  layout.first_piece.resize(items.size() + 1, 0);
  layout.pieces.reserve(layout.pieces.size() + item_count);
  Builder builder(layout, items[first_item].file, cursor, segment_bytes);
  for (std::uint32_t i = 0; i < item_count; ++i) builder.add(items[first_item + i], first_item + i);
  const std::uint64_t data_end = builder.finish();
  layout.first_piece[first_item + item_count] = static_cast<std::uint32_t>(layout.pieces.size());
  return data_end;
}

std::vector<std::uint32_t> ready_segments(const WriteLayout& layout, unsigned files_at_once) {
  std::vector<std::vector<std::uint32_t>> by_file;
  std::size_t count = 0;
  for (std::uint32_t s = 0; s < layout.segments.size(); ++s) {
    const Segment& segment = layout.segments[s];
    if (by_file.empty() || layout.segments[s - 1].file != segment.file) by_file.emplace_back();
    if (segment.waits_for != kNoItem) continue;
    by_file.back().push_back(s);
    ++count;
  }
  struct Turn {
    std::size_t file;
    std::size_t taken;
  };
  std::vector<std::uint32_t> ready;
  ready.reserve(count);
  std::vector<Turn> turns;
  std::size_t next_file = 0;
  for (; next_file < by_file.size() && turns.size() < files_at_once; ++next_file) {
    turns.push_back({next_file, 0});
  }
  while (!turns.empty()) {
    for (std::size_t t = 0; t < turns.size();) {
      Turn& turn = turns[t];
      const std::vector<std::uint32_t>& segments = by_file[turn.file];
      if (turn.taken < segments.size()) {
        ready.push_back(segments[turn.taken++]);
        ++t;
      } else if (next_file < by_file.size()) {
        turn = {next_file++, 0};
      } else {
        turns.erase(turns.begin() + static_cast<std::ptrdiff_t>(t));
      }
    }
  }
  return ready;
}

}  // namespace dcpx::engine
