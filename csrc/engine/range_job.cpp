#include "engine/range_job.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/bytes.h"
#include "common/error.h"
#include "format/crc32.h"

namespace dcpx::engine {
namespace {

// Runs of memory from here on are written from where they lie, whatever lies beside them.
constexpr std::uint64_t kInPlaceRunBytes = 64 << 10;
constexpr std::uint64_t kBlockBytes = 4 << 20;  // what a worker takes at a time
// Runs from here on go past the page cache, but for their ends.
constexpr std::uint64_t kDirectRunBytes = 256 << 10;
constexpr std::uint64_t kWriteBackBytes = 1 << 20;  // ranges from here on are written back at once

// What direct I/O takes, and no less than what the page cache holds together: a page is written
// through it or past it, never both ways.
std::uint64_t page_bytes() {
  return std::max<std::uint64_t>(io::kDirectAlignment, system_page_bytes());
}

}  // namespace

// A row in the order of the file: runs of `run_bytes` at `region.src_strides` there, and pieces of
// `region.elem_bytes` at `gather.src_strides` in memory.
struct RangeJob::Plan {
  const RangeRow* row = nullptr;
  plan::Region region;  // src: the file; dst: memory
  plan::Region gather;  // src: memory
  std::uint64_t total_bytes = 0;
  std::uint64_t run_bytes = 0;
  std::uint64_t outer_dims = 0;  // dimensions outside of a run
  bool is_in_place = false;
  bool is_direct = false;  // runs of kDirectRunBytes go past the page cache

  Plan(const RangeRow& source, bool use_direct) : row(&source) {
    plan::Region turned = source.region;
    std::swap(turned.src_strides, turned.dst_strides);
    region = plan::simplify(turned);
    gather = {region.elem_bytes, region.lengths, region.dst_strides, {}};
    gather.dst_strides.resize(region.dims());
    total_bytes = region.elem_bytes;
    for (const std::uint64_t length : region.lengths)
      total_bytes = checked_mul(total_bytes, length);
    run_bytes = region.elem_bytes;
    outer_dims = region.dims();
    is_in_place = true;
    const bool is_long = run_bytes >= kInPlaceRunBytes;
    while (!is_long && outer_dims > 0 && region.src_strides[outer_dims - 1] == run_bytes) {
      run_bytes *= region.lengths[--outer_dims];
      is_in_place = false;
    }
    // Runs that are gathered one behind the other do not lie in their slot as in the file.
    is_direct = use_direct && run_bytes >= kDirectRunBytes && (is_in_place || outer_dims == 0);
  }

