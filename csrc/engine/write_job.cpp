#include "engine/write_job.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "engine/device_fill.h"
#include "engine/write_job_parts.h"
#include "io/huge_pages.h"

namespace dcpx::engine {

namespace {

// What one system call writes: bounds the time until a stopped job ends, and of what goes through
// the page cache the time until its first byte is on its way to the disk.
constexpr std::uint64_t kWriteBytes = 8 << 20;
constexpr std::uint64_t kBufferedWriteBytes = 1 << 20;
// What a file may leave to the page cache, for each worker, before one waits: so that the fsync at
// the end is short.
constexpr std::uint64_t kBehindBytes = 8 << 20;
constexpr std::uint64_t kFooterPieceBytes = 1 << 20;

}  // namespace

WriteJob::WriteJob(int dir_fd, std::string dir_path, const WriteOptions& options)
    : dir_path_(std::move(dir_path)), options_(options) {
  if (options_.is_streamed) {
    queue_ = std::make_shared<UploadQueue>();
  } else {
    dir_fd_ = UniqueFd::copy_of(dir_fd);
    if (!dir_fd_.is_open()) throw storage_error("dup", dir_path_, errno);
  }
  DCPX_CHECK(options_.workers > 0 && options_.files_at_once > 0 &&
                 options_.segment_bytes >= kMinSegmentBytes &&
                 options_.segment_bytes % io::kDirectAlignment == 0,
             "a job needs workers, and segments of 256 KiB or more in whole pages");
}

WriteJob::~WriteJob() = default;

std::uint32_t WriteJob::add_file(FileSpec spec) {
  files_.push_back(std::make_unique<OpenFile>());
  OpenFile& file = *files_.back();
  file.spec = std::move(spec);
  file.number = static_cast<std::uint32_t>(files_.size() - 1);
  if (queue_ != nullptr) queue_->add_file();
  return file.number;
}

// A direct write from small pages falls apart at the device, and is slower than a copy to a slot,
// which lies on huge ones: 2 GiB of 64 MiB tensors, 8 workers, of the disk's speed in interleaved
// rounds: small pages in place 0.93, through slots of 2 MiB 0.99; huge ones in place 1.08, through
// slots 1.01.
void WriteJob::choose_in_place(std::vector<WriteItem>& items) const {
  io::HugePages pages;
  const std::uint64_t large_bytes = min_body_bytes(options_.segment_bytes);
  for (WriteItem& item : items) {
    item.is_in_place = item.is_dense && item.device < 0 && item.row.payload_bytes >= large_bytes &&
                       (item.is_lasting || queue_ == nullptr) &&
                       options_.in_place != InPlace::kNever &&
                       (options_.in_place == InPlace::kAlways || !options_.use_direct ||
                        pages.hold(item.source, item.row.payload_bytes));
  }
}

void WriteJob::place(Window& window, bool is_final) {
  std::vector<WriteItem>& items = window.items;
  WriteLayout& layout = window.layout;
  for (const auto& file : files_) file->segment_count = file->item_count = 0;
  std::uint64_t call_bytes = 0;
  for (const WriteItem& item : items) call_bytes += item.row.payload_bytes;
  total_bytes_.fetch_add(call_bytes, std::memory_order_relaxed);
  choose_in_place(items);
  const SegmentBytes segment_bytes =
      segment_bytes_for(options_.segment_bytes, call_bytes, options_.workers);
  std::uint32_t previous = kNoItem;
  for (std::uint32_t first = 0; first < items.size();) {
    const std::uint32_t index = items[first].file;
    DCPX_CHECK(index < files_.size() && (previous == kNoItem || index > previous),
               "items must be sorted by file");
    previous = index;
    std::uint32_t end = first;
    while (end < items.size() && items[end].file == index) ++end;
    OpenFile& file = *files_[index];
    DCPX_CHECK(!file.is_finished && !file.is_last_call, "items for a file that is complete");
    file.first_segment = static_cast<std::uint32_t>(layout.segments.size());
    file.first_item = first;
    file.item_count = end - first;
    file.data_end = lay_out(items, first, end - first,
                            align_up(file.data_end, io::kDirectAlignment), segment_bytes, layout);
    file.segment_count = static_cast<std::uint32_t>(layout.segments.size()) - file.first_segment;
    file.segments_left.store(file.segment_count);
    for (std::uint32_t i = first; i < end; ++i) file.index_bytes += row_bytes(items[i].row);
    file.is_last_call = is_final || end < items.size();
    // Here and not where it fills: malloc keeps what a thread has had for threads to come.
    const std::uint64_t footer = footer_bytes(file.index_bytes, block_count_of(file.data_end));
    const std::uint64_t held = file.index.capacity();
    if (footer > held) file.index.reserve(file.is_last_call ? footer : std::max(footer, 2 * held));
    first = end;
  }
  layout.first_piece.resize(items.size() + 1, static_cast<std::uint32_t>(layout.pieces.size()));
  layout.pieces_before_seam.resize(items.size(), 0);
}

void WriteJob::prepare(Window& window, bool is_final) {
  place(window, is_final);
  const std::vector<WriteItem>& items = window.items;
  const WriteLayout& layout = window.layout;
  window.sums.of_pieces.assign(layout.pieces.size(), 0);
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
  if (queue_ == nullptr) {
    window.ready = ready_segments(layout, options_.files_at_once);
    return;
  }
  window.ready.resize(layout.segments.size());  // in the order in which they go out
  std::iota(window.ready.begin(), window.ready.end(), 0U);
  announce_sizes();
}

void WriteJob::write(std::vector<WriteItem>& items, bool is_final, const PollFunction& poll,
                     const device::SourceEvents* after) {
  DCPX_CHECK(items.size() < kNoItem, "too many items in one call");
  const Stopwatch watch(spans_, SpanKind::kEngine);
  Window window{items, {}, {}, {}, {}, {}, {}, {}, {}};
  for (const WriteItem& item : items) {
    if (item.device < 0) continue;
    DCPX_CHECK(after != nullptr && after->has(item.device), "items of a device without its event");
    window.devices.insert(item.device);
  }
  prepare(window, is_final);
  // Of a streamed job before others begin: what their last parts hold would not come back before
  // these end.
  if (queue_ != nullptr) complete_others(window, is_final, poll);
  if (!window.ready.empty()) {
    FittingWorkers fitting{static_cast<unsigned>(
        std::min<std::size_t>(options_.workers, window.layout.segments.size()))};
    if (queue_ != nullptr) {
      fitting = make_queue_slots(window, fitting.workers, is_final);
    } else {
      if (!window.devices.empty() && options_.memory_bytes > 0)
        fitting = fitting_workers(fitting.workers, 1, options_.segment_bytes, window.devices.size(),
                                  options_.memory_bytes);
      make_slots(window, fitting.workers);
    }
    run_workers(
        fitting.workers,
        [&](unsigned number, StopFlag& stop) {
          std::byte* const slot = queue_ == nullptr ? slots_.slot(number) : nullptr;
          Worker worker{slot, stop, device::CopyStreams(after, fitting.tables)};
          if (queue_ == nullptr) {
            work(window, worker);
          } else {
            stream(window, worker);
          }
        },
        poll);
    if (queue_ != nullptr) queue_->check();
  }
  if (queue_ == nullptr) complete_others(window, is_final, poll);
  if (is_final) slots_ = JobSlots();
}

// Files whose last items came with an earlier call, or whose items hold no byte at all.
void WriteJob::complete_others(Window& window, bool is_final, const PollFunction& poll) {
  const std::vector<WriteItem>& items = window.items;
  const std::size_t done = is_final ? files_.size() : items.empty() ? 0 : items.back().file;
  StopFlag never;
  never.poll_inline(poll);
  Worker caller{nullptr, never, device::CopyStreams(nullptr)};
  for (std::size_t f = 0; f < files_.size(); ++f) {
    OpenFile& file = *files_[f];
    if (file.segment_count > 0) continue;
    if (file.item_count > 0) complete(window, file, caller);
    if (f < done && !file.is_finished && file.row_count > 0) finish(file, caller);
  }
}

// No larger than what passes through them: a save of a few bytes does not clear megabytes.
void WriteJob::make_slots(const Window& window, unsigned workers) {
  std::uint64_t slot_bytes = io::kDirectAlignment;
  for (const Segment& segment : window.layout.segments) {
    if (!segment.is_in_place) slot_bytes = std::max(slot_bytes, segment.end - segment.begin);
  }
  const bool has_devices = !window.devices.empty();
  if (slots_.holds(workers, slot_bytes, has_devices)) return;
  slots_ = JobSlots();  // first the old memory goes
  slots_ = JobSlots(workers, slot_bytes, has_devices ? *window.devices.begin() : -1);
  slot_bytes_ = std::max(slot_bytes_.load(), slots_.size_bytes());
}

void WriteJob::work(Window& window, Worker& worker) {
  while (!worker.stop.is_set()) {
    const std::uint32_t turn = window.next_ready.fetch_add(1);
    if (turn >= window.ready.size()) return;
    write_segment(window, window.ready[turn], worker);
  }
}

void WriteJob::write_segment(Window& window, std::uint32_t index, Worker& worker) {
  // A loop, not a recursion: a seam may end the last piece of the next item.
  std::vector<std::uint32_t> todo{index};
  while (!todo.empty()) {
    const std::uint32_t current = todo.back();
    todo.pop_back();
    const Segment& segment = window.layout.segments[current];
    OpenFile& file = *files_[segment.file];
    if (!open(file, worker.stop)) return;
    SegmentSummer summer;
    const std::uint64_t nbytes = segment.end - segment.begin;
    const std::byte* const source = fill(window, segment, summer, worker);
    if (source == nullptr) return;
    if (!write_bytes(file, source, nbytes, segment.begin, worker)) return;
    if (segment.is_in_place) in_place_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
    done_bytes_.fetch_add(segment.payload_bytes, std::memory_order_relaxed);
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
    if (file.segments_left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
      complete(window, file, worker);
    }
  }
}

const std::byte* WriteJob::fill(Window& window, const Segment& segment, SegmentSummer& summer,
                                Worker& worker) {
  const Stopwatch watch(spans_, SpanKind::kCopy, segment.end - segment.begin);
  if (segment.is_in_place) {
    const Piece& piece = window.layout.pieces[segment.first_piece];
    return sum_in_place(window.layout, segment, window.items, window.sums, summer, worker.stop)
               ? window.items[piece.item].source + piece.begin
               : nullptr;
  }
  if (!window.devices.empty()) {
    fetch_payloads(window.layout, segment, window.items, worker.streams, worker.stop, worker.slot);
  }
  return fill_segment(window.layout, segment, window.items, window.sums, summer, worker.stop,
                      worker.slot)
             ? worker.slot
             : nullptr;
}

bool WriteJob::write_bytes(OpenFile& file, const std::byte* data, std::uint64_t nbytes,
                           std::uint64_t offset, Worker& worker) {
  const Stopwatch watch(spans_, SpanKind::kWrite, nbytes);
  std::uint64_t count = 0;
  for (std::uint64_t at = 0; at < nbytes; at += count) {
    if (worker.stop.is_set()) return false;
    count = std::min(file.file.is_direct() ? kWriteBytes : kBufferedWriteBytes, nbytes - at);
    file.file.write_at(data + at, count, offset + at);
    const bool is_direct = file.file.is_direct();
    (is_direct ? direct_bytes_ : buffered_bytes_).fetch_add(count, std::memory_order_relaxed);
    if (is_direct || !options_.is_durable) continue;
    write_back(file, offset + at, count);
  }
  return true;
}

// Starts to write a range of the page cache back, and waits for the oldest ones where too much is
// behind. REQUIRES: a segment of the file is not done, so that nobody closes it.
void WriteJob::write_back(OpenFile& file, std::uint64_t begin, std::uint64_t nbytes) {
  file.file.start_write_back(begin, nbytes);
  Lock lock(file.mutex);
  file.behind.push_back({begin, nbytes});
  file.behind_bytes += nbytes;
  while (file.behind_bytes > kBehindBytes * options_.workers && file.behind.size() > 1) {
    const OpenFile::Range oldest = file.behind.front();
    file.behind.pop_front();
    file.behind_bytes -= oldest.nbytes;
    lock.unlock();
    file.file.wait_write_back(oldest.begin, oldest.nbytes);
    lock.lock();
  }
}

bool WriteJob::open(OpenFile& file, const StopFlag& stop) {
  const Lock lock(file.mutex);
  if (!file.file.is_open()) {
    file.file =
        io::OutputFile::create(dir_fd_.get(), dir_path_, file.spec.names, options_.use_direct);
    const Lock created_lock(created_mutex_);
    created_.push_back(file.file.name());
  }
  std::uint64_t end = align_up(file.data_end, io::kDirectAlignment);
  if (file.is_last_call) end += footer_bytes(file.index_bytes, block_count_of(file.data_end));
  if (end > file.allocated_end) {
    const std::uint64_t nbytes = end - file.allocated_end;
    if (!file.file.preallocate(file.allocated_end, nbytes, [&] { return stop.is_set(); }))
      return false;
    file.allocated_end = end;
  }
  return true;
}

void WriteJob::complete(Window& window, OpenFile& file, Worker& worker) {
  for (std::uint32_t s = file.first_segment; s < file.first_segment + file.segment_count; ++s) {
    file.blocks.append(window.segment_parts[s]);
    window.segment_parts[s] = {};
  }
  for (std::uint32_t i = file.first_item; i < file.first_item + file.item_count; ++i) {
    WriteItem& item = window.items[i];
    item.row.payload_crc = window.sums.of_item(window.layout, item, i);
    append_row(item.row, file.index);
  }
  file.row_count += file.item_count;
  if (file.is_last_call) finish(file, worker);
}

void WriteJob::finish(OpenFile& file, Worker& worker) {
  file.is_last_call = true;
  if (queue_ == nullptr && !open(file, worker.stop)) return;
  file.tail.rank = file.spec.rank;
  file.tail.file_id = file.spec.file_id;
  file.tail.save_id = file.spec.save_id;
  file.tail.data_bytes = file.data_end;
  std::vector<std::byte> footer = encode_footer(std::move(file.index), file.row_count,
                                                file.blocks.finish(file.data_end), file.tail);
  file.index = {};
  if (queue_ != nullptr) {
    stream_footer(file, std::move(footer));
    return;
  }
  DCPX_CHECK(file.tail.file_bytes == file.allocated_end, "a footer of an unforeseen size");
  write_footer(file, footer, worker);
}

void WriteJob::write_footer(OpenFile& file, const std::vector<std::byte>& footer, Worker& worker) {
  // Through aligned memory, piece by piece: the footer of a million items has hundreds of
  // megabytes.
  const Slot aligned(std::min<std::uint64_t>(footer.size(), kFooterPieceBytes));
  for (std::uint64_t at = 0; at < footer.size(); at += kFooterPieceBytes) {
    const std::uint64_t nbytes = std::min(kFooterPieceBytes, footer.size() - at);
    std::memcpy(aligned.data(), footer.data() + at, nbytes);
    if (!write_bytes(file, aligned.data(), nbytes, file.tail.index_offset + at, worker)) return;
  }
  if (options_.is_durable) {
    const Stopwatch watch(spans_, SpanKind::kSync);
    file.file.sync();
  }
  file.file.close(file.tail.file_bytes);
  file.is_finished = true;
}

std::vector<FileResult> WriteJob::results() const {
  std::vector<FileResult> results;
  for (const auto& file : files_) {
    if (!file->is_finished) continue;
    const std::string& name = queue_ == nullptr ? file->file.name() : file->spec.names.front();
    results.push_back({name, file->spec.file_id, file->tail.file_bytes, file->tail.tail_crc});
  }
  return results;
}

void WriteJob::abandon() noexcept {
  for (const auto& file : files_) file->file = io::OutputFile();
  dir_fd_ = UniqueFd();
  slots_ = JobSlots();
  if (queue_ != nullptr) queue_->fail();
}

std::vector<std::string> WriteJob::created() const {
  const Lock lock(created_mutex_);
  return created_;
}

WriteReport WriteJob::report() const {
  const std::uint64_t done_bytes = queue_ != nullptr ? queue_->gone_bytes() : done_bytes_.load();
  return {direct_bytes_.load(),
          buffered_bytes_.load(),
          in_place_bytes_.load(),
          slot_bytes_.load(),
          done_bytes,
          total_bytes_.load(),
          spans_.total_ns(SpanKind::kCopy),
          spans_.total_ns(SpanKind::kWrite),
          spans_.total_ns(SpanKind::kSync),
          spans_.total_ns(SpanKind::kEngine)};
}

}  // namespace dcpx::engine
