#include "engine/extent_pieces.h"

#include <cstring>

#include "common/bytes.h"

namespace dcpx::engine {
namespace {

// preadv takes at most IOV_MAX (1024) pieces; a run needs two, and the end of the range one.
constexpr std::size_t kMaxPieces = 1000;

// Calls `take(source offset, destination offset)` for each run of the part's box, in file order.
template <typename Take>
void for_each_run(const ReadPart& part, const plan::Region& region, std::size_t dim,
                  std::uint64_t src, std::uint64_t dst, const Take& take) {
  if (dim == part.lengths.size()) return take(src, dst);
  for (std::uint64_t i = 0; i < part.lengths[dim]; ++i) {
    for_each_run(part, region, dim + 1, src + i * region.src_strides[dim],
                 dst + i * region.dst_strides[dim], take);
  }
}

}  // namespace

void ExtentPieces::lay_out(const ReadPlan& plan, const std::vector<ReadRegion>& regions,
                           const std::vector<ReadPart>& parts, const Extent& extent,
                           std::uint64_t begin, std::uint64_t end, std::uint64_t alignment,
                           std::byte* slot) {
  plan_ = &plan;
  begin_ = at_ = begin;
  alignment_ = alignment;
  slot_ = slot;
  pieces_.clear();
  copies_.clear();
  in_place_bytes_ = 0;
  for (std::uint32_t p = extent.first_part; p < extent.first_part + extent.part_count; ++p) {
    const ReadPart& part = parts[p];
    std::byte* const dest = regions[part.region].dest + part.dest_offset;
    if (extent.is_disjoint && part.elem_bytes >= kInPlaceRunBytes) {
      for_each_run(part, plan.regions[part.region], 0, part.begin, 0,
                   [&](std::uint64_t src, std::uint64_t dst) {
                     add_run(src, dest + dst, part.elem_bytes, part);
                   });
    } else {
      copies_.push_back({slot + (part.begin - begin), dest, 0, &part});
    }
  }
  fill_slot_up_to(end);
}

void ExtentPieces::add_run(std::uint64_t begin, std::byte* dest, std::uint64_t nbytes,
                           const ReadPart& part) {
  const std::uint64_t first = align_up(begin, alignment_);
  const std::uint64_t last = align_down(begin + nbytes, alignment_);
  const bool is_congruent =
      (reinterpret_cast<std::uintptr_t>(dest) - begin) % alignment_ == 0 && first < last;
  if (!is_congruent || pieces_.size() + 3 > kMaxPieces) return add_copy(begin, dest, nbytes, part);
  add_copy(begin, dest, first - begin, part);
  fill_slot_up_to(first);
  pieces_.push_back({dest + (first - begin), static_cast<std::size_t>(last - first)});
  in_place_bytes_ += last - first;
  at_ = last;
  add_copy(last, dest + (last - begin), begin + nbytes - last, part);
}

void ExtentPieces::add_copy(std::uint64_t begin, std::byte* dest, std::uint64_t nbytes,
                            const ReadPart& part) {
  if (nbytes > 0) copies_.push_back({slot_ + (begin - begin_), dest, nbytes, &part});
}

void ExtentPieces::fill_slot_up_to(std::uint64_t offset) {
  if (offset == at_) return;
  pieces_.push_back({slot_ + (at_ - begin_), static_cast<std::size_t>(offset - at_)});
  at_ = offset;
}

void ExtentPieces::copy_out() const {
  for (const Copy& copy : copies_) {
    if (copy.nbytes > 0) {
      std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.nbytes));
      continue;
    }
    const plan::Region& simplified = plan_->regions[copy.part->region];
    const plan::Region box{copy.part->elem_bytes, copy.part->lengths, simplified.src_strides,
                           simplified.dst_strides};
    plan::copy_region(box, copy.from, copy.to);
  }
}

}  // namespace dcpx::engine