  // Offset of run `index` by these strides.
  std::uint64_t offset_of(std::uint64_t index, const std::vector<std::uint64_t>& strides) const {
    std::uint64_t offset = 0;
    for (std::uint64_t dim = outer_dims; dim-- > 0; index /= region.lengths[dim])
      offset += index % region.lengths[dim] * strides[dim];
    return offset;
  }
};

// Bytes [begin, end) of a plan, counted in the order of the file.
struct RangeJob::Block {
  std::uint32_t plan = 0;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

RangeJob::RangeJob(int dir_fd, std::string dir_path, const RangeOptions& options)
    : dir_fd_(UniqueFd::copy_of(dir_fd)), dir_path_(std::move(dir_path)), options_(options) {
  DCPX_CHECK(options.workers > 0, "a job needs a worker");
  DCPX_CHECK(options.slot_bytes >= 2 * std::max(kInPlaceRunBytes, page_bytes()) &&
                 options.slot_bytes % page_bytes() == 0,
             "a slot holds two runs, in whole pages");
  if (!dir_fd_.is_open()) throw storage_error("dup", dir_path_, errno);
}

std::uint32_t RangeJob::add_file(const std::string& name, std::uint64_t file_bytes, bool is_new,
                                 const PollFunction& poll) {
  File file;
  file.file_bytes = file_bytes;
  if (is_new) {
    file.file = io::OutputFile::create(dir_fd_.get(), dir_path_, {name}, /*use_direct=*/false);
    file.file.preallocate(0, file_bytes, [&] {
      poll();
      return false;
    });
    // Before anybody else writes: a client of NFS takes a page behind the end of the file for its
    // own, and would write it whole, over what others have put there.
    file.file.grow_to(file_bytes);
  } else {
    file.file = io::OutputFile::open(dir_fd_.get(), dir_path_, name, /*use_direct=*/false);
  }
  files_.push_back(std::move(file));
  return static_cast<std::uint32_t>(files_.size() - 1);
}

void RangeJob::write(const std::vector<RangeRow>& rows, const PollFunction& poll) {
  const Stopwatch watch(spans_, SpanKind::kEngine);
  std::vector<Plan> plans;
  plans.reserve(rows.size());
  bool needs_slots = false;
  for (const RangeRow& row : rows) {
    DCPX_CHECK(row.file < files_.size(), "a row's file was not added");
    const std::uint64_t end = checked_add(row.offset, plan::dst_span_bytes(row.region));
    DCPX_CHECK(end <= files_[row.file].file_bytes, "a row reaches behind its file");
    if (row.tag != kNoTag) {
      DCPX_CHECK(end <= row.payload_end, "a row reaches behind its payload");
      if (shares_.size() <= row.tag) shares_.resize(std::size_t{row.tag} + 1);
    }
    const Plan& plan = plans.emplace_back(row, options_.use_direct);
    needs_slots = needs_slots || !plan.is_in_place || plan.is_direct;
  }
  open_direct(plans);
  const std::vector<Block> blocks = cut(plans);
  const unsigned workers =
      static_cast<unsigned>(std::clamp<std::uint64_t>(blocks.size(), 1, options_.workers));
  if (needs_slots && !slots_.holds(workers, options_.slot_bytes))
    slots_ = SlotArena(workers, options_.slot_bytes);
  slot_bytes_ = std::max(slot_bytes_.load(), slots_.size_bytes());
  std::atomic<std::size_t> next{0};
  const auto work = [&](unsigned worker, StopFlag& stop) {
    std::vector<std::uint32_t> shares(shares_.size());
    for (std::size_t i = next++; i < blocks.size() && !stop.is_set(); i = next++)
      write_block(plans[blocks[i].plan], blocks[i], needs_slots ? slots_.slot(worker) : nullptr,
                  shares);
    const std::lock_guard lock(mutex_);
    for (std::size_t tag = 0; tag < shares.size(); ++tag) shares_[tag] ^= shares[tag];
  };
  run_workers(workers, work, poll);
}

void RangeJob::open_direct(const std::vector<Plan>& plans) {
  for (const Plan& plan : plans) {
    File& file = files_[plan.row->file];
    if (!plan.is_direct || file.direct.is_open()) continue;
    file.direct = io::OutputFile::open(dir_fd_.get(), dir_path_, file.file.name(),
                                       /*use_direct=*/true);
  }
}

std::vector<RangeJob::Block> RangeJob::cut(const std::vector<Plan>& plans) const {
  std::vector<Block> blocks;
  for (std::uint32_t number = 0; number < plans.size(); ++number) {
    const Plan& plan = plans[number];
    const std::uint64_t elem = plan.is_in_place ? 1 : plan.region.elem_bytes;
    // What is gathered begins in its slot as far behind a page as in the file.
    const std::uint64_t room = options_.slot_bytes - (plan.is_direct ? page_bytes() : 0);
    const std::uint64_t step = plan.is_in_place ? kBlockBytes : std::max(elem, room / elem * elem);
    for (std::uint64_t at = 0; at < plan.total_bytes;) {
      std::uint64_t end = std::min(at + step, plan.total_bytes);
      if (plan.is_direct && plan.outer_dims == 0 && end < plan.total_bytes) {
        const std::uint64_t over = (plan.row->offset + end) % page_bytes();
        if (over % elem == 0 && over < end - at) end -= over;  // a page has one worker
      }
      blocks.push_back({number, at, end});
      at = end;
    }
  }
  return blocks;
}

void RangeJob::write_block(const Plan& plan, const Block& block, std::byte* slot,
                           std::vector<std::uint32_t>& shares) {
  const RangeRow& row = *plan.row;
  std::byte* gathered = slot;
  if (!plan.is_in_place) {
    if (plan.is_direct) gathered += (row.offset + block.begin) % page_bytes();
    plan::gather_range(plan.gather, row.source, block.begin, block.end, gathered);
  }
  for (std::uint64_t at = block.begin; at < block.end;) {
    const std::uint64_t run = at / plan.run_bytes, within = at % plan.run_bytes;
    const std::uint64_t nbytes = std::min(plan.run_bytes - within, block.end - at);
    const std::byte* data = plan.is_in_place
                                ? row.source + plan.offset_of(run, plan.region.dst_strides) + within
                                : gathered + (at - block.begin);
    const std::uint64_t offset = row.offset + plan.offset_of(run, plan.region.src_strides) + within;
    write_run(plan, data, nbytes, offset, slot, shares);
    at += nbytes;
  }
}

void RangeJob::write_run(const Plan& plan, const std::byte* data, std::uint64_t nbytes,
                         std::uint64_t offset, std::byte* slot,
                         std::vector<std::uint32_t>& shares) {
  const RangeRow& row = *plan.row;
  if (row.tag != kNoTag) {
    const std::uint64_t behind = row.payload_end - (offset + nbytes);
    shares[row.tag] ^= crc32_combine(crc32(0, data, nbytes), 0, behind);
  }
  if (plan.is_direct && nbytes >= kDirectRunBytes) {
    const std::uint64_t head = align_up(offset, page_bytes()) - offset;
    const std::uint64_t whole = align_down(nbytes - head, page_bytes());
    write_cached(plan, data, head, offset);
    write_direct(plan, data + head, whole, offset + head, slot);
    write_cached(plan, data + head + whole, nbytes - head - whole, offset + head + whole);
  } else {
    write_cached(plan, data, nbytes, offset);
  }
  written_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  writes_.fetch_add(1, std::memory_order_relaxed);
}

void RangeJob::write_cached(const Plan& plan, const std::byte* data, std::uint64_t nbytes,
                            std::uint64_t offset) {
  if (nbytes == 0) return;
  io::OutputFile& file = files_[plan.row->file].file;
  file.write_at(data, nbytes, offset);
  if (options_.is_durable && nbytes >= kWriteBackBytes) file.start_write_back(offset, nbytes);
  if (plan.is_in_place) in_place_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
}

void RangeJob::write_direct(const Plan& plan, const std::byte* data, std::uint64_t nbytes,
                            std::uint64_t offset, std::byte* slot) {
  io::OutputFile& file = files_[plan.row->file].direct;
  if (!file.is_direct()) return write_cached(plan, data, nbytes, offset);
  if (reinterpret_cast<std::uintptr_t>(data) % page_bytes() == 0) {
    file.write_at(data, nbytes, offset);
    if (plan.is_in_place) in_place_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
  } else {
    DCPX_CHECK(plan.is_in_place, "what is gathered must lie in its slot as in the file");
    for (std::uint64_t at = 0; at < nbytes;) {
      const std::uint64_t count = std::min(options_.slot_bytes, nbytes - at);
      std::memcpy(slot, data + at, count);
      file.write_at(slot, count, offset + at);
      at += count;
    }
  }
  if (file.is_direct()) direct_bytes_.fetch_add(nbytes, std::memory_order_relaxed);
}

void RangeJob::finish(bool is_whole, const PollFunction& poll) {
  const Stopwatch watch(spans_, SpanKind::kEngine);
  std::atomic<std::size_t> next{0};
  const auto work = [&](unsigned, StopFlag& stop) {
    for (std::size_t i = next++; i < files_.size() && !stop.is_set(); i = next++) {
      File& file = files_[i];
      if (options_.is_durable) file.file.sync();
      if (is_whole) file.file.close(file.file_bytes);
    }
  };
  // Never on this thread: it answers signals while a sync takes its time.
  run_workers(std::max(options_.workers, 2u), work, poll);
  abandon();
}

void RangeJob::abandon() noexcept {
  for (File& file : files_) {
    file.file = io::OutputFile();
    file.direct = io::OutputFile();
  }
  slots_ = SlotArena();
  dir_fd_ = UniqueFd();
}

RangeReport RangeJob::report() const {
  return {written_bytes_.load(), in_place_bytes_.load(), direct_bytes_.load(),
          writes_.load(),        slot_bytes_.load(),     spans_.total_ns(SpanKind::kEngine)};
}

}  // namespace dcpx::engine
