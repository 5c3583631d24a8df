#include "device/copy_list.h"

#include <algorithm>
#include <utility>

namespace dcpx::device {
namespace {

bool touch(const Piece& first, const Piece& second) {
  return first.direction == second.direction && first.dst + first.nbytes == second.dst &&
         first.src + first.nbytes == second.src;
}

bool is_before(const Piece& a, const Piece& b) { return a.host() < b.host(); }

}  // namespace

std::uint64_t Box::host_span_bytes() const {
  return direction == Direction::kToHost ? plan::dst_span_bytes(region)
                                         : plan::src_span_bytes(region);
}

void CopyList::add(Direction direction, std::uint64_t dst, std::uint64_t src,
                   std::uint64_t nbytes) {
  if (nbytes > 0) batch_.pieces.push_back({direction, dst, src, nbytes});
}

void CopyList::add(Direction direction, const plan::Region& region, std::uint64_t dst,
                   std::uint64_t src) {
  for (const std::uint64_t length : region.lengths) {
    if (length == 0) return;
  }
  Box box{direction, plan::simplify(region), dst, src};
  if (box.region.dims() == 0) {
    add(direction, dst, src, box.region.elem_bytes);
  } else {
    batch_.boxes.push_back(std::move(box));
  }
}

void CopyList::clear() noexcept {
  batch_.pieces.clear();
  batch_.boxes.clear();
}

CopyList::Batch CopyList::take(const std::function<bool(std::uint64_t)>& is_border) {
  Batch taken = std::exchange(batch_, {});
  std::vector<Piece>& pieces = taken.pieces;
  if (!std::is_sorted(pieces.begin(), pieces.end(), is_before))
    std::sort(pieces.begin(), pieces.end(), is_before);
  std::size_t kept = 0;
  for (const Piece& piece : pieces) {
    if (kept > 0 && touch(pieces[kept - 1], piece) && !is_border(piece.device())) {
      pieces[kept - 1].nbytes += piece.nbytes;
    } else {
      pieces[kept++] = piece;
    }
  }
  pieces.resize(kept);
  return taken;
}

}  // namespace dcpx::device
