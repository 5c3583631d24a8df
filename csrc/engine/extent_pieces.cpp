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

std::uint64_t to_address(const std::byte* data) {
  return static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(data));
}

}  // namespace

void ExtentPieces::lay_out(const ReadPlan& plan, const std::vector<ReadRegion>& regions,
                           const std::vector<ReadPart>& parts, const Extent& extent,
                           std::uint64_t begin, std::uint64_t end, bool is_direct,
                           std::byte* slot) {
  plan_ = &plan;
  regions_ = &regions;
  begin_ = at_ = begin;
  slot_ = slot;
  pieces_.clear();
  copies_.clear();
  in_place_bytes_ = 0;
  for (std::uint32_t p = extent.first_part; p < extent.first_part + extent.part_count; ++p) {
    const ReadPart& part = parts[p];
    std::byte* const dest = regions[part.region].dest + part.dest_offset;
    if (!is_direct && extent.is_disjoint && part.elem_bytes >= kInPlaceRunBytes &&
        regions[part.region].device < 0) {
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
  if (pieces_.size() + 3 > kMaxPieces) {
    copies_.push_back({slot_ + (begin - begin_), dest, nbytes, &part});
    return;
  }
  fill_slot_up_to(begin);
  pieces_.push_back({dest, static_cast<std::size_t>(nbytes)});
  in_place_bytes_ += nbytes;
  at_ = begin + nbytes;
}

void ExtentPieces::fill_slot_up_to(std::uint64_t offset) {
  if (offset == at_) return;
  pieces_.push_back({slot_ + (at_ - begin_), static_cast<std::size_t>(offset - at_)});
  at_ = offset;
}

void ExtentPieces::copy_out(device::CopyStreams& streams) const {
  for (const Copy& copy : copies_) {
    if (copy.nbytes > 0) {
      std::memcpy(copy.to, copy.from, static_cast<std::size_t>(copy.nbytes));
      continue;
    }
    const plan::Region& simplified = plan_->regions[copy.part->region];
    const plan::Region box{copy.part->elem_bytes, copy.part->lengths, simplified.src_strides,
                           simplified.dst_strides};
    const int device = (*regions_)[copy.part->region].device;
    if (device < 0) {
      plan::copy_region(box, copy.from, copy.to);
    } else {
      streams.on(device).copy_region(device::Direction::kToDevice, box, to_address(copy.to),
                                     to_address(copy.from));
    }
  }
}

}  // namespace dcpx::engine
