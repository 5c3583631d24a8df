#include "engine/read_job.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>
#include <utility>

#include "common/bytes.h"
#include "engine/block_sums.h"
#include "format/crc32.h"
#include "io/page_cache.h"

namespace dcpx::engine {

struct ReadJob::OpenFile {
  explicit OpenFile(StoredFileSpec spec) : stored(std::move(spec)) {}

  StoredFile stored;
  bool is_kept_open = false;  // from locate() until the job is closed
  std::mutex mutex;           // guards prepare()
  // Of the current read():
  std::atomic<bool> is_ready{false};
  std::atomic<std::uint32_t> cells_left{0};
  std::uint64_t first_byte = 0;
  std::uint64_t last_byte = 0;
};

struct ReadJob::Pass {
  const std::vector<ReadRegion>& regions;
  std::set<int> devices;  // that destinations are on
  ReadPlan plan;
  std::uint64_t slot_bytes = 0;  // no larger than what passes through
  std::atomic<std::uint32_t> next{0};
};

namespace {

std::atomic<std::uint32_t> files_kept_open{0};  // by all jobs
constexpr std::size_t kMaxKeptEnds = 32;        // of objects: 8 MiB

// Tells an error of a device's copy which tensor it was about. REQUIRES: where `copy` asks a device
// for anything, `fqn` is one.
template <typename Copy>
void with_name(const std::string* fqn, const Copy& copy) {
  try {
    copy();
  } catch (Error& error) {
    if (error.code() == ErrorCode::kStaging && error.fqn.empty()) error.fqn = *fqn;
    throw;
  }
}

// A slot and the copies from there to devices that are under way.
struct DeviceTurn {
  std::byte* slot = nullptr;
  device::CopyStreams streams;
  const std::string* fqn = nullptr;  // of the first region that they are for; nullptr: no copies

  void submit(const StopFlag& stop) {
    if (fqn != nullptr) with_name(fqn, [&] { streams.submit_all(&stop); });
  }
  // Afterwards the slot may be written to. Blocks.
  void wait(const StopFlag& stop) {
    if (fqn == nullptr) return;
    with_name(fqn, [&] {
      streams.finish_all(stop, ("the copies of '" + *fqn + "' and its neighbours").c_str());
    });
    fqn = nullptr;
  }
};

}  // namespace

struct ReadJob::Worker {
  std::vector<DeviceTurn> turns;  // two where devices copy from one while the other is filled
  std::size_t turn = 0;
  CellReads reads{};
  ExtentPieces layout{};

