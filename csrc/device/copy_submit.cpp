// How CopyStream queues what was collected: which call of the driver for which copy.
#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "device/copy_stream.h"
#include "device/counters.h"
#include "device/pack_kernel.h"
#include "device/pinned.h"

namespace dcpx::device {
namespace {

constexpr std::uint64_t kFewCalls = 16;        // 2-D copies for which no kernel is started
constexpr std::size_t kMaxBatchPieces = 4096;  // of one call
constexpr std::size_t kMaxRuns = 1 << 16;      // of a box, listed at once
constexpr std::size_t kRunsBetweenStops = 256;
constexpr const char* kEarlierCopies = "copies to make room for more";
constexpr const char* kCallersWork = "the work that the caller's stream had queued";

std::string copying(Direction direction, std::uint64_t nbytes, int device) {
  return "copying " + std::to_string(nbytes) + " B " +
         (direction == Direction::kToHost ? "from" : "to") + " device " + std::to_string(device);
}

void count_bytes(Direction direction, std::uint64_t nbytes) {
  add_count(direction == Direction::kToHost ? Count::kBytesToHost : Count::kBytesToDevice, nbytes);
}

bool is_stopped(const StopFlag* stop) { return stop != nullptr && stop->is_set(); }

std::uint64_t run_count(const plan::Region& region) {
  std::uint64_t runs = 1;
  for (const std::uint64_t length : region.lengths) runs *= length;
  return runs;
}

void check_host(std::uint64_t address, std::uint64_t nbytes) {
  if (!is_stale_range(address, nbytes)) return;
  throw Error(ErrorCode::kStaging,
              "copying " + std::to_string(nbytes) +
                  " B: a device was lost, and the driver still holds a registration of what lay "
                  "at these addresses then; only a new process can copy there");
}

// The dimension whose rows one 2-D copy takes: the longest of those that it can take; dims() where
// there is none, as rows overlap or lie too far apart.
std::size_t longest_rows(const plan::Region& region, std::uint64_t max_pitch) {
  std::size_t best = region.dims();
  for (std::size_t d = 0; d < region.dims(); ++d) {
    const auto [low, high] = std::minmax(region.src_strides[d], region.dst_strides[d]);
    if (low < region.elem_bytes || high > max_pitch) continue;
    if (best == region.dims() || region.lengths[d] > region.lengths[best]) best = d;
  }
  return best;
}

// Calls `visit(dst_offset, src_offset)` for every index of all dimensions but `skipped`, until
// `stop` is set.
template <class Visit>
void for_each_run(const plan::Region& region, std::size_t skipped, const StopFlag* stop,
                  const Visit& visit) {
  std::vector<std::uint64_t> index(region.dims());
  std::size_t visited = 0;
  for (std::size_t moved = 1; moved > 0; ++visited) {
    if (visited % kRunsBetweenStops == 0 && is_stopped(stop)) return;
    std::uint64_t dst = 0;
    std::uint64_t src = 0;
    for (std::size_t d = 0; d < region.dims(); ++d) {
      dst += index[d] * region.dst_strides[d];
      src += index[d] * region.src_strides[d];
    }
    visit(dst, src);
    for (moved = region.dims(); moved > 0; --moved) {
      const std::size_t d = moved - 1;
      if (d == skipped) continue;
      if (++index[d] < region.lengths[d]) break;
      index[d] = 0;
    }
  }
}

}  // namespace

// 1. Pieces and the boxes for the kernel, which take few calls. 2. 2-D copies. 3. What has to be
// copied run by run. Within each, pinned memory first: the host waits for the rest.
void CopyStream::submit_collected(const StopFlag* stop) {
  driver_.check_device(device_);
  DCPX_CHECK(stream_ != nullptr, "a stream that was given up serves no more");
  const ContextGuard guard(device_);
  range_begin_ = range_end_ = 0;  // allocations may have changed since
  const CopyList::Batch batch = list_.take([this](std::uint64_t at) { return is_border(at); });
  if (is_stopped(stop)) return;
  for (const Piece& piece : batch.pieces) check_host(piece.host(), piece.nbytes);
  std::vector<Box> packed;
  std::vector<const Box*> others;
  for (const Box& box : batch.boxes) {
    check_host(box.host(), box.host_span_bytes());
    if (is_for_kernel(box)) {
      packed.push_back(box);
    } else {
      others.push_back(&box);
    }
  }
  if (!submit_pieces(batch.pieces, packed, stop)) {
    for (const Box& box : packed) others.push_back(&box);
  }
  for (const Box* box : others) {
    if (is_stopped(stop)) return;
    copy_box(*box, stop);
  }
}

// An allocation of the device begins there. Where the driver does not say, it may.
bool CopyStream::is_border(std::uint64_t device_address) {
  if (device_address > range_begin_ && device_address < range_end_) return false;
  DevicePtr begin = 0;
  std::size_t nbytes = 0;
  std::array<PointerAttribute, 2> attributes = {PointerAttribute::kRangeStart,
                                                PointerAttribute::kRangeSize};
  std::array<void*, 2> values = {&begin, &nbytes};
  const Result result =
      driver_.api().cuPointerGetAttributes(2, attributes.data(), values.data(), device_address);
  if (result != kSuccess || begin == 0) return true;
  range_begin_ = begin;
  range_end_ = begin + nbytes;
  return begin == device_address;
}

bool CopyStream::has_kernel() {
  if (max_tables_ == 0 || pack_kernel(device_) == nullptr) return false;
  return !tables_.empty() || add_table();
}

// False where the driver takes no more memory, or enough was given.
bool CopyStream::add_table() {
  if (tables_.size() == max_tables_) return false;
  auto table = std::make_unique<PackTable>(device_);
  if (!table->is_usable()) return false;
  tables_.push_back(std::move(table));
  return true;
}

bool CopyStream::is_for_kernel(const Box& box) {
  const plan::Region& region = box.region;
  if (region.elem_bytes >= kSmallBytes || region.dims() > kPackMaxDims) return false;
  const std::size_t rows = longest_rows(region, max_pitch());
  const std::uint64_t calls =
      rows == region.dims() ? run_count(region) : run_count(region) / region.lengths[rows];
  if (region.elem_bytes >= kNarrowRowBytes && calls <= kFewCalls) return false;
  return is_pinned_range(box.host(), box.host_span_bytes()) && has_kernel();
}

// False where there are boxes and no kernel takes them; the pieces are then copied all the same.
bool CopyStream::submit_pieces(const std::vector<Piece>& pieces, const std::vector<Box>& packed,
                               const StopFlag* stop) {
  std::vector<Piece> small;
  std::vector<Piece> large;
  std::vector<Piece> pageable;
  for (Piece rest : pieces) {
    while (rest.nbytes > 0) {
      bool is_pinned = false;
      Piece piece = rest;
      piece.nbytes = pin_run_bytes(rest.host(), rest.nbytes, is_pinned);
      if (!is_pinned) piece.nbytes = std::min(piece.nbytes, kPageableBytes);
      (!is_pinned ? pageable : piece.nbytes < kSmallBytes ? small : large).push_back(piece);
      rest.dst += piece.nbytes;
      rest.src += piece.nbytes;
      rest.nbytes -= piece.nbytes;
    }
  }
  const bool is_wanted = small.size() >= kFewPieces || !packed.empty();
  const bool is_packed = is_wanted && has_kernel() && pack(small, packed, stop);
  if (!is_packed) large.insert(large.end(), small.begin(), small.end());
  if (is_stopped(stop)) return true;
  copy_batch(large);
  if (!pageable.empty()) order_before_pageable(stop);
  for (const Piece& piece : pageable) {
    if (is_stopped(stop)) break;
    copy_one(piece);
  }
  return is_packed || packed.empty();
}

bool CopyStream::pack(const std::vector<Piece>& pieces, const std::vector<Box>& boxes,
                      const StopFlag* stop) {
  const auto add = [&](const auto& work) {
    if (tables_.back()->add(work)) return true;
    if (!launch()) return false;
    if (is_stopped(stop)) return true;  // and drop it
    // The kernel reads its table while it runs.
    if (!add_table()) wait(copy_timeout_s(), stop, kEarlierCopies);
    DCPX_CHECK(tables_.back()->add(work), "an empty table of the kernel has no room");
    return true;
  };
  for (const Piece& piece : pieces) {
    if (!add(piece)) return false;
  }
  for (const Box& box : boxes) {
    if (!add(box)) return false;
  }
  if (!launch()) return false;
  for (const Piece& piece : pieces) count_bytes(piece.direction, piece.nbytes);
  for (const Box& box : boxes)
    count_bytes(box.direction, run_count(box.region) * box.region.elem_bytes);
  add_count(Count::kKernelPieces, pieces.size() + boxes.size());
  return true;
}

bool CopyStream::launch() {
  if (!tables_.back()->has_tasks()) return true;
  begin_work();
  const std::string doing = "launching the pack kernel on device " + std::to_string(device_);
  const Result result = tables_.back()->launch(pack_kernel(device_), stream_);
  if (is_lost(result)) driver_.check(result, "cuLaunchKernel", doing);
  if (result != kSuccess) {  // a module is really loaded at its first launch, so refused here
    refuse_pack_kernel(device_, driver_.describe(result, "cuLaunchKernel", doing));
    return false;
  }
  add_count(Count::kKernels);
  return true;
}

void CopyStream::copy_batch(const std::vector<Piece>& pieces) {
  const Api& api = driver_.api();
  std::size_t at = 0;
  while (pieces.size() - at > 1 && driver_.has_batch()) {
    const std::size_t count = std::min(kMaxBatchPieces, pieces.size() - at);
    std::vector<DevicePtr> dsts(count);
    std::vector<DevicePtr> srcs(count);
    std::vector<std::size_t> sizes(count);
    std::uint64_t nbytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      dsts[i] = pieces[at + i].dst;
      srcs[i] = pieces[at + i].src;
      nbytes += sizes[i] = static_cast<std::size_t>(pieces[at + i].nbytes);
    }
    MemcpyAttributes attributes;
    attributes.flags = kMemcpyPreferOverlapWithCompute;
    std::size_t first = 0;
    std::size_t failed = 0;
    begin_work();
    const Result result = api.batch_13000 != nullptr
                              ? api.batch_13000(dsts.data(), srcs.data(), sizes.data(), count,
                                                &attributes, &first, 1, stream_)
                              : api.batch_12080(dsts.data(), srcs.data(), sizes.data(), count,
                                                &attributes, &first, 1, &failed, stream_);
    if (result == kNotSupported) {  // this device: single copies do the same
      driver_.drop_batch();
      break;
    }
    driver_.check(result, "cuMemcpyBatchAsync",
                  copying(pieces[at].direction, nbytes, device_) + " in " + std::to_string(count) +
                      " pieces");
    for (std::size_t i = at; i < at + count; ++i)
      count_bytes(pieces[i].direction, pieces[i].nbytes);
    add_count(Count::kBatches);
    add_count(Count::kBatchPieces, count);
    at += count;
  }
  for (; at < pieces.size(); ++at) copy_one(pieces[at]);
}

