#include "engine/verify_job.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/bytes.h"
#include "common/slot.h"
#include "engine/block_sums.h"
#include "format/crc32.h"
#include "io/page_cache.h"

namespace dcpx::engine {
namespace {

// What is read from the page cache at once, so that it is summed while in the CPU's.
constexpr std::uint64_t kWindowBytes = 256 << 10;
static_assert(kWindowBytes % kBlockBytes == 0);
constexpr std::size_t kMaxKeptEnds = 32;  // of objects: 8 MiB
constexpr const char* kReplaced = "the file was replaced while it was checked";

// A store tells by the tag that an object was replaced.
Finding unreadable(const io::InputFile& file, const Error& error) {
  if (!file.is_object() || error.sys_errno != ESTALE) return {FindingKind::kUnreadable, error};
  return {
      FindingKind::kUnreadable,
      corruption_error(file.path(), 0, static_cast<std::int64_t>(file.size_bytes()), kReplaced)};
}

}  // namespace

struct VerifyJob::Cell {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::size_t first_piece = 0;  // of the file's, where it has ranges
  std::size_t piece_count = 0;
};

// A part of a range within one window.
struct VerifyJob::Piece {
  std::uint64_t begin = 0;
  std::uint32_t nbytes = 0;
  std::uint32_t range = 0;
  std::uint32_t crc = 0;
};

// Neighbouring blocks that are damaged: where a whole file is, they are many.
struct VerifyJob::BadRun {
  std::uint32_t file = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
  std::uint64_t blocks = 0;
  std::uint32_t expected = 0;  // of the first
  std::uint32_t found = 0;
};

struct VerifyJob::File {
  std::string path;
  bool has_footer = false;
  Tail tail{};
  std::uint64_t inode = 0;
  std::uint64_t size_bytes = 0;
  std::vector<SummedRange> ranges;
  std::vector<Piece> pieces;            // each written by the worker of its cell alone
  std::atomic<bool> is_partial{false};  // some of its bytes could not be read

