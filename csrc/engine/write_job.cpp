#include "engine/write_job.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/bytes.h"
#include "format/crc32.h"

namespace dcpx::engine {

struct WriteJob::OpenFile {
  FileSpec spec;
  std::mutex mutex;  // guards `file` while it is opened
  io::OutputFile file;
  std::uint64_t data_end = 0;  // behind the last item laid out so far
  std::uint64_t allocated_end = 0;
  std::atomic<std::uint32_t> segments_left{0};  // of the current call
  std::uint32_t first_segment = 0;              // of the current call
  std::uint32_t segment_count = 0;
  std::uint32_t first_item = 0;
  std::uint32_t item_count = 0;
  bool is_last_call = false;
  bool is_finished = false;
  BlockTable blocks;
  std::vector<std::byte> index;  // encoded rows
  std::uint64_t row_count = 0;
  Tail tail;
};

// What one call of write() works on.
struct WriteJob::Window {
  std::vector<WriteItem>& items;
  WriteLayout layout;
  std::vector<std::uint32_t> ready;  // segments that wait for nothing, in order
  std::atomic<std::uint32_t> next_ready{0};
  std::vector<std::uint32_t> piece_crcs;  // of payload pieces
  std::vector<std::vector<BlockPart>> segment_parts;
  std::vector<std::uint32_t> seam_of;                         // item -> segment that waits for it
  std::unique_ptr<std::atomic<std::uint32_t>[]> pieces_left;  // per item, before its seam
};

namespace {

// Joins the CRCs of an item's payload pieces, in order.
std::uint32_t payload_crc(const WriteLayout& layout, const std::vector<std::uint32_t>& piece_crcs,
                          std::uint32_t item) {
  std::uint32_t crc = 0;
  bool is_first = true;
  for (std::uint32_t p = layout.first_piece[item]; p < layout.first_piece[item + 1]; ++p) {
    const Piece& piece = layout.pieces[p];
    if (piece.kind != PieceKind::kPayload) continue;
    crc = is_first ? piece_crcs[p] : crc32_combine(crc, piece_crcs[p], piece.end - piece.begin);
    is_first = false;
  }
  return crc;
}

}  // namespace

WriteJob::WriteJob(int dir_fd, std::string dir_path, const WriteOptions& options)
    : dir_fd_(::fcntl(dir_fd, F_DUPFD_CLOEXEC, 0)),
      dir_path_(std::move(dir_path)),
      options_(options) {
  if (!dir_fd_.is_open()) throw storage_error("dup", dir_path_, errno);
  DCPX_CHECK(options_.workers > 0 && options_.files_at_once > 0 &&
                 options_.segment_bytes >= 4 * kLargePayloadBytes &&
                 options_.segment_bytes % io::kDirectAlignment == 0,
             "a segment holds at least four large payloads' thresholds");
}

WriteJob::~WriteJob() = default;

std::uint32_t WriteJob::add_file(FileSpec spec) {
  files_.emplace_back();
  files_.back().spec = std::move(spec);
  return static_cast<std::uint32_t>(files_.size() - 1);
}

void WriteJob::prepare(Window& window, bool is_final) {
  std::vector<WriteItem>& items = window.items;
  WriteLayout& layout = window.layout;
  for (OpenFile& file : files_) file.segment_count = file.item_count = 0;
  std::uint32_t previous = kNoItem;
  for (std::uint32_t first = 0; first < items.size();) {
    const std::uint32_t index = items[first].file;
    DCPX_CHECK(index < files_.size() && (previous == kNoItem || index > previous),
               "items must be sorted by file");
    previous = index;
    std::uint32_t end = first;
    while (end < items.size() && items[end].file == index) ++end;
    OpenFile& file = files_[index];
    DCPX_CHECK(!file.is_finished && !file.is_last_call, "items for a file that is complete");
    file.first_segment = static_cast<std::uint32_t>(layout.segments.size());
    file.first_item = first;
    file.item_count = end - first;
    file.data_end =
        lay_out(items, first, end - first, align_up(file.data_end, io::kDirectAlignment),
                options_.segment_bytes, layout);
    file.segment_count = static_cast<std::uint32_t>(layout.segments.size()) - file.first_segment;
    file.segments_left.store(file.segment_count);
    file.is_last_call = is_final || end < items.size();
    first = end;
  }
  layout.first_piece.resize(items.size() + 1, static_cast<std::uint32_t>(layout.pieces.size()));
  layout.pieces_before_seam.resize(items.size(), 0);

  window.piece_crcs.assign(layout.pieces.size(), 0);
  window.segment_parts.resize(layout.segments.size());
  window.seam_of.assign(items.size(), kNoItem);
  window.pieces_left = std::make_unique<std::atomic<std::uint32_t>[]>(items.size());
  for (std::uint32_t i = 0; i < items.size(); ++i) {
    window.pieces_left[i].store(layout.pieces_before_seam[i]);
  }
  for (std::uint32_t s = 0; s < layout.segments.size(); ++s) {
    const std::uint32_t item = layout.segments[s].waits_for;
    if (item != kNoItem) window.seam_of[item] = s;
  }
  window.ready = ready_segments(layout, options_.files_at_once);
}

void WriteJob::write(std::vector<WriteItem>& items, bool is_final, const PollFunction& poll) {
  DCPX_CHECK(items.size() < kNoItem, "too many items in one call");
  Window window{items, {}, {}, {}, {}, {}, {}, {}};
  prepare(window, is_final);
  if (!window.ready.empty()) {
    const auto workers = static_cast<unsigned>(
        std::min<std::size_t>(options_.workers, window.layout.segments.size()));
    slot_bytes_ = std::max(slot_bytes_, workers * options_.segment_bytes);
    run_workers(
        workers,
        [&](unsigned, StopFlag& stop) {
          Slot slot(options_.segment_bytes);
          work(window, slot, stop);
        },
        poll);
  }
  // Files whose last items came with an earlier call, or whose items hold no byte at all.
  const std::size_t done = is_final ? files_.size() : items.empty() ? 0 : items.back().file;
  for (std::size_t f = 0; f < files_.size(); ++f) {
    OpenFile& file = files_[f];
    if (file.item_count > 0 && file.segment_count == 0) complete(window, file);
    if (f < done && !file.is_finished && file.row_count > 0) finish(file);
  }
}

void WriteJob::work(Window& window, Slot& slot, StopFlag& stop) {
  while (!stop.is_set()) {
    const std::uint32_t turn = window.next_ready.fetch_add(1);
    if (turn >= window.ready.size()) return;
    write_segment(window, window.ready[turn], slot);
  }
}

void WriteJob::write_segment(Window& window, std::uint32_t index, Slot& slot) {
  // A loop, not a recursion: a seam may end the last piece of the next item.
  std::vector<std::uint32_t> todo{index};
  while (!todo.empty()) {
    const std::uint32_t current = todo.back();
    todo.pop_back();
    const Segment& segment = window.layout.segments[current];
    OpenFile& file = files_[segment.file];
    open(file);
    SegmentSummer summer;
    const std::byte* source = slot.data();
    if (segment.is_in_place) {
      const Piece& piece = window.layout.pieces[segment.first_piece];
      source = window.items[piece.item].source + piece.begin;
      window.piece_crcs[segment.first_piece] =
          summer.add(segment.begin, source, segment.end - segment.begin);
    } else {
      fill(window, segment, slot, summer);
    }
    const std::uint64_t nbytes = segment.end - segment.begin;
    file.file.write_at(source, nbytes, segment.begin);
    (file.file.is_direct() ? direct_bytes_ : buffered_bytes_).fetch_add(nbytes);
    if (segment.is_in_place) in_place_bytes_.fetch_add(nbytes);
    window.segment_parts[current] = summer.take();

    for (std::uint32_t p = segment.first_piece; p < segment.first_piece + segment.piece_count;
         ++p) {
      const Piece& piece = window.layout.pieces[p];
      const bool is_before_seam = piece.kind == PieceKind::kPayload &&
                                  segment.waits_for != piece.item &&
                                  window.layout.pieces_before_seam[piece.item] > 0;
      if (!is_before_seam) continue;
      if (window.pieces_left[piece.item].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      if (window.seam_of[piece.item] != kNoItem) todo.push_back(window.seam_of[piece.item]);
    }
    if (file.segments_left.fetch_sub(1, std::memory_order_acq_rel) == 1) complete(window, file);
  }
}

void WriteJob::fill(Window& window, const Segment& segment, Slot& slot, SegmentSummer& summer) {
  std::vector<std::byte> frame;
  std::uint64_t at = segment.begin;
  const auto place = [&](std::uint64_t begin, std::uint64_t nbytes) {
    DCPX_CHECK(begin >= at && begin + nbytes - segment.begin <= slot.size_bytes(),
               "a piece must lie inside its segment");
    std::byte* to = slot.data() + (begin - segment.begin);
    if (begin > at) {
      std::byte* gap = slot.data() + (at - segment.begin);
      std::memset(gap, 0, begin - at);
      summer.add(at, gap, begin - at);
    }
    at = begin + nbytes;
    return to;
  };
  for (std::uint32_t p = segment.first_piece; p < segment.first_piece + segment.piece_count; ++p) {
    const Piece& piece = window.layout.pieces[p];
    WriteItem& item = window.items[piece.item];
    if (piece.kind == PieceKind::kPayload) {
      const std::uint64_t begin = item.row.payload_offset + piece.begin;
      const std::uint64_t nbytes = piece.end - piece.begin;
      std::byte* to = place(begin, nbytes);
      if (item.is_dense) {
        std::memcpy(to, item.source + piece.begin, nbytes);
      } else {
        plan::gather_range(item.gather, item.source, piece.begin, piece.end, to);
      }
      window.piece_crcs[p] = summer.add(begin, to, nbytes);
      continue;
    }
    frame.clear();
    std::uint64_t begin = item.row.item_offset;
    if (piece.kind == PieceKind::kHead) {
      item.zip->append_head(item.pad_bytes, frame);
    } else {
      item.row.payload_crc = payload_crc(window.layout, window.piece_crcs, piece.item);
      item.zip->append_tail(item.pad_bytes, item.row.payload_crc, frame);
      begin = item.row.payload_offset + item.row.payload_bytes;
    }
    std::byte* to = place(begin, frame.size());
    std::memcpy(to, frame.data(), frame.size());
    summer.add(begin, to, frame.size());
  }
  std::memset(slot.data() + (at - segment.begin), 0, segment.end - at);
}

void WriteJob::open(OpenFile& file) {
  const std::lock_guard lock(file.mutex);
  if (!file.file.is_open()) {
    file.file =
        io::OutputFile::create(dir_fd_.get(), dir_path_, file.spec.names, options_.use_direct);
    const std::lock_guard created_lock(created_mutex_);
    created_.push_back(file.file.name());
  }
  const std::uint64_t end = align_up(file.data_end, io::kDirectAlignment);
  if (end > file.allocated_end) {
    file.file.preallocate(file.allocated_end, end - file.allocated_end);
    file.allocated_end = end;
  }
}

void WriteJob::complete(Window& window, OpenFile& file) {
  for (std::uint32_t s = file.first_segment; s < file.first_segment + file.segment_count; ++s) {
    file.blocks.append(window.segment_parts[s]);
    window.segment_parts[s] = {};
  }
  for (std::uint32_t i = file.first_item; i < file.first_item + file.item_count; ++i) {
    WriteItem& item = window.items[i];
    item.row.payload_crc = payload_crc(window.layout, window.piece_crcs, i);
    append_row(item.row, file.index);
  }
  file.row_count += file.item_count;
  if (file.is_last_call) finish(file);
}

void WriteJob::finish(OpenFile& file) {
  open(file);
  file.tail.rank = file.spec.rank;
  file.tail.file_id = file.spec.file_id;
  file.tail.data_bytes = file.data_end;
  const std::vector<std::byte> footer =
      encode_footer(file.index, file.row_count, file.blocks.finish(file.data_end), file.tail);
  Slot aligned(align_up(footer.size(), io::kDirectAlignment));
  std::memcpy(aligned.data(), footer.data(), footer.size());
  file.file.preallocate(file.tail.index_offset, footer.size());
  file.file.write_at(aligned.data(), footer.size(), file.tail.index_offset);
  (file.file.is_direct() ? direct_bytes_ : buffered_bytes_).fetch_add(footer.size());
  if (options_.is_durable) file.file.sync();
  file.file.close(file.tail.file_bytes);
  file.index = {};
  file.is_finished = true;
}

std::vector<FileResult> WriteJob::results() const {
  std::vector<FileResult> results;
  for (const OpenFile& file : files_) {
    if (!file.is_finished) continue;
    results.push_back(
        {file.file.name(), file.spec.file_id, file.tail.file_bytes, file.tail.tail_crc});
  }
  return results;
}

void WriteJob::abandon() noexcept {
  for (OpenFile& file : files_) file.file = io::OutputFile();
  dir_fd_ = UniqueFd();
}

std::vector<std::string> WriteJob::created() const {
  const std::lock_guard lock(created_mutex_);
  return created_;
}

WriteReport WriteJob::report() const {
  return {direct_bytes_.load(), buffered_bytes_.load(), in_place_bytes_.load(), slot_bytes_};
}

}  // namespace dcpx::engine