  DeviceTurn& current() { return turns[turn]; }
};

ReadJob::ReadJob(int dir_fd, std::string dir_path, const ReadOptions& options)
    : folder_{UniqueFd::copy_of(dir_fd), nullptr, std::move(dir_path)}, options_(options) {
  if (!folder_.dir_fd.is_open()) throw storage_error("dup", folder_.path, errno);
  DCPX_CHECK(options_.workers > 0, "a job needs a worker");
}

ReadJob::ReadJob(std::shared_ptr<io::ObjectStore> store, std::string dir_path,
                 const ReadOptions& options)
    : folder_{UniqueFd(), std::move(store), std::move(dir_path)}, options_(options) {
  DCPX_CHECK(options_.workers > 0, "a job needs a worker");
  options_.use_direct = false;
}

ReadJob::~ReadJob() { close(); }

// Descriptors are the process's: a load that failed must not starve the next one.
bool ReadJob::keep_open() const noexcept {
  if (folder_.store != nullptr) return true;  // costs no descriptor
  if (files_kept_open.fetch_add(1) < options_.max_open_files) return true;
  files_kept_open.fetch_sub(1);
  return false;
}

std::vector<LocatedItem> ReadJob::locate(const std::vector<StoredFileSpec>& files,
                                         const std::vector<WantedItem>& wanted,
                                         const PollFunction& poll) {
  const Stopwatch watch(spans_, SpanKind::kEngine);
  const std::size_t first_new = files_.size();
  for (const StoredFileSpec& spec : files) files_.push_back(std::make_unique<OpenFile>(spec));
  std::vector<std::vector<std::uint32_t>> by_file(files_.size());
  for (std::uint32_t i = 0; i < wanted.size(); ++i) {
    DCPX_CHECK(wanted[i].file >= first_new && wanted[i].file < files_.size(),
               "an item of a file that this call does not add");
    by_file[wanted[i].file].push_back(i);
  }
  std::vector<LocatedItem> located(wanted.size());
  std::atomic<std::size_t> next{first_new};
  const auto workers = static_cast<unsigned>(std::min<std::size_t>(options_.workers, files.size()));
  if (workers == 0) return located;
  run_workers(
      workers,
      [&](unsigned, StopFlag& stop) {
        for (std::size_t f = next.fetch_add(1); f < files_.size() && !stop.is_set();
             f = next.fetch_add(1)) {
          const Stopwatch own_watch(spans_, SpanKind::kLocate);
          OpenFile& file = *files_[f];
          file.stored.open(folder_);
          file.stored.locate(wanted, by_file[f], files_.size() <= kMaxKeptEnds, located);
          file.is_kept_open = keep_open();
          if (!file.is_kept_open) file.stored.close();
        }
      },
      leaving_.poll_with(poll, folder_.path));
  return located;
}

bool ReadJob::is_checked(const OpenFile& file) const noexcept {
  return options_.verify && file.stored.is_verifiable();
}

void ReadJob::read(const std::vector<ReadRegion>& regions, const PollFunction& poll,
                   const device::SourceEvents* after) {
  const Stopwatch watch(spans_, SpanKind::kEngine);
  touched_count_ = regions.size();
  touched_ = std::make_unique<std::atomic<bool>[]>(regions.size());
  for (std::size_t r = 0; r < regions.size(); ++r) touched_[r].store(false);
  Pass pass{regions, {}, {}, 0, {}};
  for (const ReadRegion& region : regions) {
    if (region.device < 0) continue;
    DCPX_CHECK(after != nullptr && after->has(region.device), "a region of an unmarked device");
    pass.devices.insert(region.device);
  }
  start(pass);
  if (pass.plan.cells.empty()) return;
  auto workers =
      static_cast<unsigned>(std::min<std::size_t>(options_.workers, pass.plan.cells.size()));
  unsigned turns = 1;
  std::size_t tables = 1;
  if (!pass.devices.empty()) {
    if (pass.plan.cells.size() > workers && options_.max_slots != 1) turns = 2;
    if (options_.max_slots > 0) {
      const FittingWorkers fitting =
          fitting_workers(workers, turns, options_.slot_bytes, pass.devices.size(),
                          options_.max_slots * options_.slot_bytes);
      workers = fitting.workers;
      tables = fitting.tables;
    }
  }
  const bool has_slots = folder_.store == nullptr || !pass.devices.empty();
  JobSlots slots(workers * turns, has_slots ? pass.slot_bytes : io::kDirectAlignment,
                 pass.devices.empty() ? -1 : *pass.devices.begin());
  report_.slot_bytes = std::max(report_.slot_bytes, slots.size_bytes());
  try {
    run_workers(
        workers,
        [&](unsigned number, StopFlag& stop) {
          Worker worker;
          worker.turns.reserve(turns);
          for (unsigned turn = 0; turn < turns; ++turn) {
            worker.turns.push_back(
                {slots.slot(number * turns + turn), device::CopyStreams(after, tables), nullptr});
          }
          work(pass, worker, stop);
        },
        leaving_.poll_with(poll, folder_.path));
  } catch (...) {  // files whose last cell never came
    for (const auto& file : files_) release(*file);
    throw;
  }
}

void ReadJob::start(Pass& pass) {
  for (const auto& file : files_) file->cells_left = 0;
  pass.plan = plan_reads(pass.regions, files_.size(), options_.slot_bytes);
  report_.needed_bytes += pass.plan.needed_bytes;
  for (const CellRange& cell : pass.plan.cells) {
    OpenFile& file = *files_[cell.file];
    if (file.cells_left.fetch_add(1) == 0) file.first_byte = cell.begin;
    file.last_byte = cell.end;
    pass.slot_bytes = std::max(
        pass.slot_bytes, align_up(cell.end, kBlockBytes) - align_down(cell.begin, kBlockBytes));
  }
}

void ReadJob::work(Pass& pass, Worker& worker, const StopFlag& stop) {
  while (true) {
    const std::uint32_t number = pass.next.fetch_add(1);
    if (number >= pass.plan.cells.size() || stop.is_set()) break;
    const CellRange& cell = pass.plan.cells[number];
    OpenFile& file = *files_[cell.file];
    prepare(file);
    read_cell(pass, cell, worker, stop);
    if (file.cells_left.fetch_sub(1) == 1) release(file);
    worker.turn = (worker.turn + 1) % worker.turns.size();
    const Stopwatch watch(spans_, SpanKind::kCopy);
    worker.current().wait(stop);
  }
  const Stopwatch watch(spans_, SpanKind::kCopy);
  for (DeviceTurn& turn : worker.turns) turn.wait(stop);
}

void ReadJob::read_cell(const Pass& pass, const CellRange& cell, Worker& worker,
                        const StopFlag& stop) {
  const OpenFile& file = *files_[cell.file];
  const io::InputFile& input = file.stored.file();
  const bool is_direct = input.has_direct() &&
                         io::resident_fraction(input.fd(), cell.begin, cell.end - cell.begin) < 0.5;
  plan_cell(pass.plan, cell, {is_checked(file), is_direct, input.is_object()}, options_.slot_bytes,
            worker.reads);
  for (const Extent& extent : worker.reads.extents) {
    if (stop.is_set()) return;
    read_extent(pass, cell, extent, worker, is_direct);
  }
  const Stopwatch watch(spans_, SpanKind::kCopy);
  worker.current().submit(stop);
}

void ReadJob::prepare(OpenFile& file) {
  if (file.is_ready) return;
  const std::lock_guard lock(file.mutex);
  if (file.is_ready) return;
  const Stopwatch watch(spans_, SpanKind::kLocate);
  StoredFile& stored = file.stored;
  if (!file.is_kept_open) stored.open(folder_);
  if (is_checked(file)) {
    DCPX_CHECK(file.last_byte <= stored.data_bytes(), "a region outside of the file's data");
    stored.load_blocks(file.first_byte / kBlockBytes, (file.last_byte - 1) / kBlockBytes);
  }
  if (options_.use_direct && io::resident_fraction(stored.file().fd(), file.first_byte,
                                                   file.last_byte - file.first_byte) < 1.0) {
    stored.open_direct();
  }
  file.is_ready = true;
}

void ReadJob::release(OpenFile& file) noexcept {
  file.stored.close_direct();
  if (!file.is_kept_open) file.stored.close();
  file.is_ready = false;
}

void ReadJob::read_extent(const Pass& pass, const CellRange& cell, const Extent& extent,
                          Worker& worker, bool is_direct) {
  const OpenFile& file = *files_[extent.file];
  const io::InputFile& input = file.stored.file();
  std::uint64_t begin = extent.begin;
  std::uint64_t end = extent.end;
  if (is_checked(file)) {
    begin = align_down(begin, kBlockBytes);
    end = std::min(align_up(end, kBlockBytes), file.stored.data_bytes());
  }
  const std::uint64_t checked_end = end;
  // Direct reads come in whole pages, and a file of others may end within one.
  is_direct = is_direct && align_up(end, io::kDirectAlignment) <= input.size_bytes();
  if (is_direct) {
    begin = align_down(begin, io::kDirectAlignment);
    end = align_up(end, io::kDirectAlignment);
  }
  // Copies by devices are one batch a cell, so no extent may take another's place in the slot. The
  // host's are done at once, and there the next extent finds the slot in cache.
  DeviceTurn& turn = worker.current();
  const std::uint64_t base = pass.devices.empty() ? begin : align_down(cell.begin, kBlockBytes);
  DCPX_CHECK(begin >= base && end - base <= pass.slot_bytes, "an extent must fit its slot");
  ExtentPieces& layout = worker.layout;
  // What a store has answered is the slot, from which all is copied to where it belongs.
  const bool is_fetched = input.is_object() && pass.devices.empty();
  io::ObjectStore::Bytes fetched;
  if (is_fetched) {
    const Stopwatch watch(spans_, SpanKind::kRead, end - begin);
    fetched = input.fetch(begin, end - begin);
  }
  layout.lay_out(pass.plan, pass.regions, worker.reads.parts, extent, begin, end,
                 is_direct || is_fetched || leaving_.is_possible(),
                 is_fetched ? const_cast<std::byte*>(fetched.data) : turn.slot + (begin - base));
  const std::string* fqn = nullptr;  // of the first region on a device
  const auto touch = [&] {
    for (std::uint32_t p = extent.first_part; p < extent.first_part + extent.part_count; ++p) {
      const std::uint32_t region = worker.reads.parts[p].region;
      touched_[region].store(true, std::memory_order_relaxed);
      if (fqn == nullptr && pass.regions[region].device >= 0) fqn = &pass.regions[region].fqn;
    }
  };
  if (layout.in_place_bytes() > 0) touch();
  if (!is_fetched) {
    std::vector<iovec> unread(layout.pieces());  // read_at() consumes what it is given
    const Stopwatch watch(spans_, SpanKind::kRead, end - begin);
    input.read_at(unread.data(), static_cast<int>(unread.size()), begin, is_direct);
  }
  read_bytes_.fetch_add(end - begin, std::memory_order_relaxed);
  in_place_bytes_.fetch_add(layout.in_place_bytes(), std::memory_order_relaxed);
  if (is_direct) direct_bytes_.fetch_add(end - begin, std::memory_order_relaxed);
  if (!file.stored.is_verifiable()) {
    foreign_bytes_.fetch_add(end - begin, std::memory_order_relaxed);
  }
  if (is_checked(file)) {
    const Stopwatch watch(spans_, SpanKind::kVerify, checked_end - begin);
    verify_extent(pass, extent, worker, begin, checked_end);
    verified_bytes_.fetch_add(checked_end - begin, std::memory_order_relaxed);
  }
  const Stopwatch watch(spans_, SpanKind::kCopy, end - begin);
  const auto staying = leaving_.stay();
  if (leaving_.has_left()) return;
  touch();
  if (turn.fqn == nullptr) turn.fqn = fqn;
  with_name(turn.fqn, [&] { layout.copy_out(turn.streams); });
}

void ReadJob::verify_extent(const Pass& pass, const Extent& extent, const Worker& worker,
                            std::uint64_t begin, std::uint64_t end) const {
  const StoredFile& stored = files_[extent.file]->stored;
  std::uint64_t at = begin;
  std::uint32_t crc = 0;
  for (const iovec& piece : worker.layout.pieces()) {
    const auto* data = static_cast<const std::byte*>(piece.iov_base);
    const std::uint64_t nbytes = std::min<std::uint64_t>(piece.iov_len, end - at);
    for (std::uint64_t done = 0; done < nbytes;) {
      const std::uint64_t count = std::min(kBlockBytes - at % kBlockBytes, nbytes - done);
      crc = crc32(crc, data + done, static_cast<std::size_t>(count));
      done += count;
      at += count;
      if (at % kBlockBytes != 0 && at != end) continue;
      const std::uint64_t block = (at - 1) / kBlockBytes;
      if (crc != stored.block_crc(block)) throw damaged_block(pass, extent, worker, block, at, crc);
      crc = 0;
    }
  }
}

Error ReadJob::damaged_block(const Pass& pass, const Extent& extent, const Worker& worker,
                             std::uint64_t block, std::uint64_t end, std::uint32_t found) const {
  const StoredFile& stored = files_[extent.file]->stored;
  const std::uint64_t begin = block * kBlockBytes;
  Error error = corruption_error(stored.file().path(), static_cast<std::int64_t>(begin),
                                 static_cast<std::int64_t>(end - begin), "block checksum",
                                 hex32(stored.block_crc(block)), hex32(found));
  for (std::uint32_t p = extent.first_part; p < extent.first_part + extent.part_count; ++p) {
    const ReadPart& part = worker.reads.parts[p];
    if (part.begin < end && part.end > begin) {
      error.fqn = pass.regions[part.region].fqn;
      break;
    }
  }
  return error;
}

void ReadJob::close() noexcept {
  for (const auto& file : files_) {
    file->stored.close();
    file->is_ready = false;
    if (std::exchange(file->is_kept_open, false) && folder_.store == nullptr)
      files_kept_open.fetch_sub(1);
  }
  folder_ = {};
}

std::vector<bool> ReadJob::touched() const {
  std::vector<bool> out(touched_count_);
  for (std::size_t r = 0; r < touched_count_; ++r) out[r] = touched_[r].load();
  return out;
}

ReadReport ReadJob::report() const {
  ReadReport report = report_;
  report.read_bytes = read_bytes_.load();
  report.verified_bytes = verified_bytes_.load();
  report.in_place_bytes = in_place_bytes_.load();
  report.direct_bytes = direct_bytes_.load();
  report.foreign_bytes = foreign_bytes_.load();
  report.locate_ns = spans_.total_ns(SpanKind::kLocate);
  report.read_ns = spans_.total_ns(SpanKind::kRead);
  report.verify_ns = spans_.total_ns(SpanKind::kVerify);
  report.copy_ns = spans_.total_ns(SpanKind::kCopy);
  report.engine_ns = spans_.total_ns(SpanKind::kEngine);
  return report;
}

}  // namespace dcpx::engine