  std::mutex mutex;  // guards prepare()
  bool is_ready = false;
  bool is_lost = false;
  std::atomic<std::uint32_t> cells_left{0};
  io::InputFile input;  // of an object from the begin on: it costs no descriptor
  bool keeps_end = false;
  BlockSums sums;
};

VerifyJob::VerifyJob(int dir_fd, std::string dir_path, const VerifyOptions& options)
    : VerifyJob({UniqueFd::copy_of(dir_fd), nullptr, std::move(dir_path)}, options) {
  if (!folder_.dir_fd.is_open()) throw storage_error("dup", folder_.path, errno);
}

VerifyJob::VerifyJob(std::shared_ptr<io::ObjectStore> store, std::string dir_path,
                     const VerifyOptions& options)
    : VerifyJob({UniqueFd(), std::move(store), std::move(dir_path)}, options) {}

VerifyJob::VerifyJob(InputFolder folder, const VerifyOptions& options)
    : folder_(std::move(folder)), options_(options) {
  DCPX_CHECK(options_.workers > 0, "a job needs a worker");
  DCPX_CHECK(
      options_.slot_bytes >= kWindowBytes && (options_.slot_bytes & (options_.slot_bytes - 1)) == 0,
      "a slot holds whole windows");
}

VerifyJob::~VerifyJob() = default;

bool VerifyJob::has_footer(const std::string& path) {
  io::InputFile input = folder_.open(path);
  bool has_magic = false;
  if (input.size_bytes() >= kTailBytes) {
    std::byte raw[kTailBytes];
    input.read_at(raw, kTailBytes, input.size_bytes() - kTailBytes);
    has_magic = has_tail_magic(raw);
  }
  if (input.is_object()) {
    looked_path_ = path;
    looked_ = std::move(input);
  }
  return has_magic;
}

// Opens a file; an object that has_footer() has just looked at costs no further request.
io::InputFile VerifyJob::take(const std::string& path) {
  if (!looked_.is_object() || looked_path_ != path) return folder_.open(path);
  return std::exchange(looked_, io::InputFile());
}

VerifyJob::File& VerifyJob::add(const std::string& path, io::InputFile input) {
  File& file = *files_.emplace_back(std::make_unique<File>());
  file.path = path;
  file.inode = input.inode();
  file.size_bytes = input.size_bytes();
  if (input.is_object()) {
    file.keeps_end = files_.size() <= kMaxKeptEnds;
    file.keeps_end ? input.forget_all_but_end() : input.forget();
    file.input = std::move(input);
  }
  return file;
}

FooterFacts VerifyJob::add_file(const std::string& path, std::uint64_t* file_bytes,
                                std::vector<Finding>& findings) {
  io::InputFile input = take(path);
  *file_bytes = input.size_bytes();
  FooterFacts facts = check_footer(input, findings);
  if (!facts.has_tail || facts.tail.data_bytes == 0) return facts;
  File& file = add(path, std::move(input));
  file.has_footer = true;
  file.tail = facts.tail;
  cut_blocks(file, static_cast<std::uint32_t>(files_.size() - 1));
  return facts;
}

void VerifyJob::add_foreign(const std::string& path, const std::vector<ForeignItem>& items,
                            std::uint64_t* file_bytes, std::vector<Finding>& findings) {
  io::InputFile input = take(path);
  *file_bytes = input.size_bytes();
  const std::vector<SummedRange> ranges = check_items(input, items, findings);
  if (ranges.empty()) return;
  File& file = add(path, std::move(input));
  cut_ranges(file, static_cast<std::uint32_t>(files_.size() - 1), ranges);
}

void VerifyJob::cut_blocks(File& file, std::uint32_t number) {
  const std::uint64_t end = file.tail.data_bytes;
  for (std::uint64_t begin = 0; begin < end; begin += options_.slot_bytes) {
    cells_.push_back({number, begin, std::min(begin + options_.slot_bytes, end), 0, 0});
    file.cells_left.fetch_add(1);
  }
  total_bytes_ += end;
}

void VerifyJob::cut_ranges(File& file, std::uint32_t number,
                           const std::vector<SummedRange>& ranges) {
  file.ranges = ranges;
  for (std::uint32_t r = 0; r < ranges.size(); ++r) {
    std::uint64_t at = ranges[r].offset;
    const std::uint64_t end = at + ranges[r].nbytes;
    while (at < end) {
      const std::uint64_t stop = std::min(end, align_down(at, kWindowBytes) + kWindowBytes);
      const std::uint64_t cell_begin = align_down(at, options_.slot_bytes);
      const bool is_new = cells_.empty() || cells_.back().file != number ||
                          align_down(cells_.back().begin, options_.slot_bytes) != cell_begin;
      if (is_new) {
        cells_.push_back({number, at, at, file.pieces.size(), 0});
        file.cells_left.fetch_add(1);
      }
      cells_.back().end = stop;
      ++cells_.back().piece_count;
      file.pieces.push_back({at, static_cast<std::uint32_t>(stop - at), r, 0});
      at = stop;
    }
    total_bytes_ += ranges[r].nbytes;
  }
}

std::vector<Finding> VerifyJob::sum(const PollFunction& poll) {
  const auto workers =
      static_cast<unsigned>(std::min<std::size_t>(options_.workers, cells_.size()));
  if (workers > 0) {
    const bool has_slots = folder_.store == nullptr;
    SlotArena slots(workers, has_slots ? options_.slot_bytes : io::kDirectAlignment);
    std::atomic<std::size_t> next{0};
    run_workers(
        workers,
        [&](unsigned number, StopFlag& stop) {
          for (std::size_t c = next.fetch_add(1); c < cells_.size() && !stop.is_set();
               c = next.fetch_add(1)) {
            const Cell& cell = cells_[c];
            File& file = *files_[cell.file];
            if (prepare(file)) {
              has_slots ? read_cell(cell, slots.slot(number), stop) : fetch_cell(cell);
            }
            if (file.cells_left.fetch_sub(1) == 1) release(file);
          }
        },
        poll);
  }
  for (const auto& file : files_) join_ranges(*file);
  join_runs();
  cells_.clear();
  files_.clear();
  std::sort(findings_.begin(), findings_.end(), [](const Finding& a, const Finding& b) {
    return a.error.path != b.error.path ? a.error.path < b.error.path
                                        : a.error.offset < b.error.offset;
  });
  return std::exchange(findings_, {});
}

// False where the file cannot be looked at any more, which is said once.
bool VerifyJob::prepare(File& file) {
  const std::lock_guard lock(file.mutex);
  if (file.is_ready) return !file.is_lost;
  file.is_ready = true;
  try {
    if (!file.input.is_object()) file.input = folder_.open(file.path);
    const std::uint64_t size = file.input.size_bytes();
    if (file.input.inode() != file.inode || size != file.size_bytes) {
      throw corruption_error(file.input.path(), 0, static_cast<std::int64_t>(size), kReplaced);
    }
    if (file.has_footer) {
      std::vector<Finding> findings;
      file.sums = read_block_sums(file.input, file.tail, findings);
      for (Finding& finding : findings) add(std::move(finding));
    }
    if (file.input.is_object()) {
      file.keeps_end ? file.input.forget_all_but_end() : file.input.forget();
    } else if (options_.use_direct && io::resident_fraction(file.input.fd(), 0, size) < 1.0) {
      file.input.open_direct();
    }
  } catch (const Error& error) {
    file.is_lost = true;
    file.is_partial = true;
    add(unreadable(file.input, error));
  }
  return !file.is_lost;
}

void VerifyJob::release(File& file) noexcept {
  file.input = io::InputFile();
  file.sums = BlockSums();
}

void VerifyJob::read_cell(const Cell& cell, std::byte* slot, const StopFlag& stop) {
  File& file = *files_[cell.file];
  std::uint64_t begin = align_down(cell.begin, io::kDirectAlignment);
  const bool is_direct =
      file.input.has_direct() && align_up(cell.end, io::kDirectAlignment) <= file.size_bytes &&
      io::resident_fraction(file.input.fd(), cell.begin, cell.end - cell.begin) < 0.5;
  const std::uint64_t step = is_direct ? options_.slot_bytes : kWindowBytes;
  while (begin < cell.end && !stop.is_set()) {
    const std::uint64_t end = std::min(align_down(begin, step) + step, cell.end);
    const std::uint64_t read_end = is_direct ? align_up(end, io::kDirectAlignment) : end;
    try {
      iovec part{slot, static_cast<std::size_t>(read_end - begin)};
      file.input.read_at(&part, 1, begin, is_direct);
      if (is_direct) direct_bytes_.fetch_add(read_end - begin, std::memory_order_relaxed);
      sum_range(cell, slot, begin, end);
    } catch (const Error& error) {  // the rest of the file may be readable
      file.is_partial = true;
      add({FindingKind::kUnreadable, error});
    }
    begin = end;
  }
}

// A request that failed was repeated before: what of the object is left is not asked for.
void VerifyJob::fetch_cell(const Cell& cell) {
  File& file = *files_[cell.file];
  if (file.is_partial) return;
  try {
    io::ObjectStore::Bytes fetched;
    const std::byte* data = file.input.kept(cell.begin, cell.end - cell.begin);
    if (data == nullptr) {
      fetched = file.input.fetch(cell.begin, cell.end - cell.begin);
      data = fetched.data;
    }
    sum_range(cell, data, cell.begin, cell.end);
  } catch (const Error& error) {
    if (!file.is_partial.exchange(true)) add(unreadable(file.input, error));
  }
}

void VerifyJob::sum_range(const Cell& cell, const std::byte* data, std::uint64_t begin,
                          std::uint64_t end) {
  File& file = *files_[cell.file];
  if (file.has_footer) {
    sum_blocks(cell, data, begin, end);
  } else {
    sum_pieces(file, cell, data, begin, end);
  }
}

void VerifyJob::sum_pieces(File& file, const Cell& cell, const std::byte* data, std::uint64_t begin,
                           std::uint64_t end) {
  const auto pieces = file.pieces.begin() + static_cast<std::ptrdiff_t>(cell.first_piece);
  const auto last = pieces + static_cast<std::ptrdiff_t>(cell.piece_count);
  auto piece = std::lower_bound(pieces, last, begin,
                                [](const Piece& a, std::uint64_t at) { return a.begin < at; });
  for (; piece != last && piece->begin < end; ++piece) {
    piece->crc = crc32(0, data + (piece->begin - begin), piece->nbytes);
    done_bytes_.fetch_add(piece->nbytes, std::memory_order_relaxed);
  }
}

void VerifyJob::sum_blocks(const Cell& cell, const std::byte* data, std::uint64_t begin,
                           std::uint64_t end) {
  const BlockSums& sums = files_[cell.file]->sums;
  std::vector<BadRun> runs;
  std::uint64_t done = 0;
  for (std::uint64_t at = begin; at < end; at += kBlockBytes) {
    const std::uint64_t nbytes = std::min(end - at, kBlockBytes);
    const std::uint64_t block = at / kBlockBytes;
    if (!sums.is_known[static_cast<std::size_t>(block / kPageEntries)]) continue;
    const std::uint32_t found = crc32(0, data + (at - begin), static_cast<std::size_t>(nbytes));
    const std::uint32_t expected = sums.crcs[static_cast<std::size_t>(block)];
    done += nbytes;
    if (found == expected) continue;
    if (!runs.empty() && runs.back().end == at) {
      runs.back().end = at + nbytes;
      ++runs.back().blocks;
    } else {
      runs.push_back({cell.file, at, at + nbytes, 1, expected, found});
    }
  }
  done_bytes_.fetch_add(done, std::memory_order_relaxed);
  if (runs.empty()) return;
  const std::lock_guard lock(mutex_);
  bad_runs_.insert(bad_runs_.end(), runs.begin(), runs.end());
}

// The pieces of a range lie one behind the other.
void VerifyJob::join_ranges(File& file) {
  if (file.is_partial) return;
  std::size_t p = 0;
  for (std::uint32_t r = 0; r < file.ranges.size(); ++r) {
    const SummedRange& range = file.ranges[r];
    std::uint32_t found = 0;
    for (; p < file.pieces.size() && file.pieces[p].range == r; ++p)
      found = crc32_combine(found, file.pieces[p].crc, file.pieces[p].nbytes);
    if (found == range.crc) continue;
    add({FindingKind::kData,
         corruption_error(folder_.path + "/" + file.path, static_cast<std::int64_t>(range.offset),
                          static_cast<std::int64_t>(range.nbytes), "checksum of a zip's record",
                          hex32(range.crc), hex32(found))});
  }
}

void VerifyJob::join_runs() {
  std::sort(bad_runs_.begin(), bad_runs_.end(), [](const BadRun& a, const BadRun& b) {
    return a.file != b.file ? a.file < b.file : a.begin < b.begin;
  });
  for (std::size_t r = 0; r < bad_runs_.size();) {
    BadRun run = bad_runs_[r];
    for (++r;
         r < bad_runs_.size() && bad_runs_[r].file == run.file && bad_runs_[r].begin == run.end;
         ++r) {
      run.end = bad_runs_[r].end;
      run.blocks += bad_runs_[r].blocks;
    }
    const std::string what = run.blocks == 1 ? "checksum of a block"
                                             : "checksums of " + std::to_string(run.blocks) +
                                                   " blocks, of which the first";
    add({FindingKind::kData, corruption_error(folder_.path + "/" + files_[run.file]->path,
                                              static_cast<std::int64_t>(run.begin),
                                              static_cast<std::int64_t>(run.end - run.begin), what,
                                              hex32(run.expected), hex32(run.found))});
  }
  bad_runs_.clear();
}

void VerifyJob::add(Finding finding) {
  const std::lock_guard lock(mutex_);
  findings_.push_back(std::move(finding));
}

}  // namespace dcpx::engine
