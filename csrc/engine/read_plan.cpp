#include "engine/read_plan.h"

#include <algorithm>

#include "common/bytes.h"
#include "format/file_footer.h"

namespace dcpx::engine {
namespace {

void add_parts(const ReadRegion& wanted, std::uint32_t index, const plan::Region& simplified,
               std::uint64_t slot_bytes, std::uint64_t max_gap_bytes,
               std::vector<ReadPart>& parts) {
  const std::uint64_t begin = wanted.src_offset;
  const std::uint64_t nbytes = simplified.elem_bytes;
  if (simplified.dims() == 0 && begin % slot_bytes + nbytes <= slot_bytes) {  // most small items
    parts.push_back({wanted.file, index, begin, checked_add(begin, nbytes), 0, {}, nbytes});
    return;
  }
  for (plan::RegionPart& piece : plan::split_region(simplified, slot_bytes, max_gap_bytes, begin)) {
    const std::uint64_t at = checked_add(begin, piece.src_offset);
    parts.push_back({wanted.file, index, at, checked_add(at, piece.src_span), piece.dst_offset,
                     std::move(piece.lengths), piece.elem_bytes});
  }
}

bool is_before(const ReadPart& a, const ReadPart& b) {
  if (a.file != b.file) return a.file < b.file;
  return a.begin != b.begin ? a.begin < b.begin : a.end < b.end;
}

// Whether the runs of a box lie one behind the other, as its dimensions are walked.
bool is_ascending(const plan::Region& simplified) {
  std::uint64_t span = simplified.elem_bytes;
  for (std::size_t d = simplified.dims(); d-- > 0;) {
    if (simplified.src_strides[d] < span) return false;
    span += (simplified.lengths[d] - 1) * simplified.src_strides[d];
  }
  return true;
}

void add_extents(const std::vector<bool>& is_checked, std::uint64_t slot_bytes, ReadPlan& out) {
  for (std::uint32_t p = 0; p < out.parts.size(); ++p) {
    const ReadPart& part = out.parts[p];
    const bool is_simple = is_ascending(out.regions[part.region]);
    Extent* last = out.extents.empty() ? nullptr : &out.extents.back();
    const bool is_same_cell = last != nullptr && last->file == part.file &&
                              last->begin / slot_bytes == part.begin / slot_bytes;
    const std::uint64_t gap =
        is_checked[part.file] || !is_same_cell
            ? kCheckedGapBytes
            : merge_gap_bytes(std::min(part.elem_bytes, out.parts[p - 1].elem_bytes));
    if (is_same_cell && part.begin <= last->end + gap) {
      last->is_disjoint = last->is_disjoint && is_simple && part.begin >= last->end;
      last->end = std::max(last->end, part.end);
      ++last->part_count;
      continue;
    }
    if (!is_same_cell) out.turns.push_back(static_cast<std::uint32_t>(out.extents.size()));
    out.extents.push_back({part.file, part.begin, part.end, p, 1, is_simple});
  }
  if (!out.turns.empty()) out.turns.push_back(static_cast<std::uint32_t>(out.extents.size()));
}

}  // namespace

std::uint64_t merge_gap_bytes(std::uint64_t run_bytes) {
  if (run_bytes < kInPlaceRunBytes) return kShortRunGapBytes;
  return std::min(run_bytes / 2, kCheckedGapBytes);
}

ReadPlan plan_reads(const std::vector<ReadRegion>& regions, const std::vector<bool>& is_checked,
                    std::uint64_t slot_bytes) {
  DCPX_CHECK(slot_bytes % kBlockBytes == 0 && slot_bytes >= 4 * kBlockBytes,
             "a slot holds whole blocks, at least four");
  ReadPlan out;
  out.regions.reserve(regions.size());
  out.parts.reserve(regions.size());
  for (std::uint32_t r = 0; r < regions.size(); ++r) {
    const ReadRegion& wanted = regions[r];
    DCPX_CHECK(wanted.file < is_checked.size(), "a region of an unknown file");
    std::uint64_t nbytes = wanted.region.elem_bytes;
    for (const std::uint64_t length : wanted.region.lengths) nbytes = checked_mul(nbytes, length);
    if (nbytes == 0) {
      out.regions.emplace_back();
      continue;
    }
    out.needed_bytes = checked_add(out.needed_bytes, nbytes);
    out.regions.push_back(plan::simplify(wanted.region));
    const plan::Region& simplified = out.regions.back();
    const std::uint64_t gap =
        is_checked[wanted.file] ? kCheckedGapBytes : merge_gap_bytes(simplified.elem_bytes);
    add_parts(wanted, r, simplified, slot_bytes, gap, out.parts);
  }
  if (!std::is_sorted(out.parts.begin(), out.parts.end(), is_before)) {
    std::sort(out.parts.begin(), out.parts.end(), is_before);
  }
  add_extents(is_checked, slot_bytes, out);
  return out;
}

}  // namespace dcpx::engine
