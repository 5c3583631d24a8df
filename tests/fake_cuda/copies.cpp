#include "copies.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <thread>

namespace fake {

namespace {

constexpr std::uint64_t kChunkBytes = 256 << 10;  // between chunks other threads may come in

struct Resolved {
  CopyPiece piece;
  std::byte* dst = nullptr;
  const std::byte* src = nullptr;
  std::vector<std::byte> staged;  // the source, where it was read by the call
};

void copy_bytes(std::byte* dst, const std::byte* src, std::uint64_t nbytes) {
  for (std::uint64_t at = 0; at < nbytes; at += kChunkBytes) {
    if (at != 0) std::this_thread::yield();
    std::memcpy(dst + at, src + at, std::min(kChunkBytes, nbytes - at));
  }
}

void run_piece(const Resolved& resolved) {
  const CopyPiece& piece = resolved.piece;
  const bool is_staged = !resolved.staged.empty();
  const std::byte* src = is_staged ? resolved.staged.data() : resolved.src;
  for (std::uint64_t row = 0; row < piece.rows; ++row)
    copy_bytes(resolved.dst + row * piece.dst_pitch,
               src + row * (is_staged ? piece.nbytes : piece.src_pitch), piece.nbytes);
}

void stage(Resolved& resolved) {
  const CopyPiece& piece = resolved.piece;
  resolved.staged.resize(piece.nbytes * piece.rows);
  for (std::uint64_t row = 0; row < piece.rows; ++row)
    std::memcpy(resolved.staged.data() + row * piece.nbytes, resolved.src + row * piece.src_pitch,
                piece.nbytes);
}

const char* total_of(const Side& dst, const Side& src) {
  if (src.device >= 0) return dst.device >= 0 ? "bytes_on_device" : "bytes_to_host";
  return dst.device >= 0 ? "bytes_to_device" : "bytes_on_host";
}

// What host memory means for the copy: staged by the call, waited for, or remembered.
struct HostSides {
  Work& work;
  const Stream& stream;
  bool is_waited_for = false;

  // Returns whether the side takes part in the copy when it runs, and not before.
  bool add(const Side& side, Address address, std::uint64_t span) {
    World& w = world();
    if (side.device >= 0) {
      work.allocations.push_back(side.allocation);
      if (side.device != stream.device)
        w.report(work.what + ": memory of device " + std::to_string(side.device) +
                 " by a stream of device " + std::to_string(stream.device));
      return true;
    }
    int pieces = 0;
    if (!w.memory.is_pinned(address, span, stream.device, pieces)) {
      ++w.totals["unpinned_copies"];
      w.note(work.what + ": host memory that is not registered");
      return false;
    }
    if (pieces > 1) w.note(work.what + ": host memory across two registrations");
    work.host_ranges.emplace_back(address, span);
    return true;
  }
};

}  // namespace

Result resolve(const std::string& what, Address address, std::uint64_t span, Side& side) {
  World& w = world();
  side.device = w.memory.device_of(address);
  side.memory = w.memory.view(address);
  if (side.device < 0) {
    if (is_mapped(address, span)) return kSuccess;
    w.report(what + ": host memory that is not mapped");
    return kInvalidValue;
  }
  const Allocation* found = w.memory.find(address);
  if (found == nullptr) {
    const bool was_freed = w.memory.was_freed(address);
    w.report(what + (was_freed ? ": device memory that was freed" : ": outside of allocations"));
    return kInvalidValue;
  }
  const std::uint64_t left = found->address + found->nbytes - address;
  if (span > left) {
    w.report(what + ": goes " + std::to_string(span - left) + " B beyond its allocation");
    return kInvalidValue;
  }
  side.allocation = found->id;
  return kSuccess;
}

Result queue_copies(Call& call, const StreamPtr& stream, std::vector<CopyPiece> pieces, int order,
                    std::size_t& failed) {
  World& w = world();
  if (stream->is_capturing) {
    stream->is_capture_broken = true;
    return call.wrong(kCaptureUnsupported, "a stream that is capturing a graph");
  }
  auto resolved = std::make_shared<std::vector<Resolved>>();
  auto work = std::make_shared<Work>();
  std::uint64_t nbytes = 0;
  for (const CopyPiece& piece : pieces) nbytes += piece.nbytes * piece.rows;
  work->what = std::string(call.entry()) + " of " + std::to_string(nbytes) + " B";
  HostSides host{*work, *stream};
  std::map<std::string, std::uint64_t> totals;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const CopyPiece& piece = pieces[i];
    Side dst;
    Side src;
    failed = i;
    if (const Result bad = resolve(work->what, piece.dst, piece.dst_span(), dst)) return bad;
    if (const Result bad = resolve(work->what, piece.src, piece.src_span(), src)) return bad;
    Resolved one{piece, dst.memory, src.memory, {}};
    const bool is_late_source = host.add(src, piece.src, piece.src_span());
    const bool is_early =
        order == kOrderDuringCall ||
        (order == kOrderAny && drawn(w.settings.seed, stream->queued, i) % 2 == 0);
    if (!is_late_source || is_early) stage(one);
    if (!host.add(dst, piece.dst, piece.dst_span())) host.is_waited_for = true;
    resolved->push_back(std::move(one));
    totals[total_of(dst, src)] += piece.nbytes * piece.rows;
  }
  const std::uint64_t seed = drawn(w.settings.seed, stream->ordinal, stream->queued);
  for (std::size_t i = resolved->size(); i > 1; --i)
    std::swap((*resolved)[i - 1], (*resolved)[drawn(seed, i, 1) % i]);
  for (const auto& [name, total] : totals) w.totals[name] += std::int64_t(total);
  work->run = [resolved] {
    for (const Resolved& one : *resolved) run_piece(one);
  };
  enqueue(stream, work);
  return host.is_waited_for ? wait_for(call.lock(), work) : kSuccess;
}

}  // namespace fake
