// The streamed half of WriteJob: segments go to uploaders, in the order of each file.
#include <algorithm>
#include <limits>

#include "engine/write_job_parts.h"

namespace dcpx::engine {

void WriteJob::announce_sizes() {
  for (const auto& file : files_) {
    if (file->item_count == 0 || !file->is_last_call) continue;
    queue_->set_size(file->number,
                     align_up(file->data_end, io::kDirectAlignment) +
                         footer_bytes(file->index_bytes, block_count_of(file->data_end)));
  }
}

// Of the budget one half is slots: uploads last longer than filling. A quarter is what pieces may
// own, and the last one is left to the tables of a kernel. A part that waits for more bytes holds
// the rest of one piece, and of others more than half a slot each: of n slots all but one while it
// has less than (n - 2) / 2 slots of bytes. Whoever uploads makes no larger parts.
// The only call knows all segments: what they cannot own are slots as well.
FittingWorkers WriteJob::make_queue_slots(const Window& window, unsigned workers,
                                          bool is_only_call) {
  DCPX_CHECK(options_.memory_bytes >= 6 * options_.segment_bytes,
             "uploads need memory for six segments");
  std::uint64_t slot_bytes = options_.segment_bytes;
  std::uint64_t slots_bytes = options_.memory_bytes / 2;
  OwnedLimit owned{options_.memory_bytes / 4, owned_piece_bytes()};
  std::uint64_t most = std::numeric_limits<unsigned>::max();
  if (is_only_call) {
    slot_bytes = io::kDirectAlignment;
    std::uint64_t owned_bytes = 0;
    for (const Segment& segment : window.layout.segments) {
      const std::uint64_t nbytes = segment.end - segment.begin;
      if (!segment.is_in_place) slot_bytes = std::max(slot_bytes, nbytes);
      if (nbytes <= owned_piece_bytes()) owned_bytes += nbytes;
    }
    if (owned_bytes <= owned.max_bytes) {
      slots_bytes += owned.max_bytes - owned_bytes;
      owned = {};
    }
    most = window.layout.segments.size();
  }
  const std::uint64_t count = std::max<std::uint64_t>(slots_bytes / options_.segment_bytes, 3);
  const int device = window.devices.empty() ? -1 : *window.devices.begin();
  queue_->allocate(static_cast<unsigned>(std::min(count, most)), slot_bytes, device, owned);
  slot_bytes_ = queue_->size_bytes();
  if (window.devices.empty()) return {workers};
  return fitting_workers(workers, 1, 1, window.devices.size(), options_.memory_bytes / 4);
}

// First the slot, then the turn: so whoever has the earliest turn waits for nobody behind it.
void WriteJob::stream(Window& window, Worker& worker) {
  while (true) {
    const int slot = queue_->take_slot(worker.stop);
    if (slot == kNoSlot) return;
    const std::uint32_t turn = window.next_ready.fetch_add(1);
    if (turn >= window.ready.size() || !stream_segment(window, window.ready[turn], slot, worker)) {
      queue_->give_back(slot);
      return;
    }
  }
}

bool WriteJob::stream_segment(Window& window, std::uint32_t index, int slot, Worker& worker) {
  const Segment& segment = window.layout.segments[index];
  OpenFile& file = *files_[segment.file];
  if (segment.waits_for != kNoItem) {
    const auto& left = window.pieces_left[segment.waits_for];
    const auto is_summed = [&] { return left.load(std::memory_order_acquire) == 0; };
    if (!queue_->wait(worker.stop, is_summed)) return false;
  }
  SegmentSummer summer;
  worker.slot = queue_->slot(slot);
  const std::byte* const source = fill(window, segment, summer, worker);
  if (source == nullptr) return false;
  const std::uint64_t nbytes = segment.end - segment.begin;
  window.segment_parts[index] = summer.take();
  for (std::uint32_t p = segment.first_piece; p < segment.first_piece + segment.piece_count; ++p) {
    const Piece& piece = window.layout.pieces[p];
    const bool is_before_seam = piece.kind == PieceKind::kPayload &&
                                segment.waits_for != piece.item &&
                                window.layout.pieces_before_seam[piece.item] > 0;
    if (is_before_seam && window.pieces_left[piece.item].fetch_sub(1) == 1) queue_->notify();
  }
  UploadPiece piece{source, nbytes, slot, segment.payload_bytes, {}};
  // A short piece would hold a whole slot, and a part that waits for more bytes could hold all.
  if (nbytes <= owned_piece_bytes()) {
    piece.owned.assign(source, source + nbytes);
    piece.data = piece.owned.data();
    piece.slot = kNoSlot;
  }
  if (segment.is_in_place) in_place_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  buffered_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  queue_->put(segment.file, segment.begin, std::move(piece), slot);
  if (file.segments_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    complete(window, file, worker);
  }
  return true;
}

void WriteJob::stream_footer(OpenFile& file, std::vector<std::byte> footer) {
  UploadPiece piece{nullptr, footer.size(), kNoSlot, 0, std::move(footer)};
  piece.data = piece.owned.data();
  buffered_bytes_.fetch_add(piece.nbytes, std::memory_order_relaxed);
  queue_->put(file.number, file.tail.index_offset, std::move(piece));
  queue_->end(file.number, file.tail.file_bytes);
  file.is_finished = true;
}

}  // namespace dcpx::engine