void CopyStream::copy_one(const Piece& piece) {
  const Api& api = driver_.api();
  const auto nbytes = static_cast<std::size_t>(piece.nbytes);
  begin_work();
  if (piece.direction == Direction::kToHost) {
    const Result result =
        api.cuMemcpyDtoHAsync(reinterpret_cast<void*>(piece.dst), piece.src, nbytes, stream_);
    if (result != kSuccess)
      driver_.check(result, "cuMemcpyDtoHAsync", copying(piece.direction, nbytes, device_));
  } else {
    const Result result =
        api.cuMemcpyHtoDAsync(piece.dst, reinterpret_cast<const void*>(piece.src), nbytes, stream_);
    if (result != kSuccess)
      driver_.check(result, "cuMemcpyHtoDAsync", copying(piece.direction, nbytes, device_));
  }
  add_count(Count::kCopies1d);
  count_bytes(piece.direction, piece.nbytes);
}

// By 2-D copies, where rows lie so and the host side in one registered piece or in none.
void CopyStream::copy_box(const Box& box, const StopFlag* stop) {
  const plan::Region& region = box.region;
  const std::size_t rows = longest_rows(region, max_pitch());
  const std::uint64_t span = box.host_span_bytes();
  bool is_pinned = false;
  const bool is_in_one = pin_run_bytes(box.host(), span, is_pinned) == span;
  if (rows < region.dims() && is_in_one) {
    if (!is_pinned) order_before_pageable(stop);
    return for_each_run(region, rows, stop, [&](std::uint64_t dst, std::uint64_t src) {
      copy_rows(box, rows, box.dst + dst, box.src + src);
    });
  }
  std::vector<Piece> runs;
  for_each_run(region, region.dims(), stop, [&](std::uint64_t dst, std::uint64_t src) {
    runs.push_back({box.direction, box.dst + dst, box.src + src, region.elem_bytes});
    if (runs.size() < kMaxRuns) return;
    submit_pieces(runs, {}, stop);
    runs.clear();
  });
  submit_pieces(runs, {}, stop);
}

