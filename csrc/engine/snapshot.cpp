#include "engine/snapshot.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <numeric>
#include <tuple>
#include <unordered_map>

#include "common/bytes.h"
#include "common/stream_copy.h"

namespace dcpx::engine {
namespace {

constexpr std::uint64_t kPageBytes = 4096;
constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kOnPageBytes = 64 << 10;  // rows from here on begin on a page
constexpr std::uint64_t kPieceBytes = 4 << 20;    // what a worker takes at once
constexpr std::uint64_t kStreamBytes = 8 << 10;   // from here on past the caches
constexpr std::uint64_t kAloneBytes = 256 << 10;  // less in all: a thread costs more than the copy

// Whether the elements fill one run of memory, in any order, without overlap.
bool fills_one_run(const SnapshotRow& row) {
  std::vector<std::size_t> order;
  for (std::size_t d = 0; d < row.sizes.size(); ++d) {
    if (row.sizes[d] != 1) order.push_back(d);
  }
  std::sort(order.begin(), order.end(),
            [&](std::size_t a, std::size_t b) { return row.strides[a] < row.strides[b]; });
  std::int64_t expected = 1;
  for (const std::size_t d : order) {
    if (row.strides[d] != expected) return false;
    expected *= row.sizes[d];
  }
  return true;
}

bool is_in_c_order(const SnapshotRow& row) {
  std::int64_t expected = 1;
  for (std::size_t d = row.sizes.size(); d-- > 0;) {
    if (row.sizes[d] != 1 && row.strides[d] != expected) return false;
    expected *= row.sizes[d];
  }
  return true;
}

void set_c_order(SnapshotRow& row) {
  std::uint64_t stride = 1;
  for (std::size_t d = row.sizes.size(); d-- > 0;) {
    row.strides[d] = static_cast<std::int64_t>(stride);
    stride *= static_cast<std::uint64_t>(std::max<std::int64_t>(row.sizes[d], 1));
  }
}

plan::Region gather_of(const SnapshotRow& row) {
  plan::Region region;
  region.elem_bytes = row.elem_bytes;
  for (std::size_t d = 0; d < row.sizes.size(); ++d) {
    DCPX_CHECK(row.strides[d] >= 0, "a tensor with a negative stride");
    region.lengths.push_back(static_cast<std::uint64_t>(row.sizes[d]));
    // That of a single element says nothing, and may be of any size.
    const auto stride = static_cast<std::uint64_t>(row.sizes[d] > 1 ? row.strides[d] : 0);
    region.src_strides.push_back(checked_mul(stride, row.elem_bytes));
    region.dst_strides.push_back(0);
  }
  return region;
}

// Cuts what is to be copied into pieces, first all of one row, then of the next.
class Cutter {
 public:
  explicit Cutter(const std::vector<SnapshotRow>& rows) {
    for (std::size_t i = 0; i < rows.size(); ++i) {
      const SnapshotRow& row = rows[i];
      if (row.device >= 0 || row.source == nullptr || row.nbytes == 0 || row.copied_with != i)
        continue;
      const std::uint64_t step =
          row.is_dense ? kPieceBytes
                       : std::max<std::uint64_t>(kPieceBytes / row.elem_bytes, 1) * row.elem_bytes;
      for (std::uint64_t at = 0; at < row.nbytes; at += step) {
        add(i, at, std::min(step, row.nbytes - at));
      }
    }
    close();
  }

  struct Piece {
    std::size_t row;
    std::uint64_t begin;
    std::uint64_t nbytes;
  };
  const std::vector<Piece>& pieces() const { return pieces_; }
  // Pieces [batches[i], batches[i + 1]) are taken at once.
  const std::vector<std::size_t>& batches() const { return batches_; }
  std::uint64_t total() const { return total_; }

 private:
  void add(std::size_t row, std::uint64_t begin, std::uint64_t nbytes) {
    if (in_batch_ == 0) batches_.push_back(pieces_.size());
    pieces_.push_back({row, begin, nbytes});
    total_ += nbytes;
    in_batch_ += nbytes;
    if (in_batch_ >= kPieceBytes) in_batch_ = 0;
  }
  void close() { batches_.push_back(pieces_.size()); }

