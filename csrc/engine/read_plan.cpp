#include "engine/read_plan.h"

#include <algorithm>

#include "common/bytes.h"
#include "format/file_footer.h"

namespace dcpx::engine {
namespace {

void add_parts(const ReadRegion& wanted, std::uint32_t index, const plan::Region& simplified,
               std::uint64_t slot_bytes, std::vector<ReadPart>& parts) {
  // Runs are cut on the grid of slots, so that an extent rounded to blocks still fits its slot;
  // boxes begin anywhere and leave room for a block at either end.
  const bool is_one_run = simplified.dims() == 0;
  const std::uint64_t max_span = is_one_run ? slot_bytes : slot_bytes - 2 * kBlockBytes;
  for (plan::RegionPart& piece :
       plan::split_region(simplified, max_span, kMergeGapBytes, wanted.src_offset)) {
    ReadPart part;
    part.region = index;
    part.begin = checked_add(wanted.src_offset, piece.src_offset);
    part.end = checked_add(part.begin, piece.src_span);
    part.dest_offset = piece.dst_offset;
    part.lengths = std::move(piece.lengths);
    part.elem_bytes = piece.elem_bytes;
    parts.push_back(std::move(part));
  }
}

}  // namespace

ReadPlan plan_reads(const std::vector<ReadRegion>& regions, std::uint64_t slot_bytes) {
  DCPX_CHECK(slot_bytes % kBlockBytes == 0 && slot_bytes >= 4 * kBlockBytes,
             "a slot holds whole blocks, at least four");
  ReadPlan out;
  for (std::uint32_t r = 0; r < regions.size(); ++r) {
    const ReadRegion& wanted = regions[r];
    std::uint64_t nbytes = wanted.region.elem_bytes;
    for (const std::uint64_t length : wanted.region.lengths) nbytes = checked_mul(nbytes, length);
    if (nbytes == 0) {
      out.regions.emplace_back();
      continue;
    }
    out.needed_bytes = checked_add(out.needed_bytes, nbytes);
    out.regions.push_back(plan::simplify(wanted.region));
    add_parts(wanted, r, out.regions.back(), slot_bytes, out.parts);
  }
  std::sort(out.parts.begin(), out.parts.end(), [&](const ReadPart& a, const ReadPart& b) {
    const std::uint32_t file_a = regions[a.region].file;
    const std::uint32_t file_b = regions[b.region].file;
    if (file_a != file_b) return file_a < file_b;
    return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
  });

  for (std::uint32_t p = 0; p < out.parts.size(); ++p) {
    const ReadPart& part = out.parts[p];
    const std::uint32_t file = regions[part.region].file;
    const bool is_direct_run = part.is_run() && part.elem_bytes >= kInPlaceRunBytes;
    Extent* last = out.extents.empty() ? nullptr : &out.extents.back();
    const bool joins = last != nullptr && last->file == file &&
                       part.begin <= last->end + kMergeGapBytes &&
                       align_up(std::max(part.end, last->end), kBlockBytes) -
                               align_down(last->begin, kBlockBytes) <=
                           slot_bytes;
    if (joins) {
      last->is_in_place = last->is_in_place && is_direct_run && part.begin >= last->end;
      last->end = std::max(last->end, part.end);
      ++last->part_count;
    } else {
      out.extents.push_back({file, part.begin, part.end, p, 1, is_direct_run});
    }
  }
  return out;
}

}  // namespace dcpx::engine