void CopyStream::copy_rows(const Box& box, std::size_t rows_dim, std::uint64_t dst,
                           std::uint64_t src) {
  const plan::Region& region = box.region;
  Memcpy2D rows;
  rows.width_bytes = static_cast<std::size_t>(region.elem_bytes);
  rows.height = static_cast<std::size_t>(region.lengths[rows_dim]);
  rows.src_pitch = static_cast<std::size_t>(region.src_strides[rows_dim]);
  rows.dst_pitch = static_cast<std::size_t>(region.dst_strides[rows_dim]);
  if (box.direction == Direction::kToHost) {
    rows.src_type = MemoryType::kDevice;
    rows.src_device = src;
    rows.dst_host = reinterpret_cast<void*>(dst);
  } else {
    rows.src_host = reinterpret_cast<const void*>(src);
    rows.dst_type = MemoryType::kDevice;
    rows.dst_device = dst;
  }
  const std::uint64_t nbytes = region.elem_bytes * region.lengths[rows_dim];
  begin_work();
  driver_.check(driver_.api().cuMemcpy2DAsync(&rows, stream_), "cuMemcpy2DAsync",
                copying(box.direction, nbytes, device_) + " in rows of " +
                    std::to_string(region.elem_bytes) + " B");
  add_count(Count::kCopies2d);
  count_bytes(box.direction, nbytes);
}

// The driver copies pageable memory in step with the host and would wait in there, without a bound,
// for what the caller has queued: so that is waited for here.
void CopyStream::order_before_pageable(const StopFlag* stop) {
  if (is_ordered_) return;
  is_queued_ = true;  // for record(): behind the events that this stream waits for
  is_recorded_ = false;
  wait(copy_timeout_s(), stop, kCallersWork);
}

std::uint64_t CopyStream::max_pitch() {
  constexpr int kUnknownPitch = 1 << 17;  // of old devices
  if (max_pitch_ == 0)
    max_pitch_ =
        static_cast<std::uint64_t>(driver_.attribute(device_, kAttributeMaxPitch, kUnknownPitch));
  return max_pitch_;
}

void CopyStream::begin_work() noexcept {
  is_queued_ = uses_memory_ = true;
  is_recorded_ = false;
}

}  // namespace dcpx::device
