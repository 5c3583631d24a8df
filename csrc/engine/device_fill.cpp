#include "engine/device_fill.h"

#include <string>

#include "common/error.h"
#include "plan/range_boxes.h"

namespace dcpx::engine {
namespace {

// Queues bytes [begin, end) of the item's payload for `dst`. Pieces are cut at pages, so a strided
// one may begin and end within a row, and then is a few boxes.
void queue_payload(const WriteItem& item, std::uint64_t begin, std::uint64_t end, std::uint64_t dst,
                   device::CopyStream& stream) {
  const auto source = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(item.source));
  if (item.is_dense) {
    stream.copy(device::Direction::kToHost, dst, source + begin, end - begin);
    return;
  }
  for (const plan::RangeBox& box : plan::range_boxes(item.gather, begin, end)) {
    stream.copy_region(device::Direction::kToHost, box.region, dst + box.dst_offset,
                       source + box.src_offset);
  }
}

}  // namespace

void fetch_payloads(const WriteLayout& layout, const Segment& segment,
                    const std::vector<WriteItem>& items, device::CopyStreams& streams,
                    const StopFlag& stop, std::byte* to) {
  const auto slot = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(to));
  const WriteItem* first = nullptr;
  std::uint32_t count = 0;
  try {
    for (std::uint32_t p = segment.first_piece; p < segment.first_piece + segment.piece_count;
         ++p) {
      const Piece& piece = layout.pieces[p];
      const WriteItem& item = items[piece.item];
      if (item.device < 0) continue;
      if (piece.kind != PieceKind::kItem && piece.kind != PieceKind::kPayload) continue;
      const bool is_whole = piece.kind == PieceKind::kItem;
      const std::uint64_t begin = is_whole ? 0 : piece.begin;
      const std::uint64_t end = is_whole ? item.row.payload_bytes : piece.end;
      if (begin == end) continue;
      if (first == nullptr) first = &item;
      ++count;
      queue_payload(item, begin, end, slot + (item.row.payload_offset + begin - segment.begin),
                    streams.on(item.device));
    }
    if (first == nullptr) return;
    std::string what = "copying '" + first->row.fqn + "'";
    if (count > 1) what += " and " + std::to_string(count - 1) + " more";
    streams.finish_all(stop, (what + " to the host").c_str());
  } catch (Error& error) {
    if (first != nullptr && error.fqn.empty()) error.fqn = first->row.fqn;
    throw;
  }
}

}  // namespace dcpx::engine
