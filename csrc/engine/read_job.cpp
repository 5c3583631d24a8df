#include "engine/read_job.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/bytes.h"
#include "format/crc32.h"
#include "io/page_cache.h"

namespace dcpx::engine {

struct ReadJob::OpenFile {
  explicit OpenFile(StoredFileSpec spec) : stored(std::move(spec)) {}

  StoredFile stored;
  bool is_kept_open = false;  // from locate() until the job is closed
  std::mutex mutex;           // guards prepare() and release()
  bool is_ready = false;      // for the current read()
  bool is_direct = false;
  std::uint32_t extents_left = 0;  // of the current read(), under `mutex`
  std::uint64_t first_byte = 0;    // range of the current read()
  std::uint64_t last_byte = 0;
};

struct ReadJob::Pass {
  const std::vector<ReadRegion>& regions;
  ReadPlan plan;
  std::atomic<std::uint32_t> next{0};
};

namespace {

// preadv takes at most IOV_MAX (1024) pieces.
constexpr std::size_t kMaxPieces = 1000;

std::atomic<std::uint32_t> files_kept_open{0};  // by all jobs

std::string hex32(std::uint32_t value) {
  char text[11];
  std::snprintf(text, sizeof(text), "0x%08x", value);
  return text;
}

}  // namespace

ReadJob::ReadJob(int dir_fd, std::string dir_path, const ReadOptions& options)
    : dir_fd_(::fcntl(dir_fd, F_DUPFD_CLOEXEC, 0)),
      dir_path_(std::move(dir_path)),
      options_(options) {
  if (!dir_fd_.is_open()) throw storage_error("dup", dir_path_, errno);
  DCPX_CHECK(options_.workers > 0, "a job needs a worker");
}

ReadJob::~ReadJob() { close(); }

// Descriptors are the process's: a load that failed must not starve the next one.
bool ReadJob::keep_open() const noexcept {
  if (files_kept_open.fetch_add(1) < options_.max_open_files) return true;
  files_kept_open.fetch_sub(1);
  return false;
}

std::vector<LocatedItem> ReadJob::locate(const std::vector<StoredFileSpec>& files,
                                         const std::vector<WantedItem>& wanted,
                                         const PollFunction& poll) {
  const std::size_t first_new = files_.size();
  for (const StoredFileSpec& spec : files) files_.emplace_back(spec);
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
          OpenFile& file = files_[f];
          file.stored.open(dir_fd_.get(), dir_path_);
          file.stored.locate(wanted, by_file[f], located);
          file.is_kept_open = keep_open();
          if (!file.is_kept_open) file.stored.close();
        }
      },
      poll);
  return located;
}

void ReadJob::read(const std::vector<ReadRegion>& regions, const PollFunction& poll) {
  touched_count_ = regions.size();
  touched_ = std::make_unique<std::atomic<bool>[]>(regions.size());
  for (std::size_t r = 0; r < regions.size(); ++r) touched_[r].store(false);
  for (const ReadRegion& region : regions) {
    DCPX_CHECK(region.file < files_.size(), "a region of an unknown file");
  }
  Pass pass{regions, plan_reads(regions, options_.slot_bytes), {}};
  report_.needed_bytes += pass.plan.needed_bytes;
  if (pass.plan.extents.empty()) return;
  for (OpenFile& file : files_) {
    file.extents_left = 0;
    if (file.is_ready) release(file);  // left by a read() that failed
  }
  for (const Extent& extent : pass.plan.extents) {
    OpenFile& file = files_[extent.file];
    if (file.extents_left++ == 0) file.first_byte = extent.begin, file.last_byte = extent.end;
    file.last_byte = std::max(file.last_byte, extent.end);
  }
  const auto workers =
      static_cast<unsigned>(std::min<std::size_t>(options_.workers, pass.plan.extents.size()));
  report_.slot_bytes = std::max(report_.slot_bytes, workers * options_.slot_bytes);
  run_workers(
      workers,
      [&](unsigned, StopFlag& stop) {
        Slot slot(options_.slot_bytes);
        while (!stop.is_set()) {
          const std::uint32_t turn = pass.next.fetch_add(1);
          if (turn >= pass.plan.extents.size()) return;
          const Extent& extent = pass.plan.extents[turn];
          OpenFile& file = files_[extent.file];
          prepare(file);
          read_extent(pass, extent, slot);
          const std::lock_guard lock(file.mutex);
          if (--file.extents_left == 0) release(file);
        }
      },
      poll);
}

void ReadJob::prepare(OpenFile& file) {
  const std::lock_guard lock(file.mutex);
  if (file.is_ready) return;
  if (!file.is_kept_open) file.stored.open(dir_fd_.get(), dir_path_);
  if (options_.verify && file.stored.is_verifiable()) {
    DCPX_CHECK(file.last_byte <= file.stored.data_bytes(), "a region outside of the file's data");
    file.stored.load_blocks(file.first_byte / kBlockBytes, (file.last_byte - 1) / kBlockBytes);
  }
  // Direct reads need whole aligned pages to the end of the file: only our own files promise that.
  const io::InputFile& input = file.stored.file();
  file.is_direct =
      options_.use_direct && file.stored.is_verifiable() &&
      io::resident_fraction(input.fd(), file.first_byte, file.last_byte - file.first_byte) < 0.5 &&
      input.set_direct(true);
  file.is_ready = true;
}