  std::vector<Piece> pieces_;
  std::vector<std::size_t> batches_;
  std::uint64_t total_ = 0;
  std::uint64_t in_batch_ = 0;
};

// In the arena. Places of pieces ascend as the pieces do.
std::uint64_t place_of(const std::vector<SnapshotRow>& rows, const Cutter::Piece& piece) {
  return rows[piece.row].offset + piece.begin;
}

void copy_piece(const SnapshotRow& row, const Cutter::Piece& piece, std::byte* arena) {
  std::byte* const dst = arena + row.offset + piece.begin;
  if (!row.is_dense) {
    plan::gather_range(row.gather, row.source, piece.begin, piece.begin + piece.nbytes, dst);
  } else if (piece.nbytes >= kStreamBytes) {
    stream_copy(dst, row.source + piece.begin, piece.nbytes);
  } else {
    std::memcpy(dst, row.source + piece.begin, piece.nbytes);
  }
}

bool is_same(const SnapshotRow& a, const SnapshotRow& b) {
  return a.source == b.source && a.device == b.device && a.elem_bytes == b.elem_bytes &&
         a.is_dense == b.is_dense && a.sizes == b.sizes && a.strides == b.strides &&
         a.gather.src_strides == b.gather.src_strides;
}

std::uint64_t grid_of(const SnapshotRow& row) {
  return row.nbytes >= kOnPageBytes ? kPageBytes : kLineBytes;
}

// Gives dense rows on devices their offsets, from `end` on; returns where the last one ends. In the
// order of their addresses, so that what touches there touches here. A row that follows none has
// the phase of its source: those that follow it keep the alignment of their elements.
std::uint64_t lay_out_runs(std::vector<SnapshotRow>& rows, std::vector<std::size_t>& in_runs,
                           std::uint64_t end) {
  std::sort(in_runs.begin(), in_runs.end(), [&](std::size_t a, std::size_t b) {
    return std::tie(rows[a].device, rows[a].source) < std::tie(rows[b].device, rows[b].source);
  });
  const SnapshotRow* before = nullptr;
  for (const std::size_t i : in_runs) {
    SnapshotRow& row = rows[i];
    const auto address = reinterpret_cast<std::uintptr_t>(row.source);
    const bool follows =
        before != nullptr && before->device == row.device &&
        reinterpret_cast<std::uintptr_t>(before->source) + before->nbytes == address;
    if (follows) {
      row.offset = end;
    } else {
      const std::uint64_t grid = grid_of(row);
      const std::uint64_t base = align_down(end, grid) + address % grid;
      row.offset = base >= end ? base : base + grid;
    }
    end = checked_add(row.offset, row.nbytes);
    before = &row;
  }
  return end;
}

}  // namespace

void describe(SnapshotRow& row) {
  DCPX_CHECK(row.sizes.size() == row.strides.size(), "sizes and strides differ in number");
  DCPX_CHECK(row.elem_bytes > 0, "elements of no bytes");
  row.nbytes = row.elem_bytes;
  for (const std::int64_t size : row.sizes) {
    DCPX_CHECK(size >= 0, "a tensor of a negative size");
    row.nbytes = checked_mul(row.nbytes, static_cast<std::uint64_t>(size));
  }
  if (row.nbytes > 0 && !is_in_c_order(row)) {
    if (fills_one_run(row)) return;
    row.is_dense = false;
    row.gather = gather_of(row);
  }
  set_c_order(row);
}

std::uint64_t lay_out(std::vector<SnapshotRow>& rows) {
  std::unordered_map<const std::byte*, std::size_t> first_at;
  first_at.reserve(rows.size());
  std::vector<std::size_t> in_runs;
  std::vector<std::size_t> tied;
  std::uint64_t end = 0;
  for (std::size_t i = 0; i < rows.size(); ++i) {
    SnapshotRow& row = rows[i];
    row.copied_with = i;
    if (row.nbytes == 0) continue;
    if (row.source != nullptr) {
      const auto [found, is_new] = first_at.try_emplace(row.source, i);
      if (!is_new && is_same(rows[found->second], row)) {
        row.copied_with = found->second;
        tied.push_back(i);
        continue;
      }
    }
    if (row.device >= 0 && row.is_dense) {
      in_runs.push_back(i);
      continue;
    }
    row.offset = align_up(end, grid_of(row));
    end = checked_add(row.offset, row.nbytes);
  }
  end = lay_out_runs(rows, in_runs, end);
  for (const std::size_t i : tied) rows[i].offset = rows[rows[i].copied_with].offset;
  return end;
}

void take_snapshot(const std::vector<SnapshotRow>& rows, std::byte* arena, unsigned workers,
                   const PollFunction& poll, DeviceCopies* copies, FirstTouch* pages) {
  const Cutter cut(rows);
  const std::size_t batches = cut.batches().size() - 1;
  const std::size_t devices = copies == nullptr ? 0 : copies->devices();
  std::atomic<std::size_t> next_device{0};
  std::atomic<std::size_t> next{0};
  const auto work = [&](unsigned, StopFlag& stop) {
    while (!stop.is_set()) {
      const std::size_t device = next_device.fetch_add(1, std::memory_order_relaxed);
      if (device >= devices) break;
      copies->queue(device, stop);
    }
    while (!stop.is_set()) {
      const std::size_t batch = next.fetch_add(1, std::memory_order_relaxed);
      if (batch >= batches) return;
      const std::size_t begin = cut.batches()[batch];
      const std::size_t end = cut.batches()[batch + 1];
      if (pages != nullptr)
        pages->take(place_of(rows, cut.pieces()[begin]),
                    place_of(rows, cut.pieces()[end - 1]) + cut.pieces()[end - 1].nbytes);
      for (std::size_t i = begin; i < end; ++i) {
        const Cutter::Piece& piece = cut.pieces()[i];
        copy_piece(rows[piece.row], piece, arena);
      }
    }
  };
  const std::size_t useful = cut.total() <= kAloneBytes ? 1 : std::max<std::size_t>(batches, 1);
  const std::size_t threads =
      std::min<std::size_t>(workers, cut.total() > 0 ? useful : 0) + devices;
  run_workers(static_cast<unsigned>(std::max<std::size_t>(threads, 1)), work, poll);
}

}  // namespace dcpx::engine