void ReadJob::release(OpenFile& file) noexcept {
  if (!file.is_kept_open) {
    file.stored.close();
  } else if (file.is_direct) {
    file.stored.file().set_direct(false);  // the next read() loads other blocks' checksums first
  }
  file.is_direct = file.is_ready = false;
}

void ReadJob::read_extent(Pass& pass, const Extent& extent, Slot& slot) {
  OpenFile& file = files_[extent.file];
  const bool verify = options_.verify && file.stored.is_verifiable();
  std::uint64_t begin = extent.begin;
  std::uint64_t end = extent.end;
  if (verify) {
    begin = align_down(begin, kBlockBytes);
    end = std::min(align_up(end, kBlockBytes), file.stored.data_bytes());
  }
  const std::uint64_t checked_end = end;
  if (file.is_direct) {
    begin = align_down(begin, io::kDirectAlignment);
    end = align_up(end, io::kDirectAlignment);
  }
  DCPX_CHECK(end - begin <= slot.size_bytes(), "an extent must fit its slot");
  const ReadPart* const parts = pass.plan.parts.data() + extent.first_part;
  for (std::uint32_t p = 0; p < extent.part_count; ++p) {
    touched_[parts[p].region].store(true, std::memory_order_relaxed);
  }

  // Straight to the destinations: runs land where they belong, what lies between lands in the slot.
  std::vector<iovec> pieces;
  const bool is_in_place =
      extent.is_in_place && !file.is_direct && 2 * extent.part_count + 1 <= kMaxPieces;
  if (is_in_place) {
    std::uint64_t at = begin;
    for (std::uint32_t p = 0; p < extent.part_count; ++p) {
      const ReadPart& part = parts[p];
      if (part.begin > at) pieces.push_back({slot.data() + (at - begin), part.begin - at});
      pieces.push_back({pass.regions[part.region].dest + part.dest_offset, part.end - part.begin});
      at = part.end;
      in_place_bytes_.fetch_add(part.elem_bytes, std::memory_order_relaxed);
    }
    if (end > at) pieces.push_back({slot.data() + (at - begin), end - at});
  } else {
    pieces.push_back({slot.data(), end - begin});
  }
  std::vector<iovec> unread(pieces);  // read_at() consumes what it is given
  file.stored.file().read_at(unread.data(), static_cast<int>(unread.size()), begin);
  read_bytes_.fetch_add(end - begin, std::memory_order_relaxed);
  if (file.is_direct) direct_bytes_.fetch_add(end - begin, std::memory_order_relaxed);
  if (verify) {
    pieces.back().iov_len -= end - checked_end;
    verify_extent(pass, extent, file, pieces, begin);
    verified_bytes_.fetch_add(checked_end - begin, std::memory_order_relaxed);
  }
  if (is_in_place) return;
  for (std::uint32_t p = 0; p < extent.part_count; ++p) {
    const ReadPart& part = parts[p];
    const plan::Region& simplified = pass.plan.regions[part.region];
    const plan::Region box{part.elem_bytes, part.lengths, simplified.src_strides,
                           simplified.dst_strides};
    plan::copy_region(box, slot.data() + (part.begin - begin),
                      pass.regions[part.region].dest + part.dest_offset);
  }
}

void ReadJob::verify_extent(const Pass& pass, const Extent& extent, const OpenFile& file,
                            const std::vector<iovec>& pieces, std::uint64_t begin) const {
  std::uint64_t at = begin;
  std::uint32_t crc = 0;
  for (const iovec& piece : pieces) {
    const auto* data = static_cast<const std::byte*>(piece.iov_base);
    for (std::uint64_t done = 0; done < piece.iov_len;) {
      const std::uint64_t count = std::min(kBlockBytes - at % kBlockBytes, piece.iov_len - done);
      crc = crc32(crc, data + done, static_cast<std::size_t>(count));
      done += count;
      at += count;
      if (at % kBlockBytes != 0 && at != file.stored.data_bytes()) continue;
      const std::uint64_t block = (at - 1) / kBlockBytes;
      const std::uint32_t expected = file.stored.block_crc(block);
      if (crc != expected) {
        const std::uint64_t block_begin = block * kBlockBytes;
        Error error =
            corruption_error(file.stored.file().path(), static_cast<std::int64_t>(block_begin),
                             static_cast<std::int64_t>(at - block_begin), "block checksum",
                             hex32(expected), hex32(crc));
        for (std::uint32_t p = extent.first_part; p < extent.first_part + extent.part_count; ++p) {
          const ReadPart& part = pass.plan.parts[p];
          if (part.begin < at && part.end > block_begin) {
            error.fqn = pass.regions[part.region].fqn;
            break;
          }
        }
        throw error;
      }
      crc = 0;
    }
  }
}

void ReadJob::close() noexcept {
  for (OpenFile& file : files_) {
    file.stored.close();
    file.is_ready = false;
    if (std::exchange(file.is_kept_open, false)) files_kept_open.fetch_sub(1);
  }
  dir_fd_ = UniqueFd();
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
  return report;
}

}  // namespace dcpx::engine
