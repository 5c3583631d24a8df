#include "engine/read_plan.h"

#include <algorithm>

#include "common/bytes.h"
#include "format/file_footer.h"
#include "io/file.h"

namespace dcpx::engine {
namespace {

void add_parts(const ReadRegion& wanted, std::uint32_t index, const plan::Region& simplified,
               std::uint64_t slot_bytes, std::vector<ReadPart>& parts) {
  const std::uint64_t begin = wanted.src_offset;
  const std::uint64_t nbytes = simplified.elem_bytes;
  if (simplified.dims() == 0 && begin % slot_bytes + nbytes <= slot_bytes) {  // most small items
    parts.push_back({wanted.file, index, begin, checked_add(begin, nbytes), 0, {}, nbytes});
    return;
  }
  for (plan::RegionPart& piece : plan::split_region(simplified, slot_bytes, slot_bytes, begin)) {
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

// Bytes of the source that lie together wherever the box has any: not fewer for a destination
// whose elements lie apart.
std::uint64_t source_run_bytes(const plan::Region& simplified) {
  std::uint64_t run = simplified.elem_bytes;
  for (std::size_t d = simplified.dims(); d-- > 0;) {
    if (simplified.src_strides[d] != run) break;
    run *= simplified.lengths[d];
  }
  return run;
}

void add_cells(std::uint64_t slot_bytes, ReadPlan& out) {
  for (std::uint32_t p = 0; p < out.parts.size(); ++p) {
    const ReadPart& part = out.parts[p];
    CellRange* last = out.cells.empty() ? nullptr : &out.cells.back();
    if (last != nullptr && last->file == part.file &&
        last->begin / slot_bytes == part.begin / slot_bytes) {
      last->end = std::max(last->end, part.end);
      ++last->part_count;
    } else {
      out.cells.push_back({part.file, part.begin, part.end, p, 1});
    }
  }
}

}  // namespace

std::uint64_t merge_gap_bytes(std::uint64_t run_bytes, bool is_direct) {
  const std::uint64_t most = is_direct ? kDirectGapBytes : kCachedGapBytes;
  return run_bytes < kInPlaceRunBytes ? most : std::min(run_bytes / 2, most);
}

ReadPlan plan_reads(const std::vector<ReadRegion>& regions, std::size_t file_count,
                    std::uint64_t slot_bytes) {
  DCPX_CHECK(slot_bytes % kBlockBytes == 0 && slot_bytes >= 4 * kBlockBytes,
             "a slot holds whole blocks, at least four");
  ReadPlan out;
  out.regions.reserve(regions.size());
  out.parts.reserve(regions.size());
  for (std::uint32_t r = 0; r < regions.size(); ++r) {
    const ReadRegion& wanted = regions[r];
    DCPX_CHECK(wanted.file < file_count, "a region of an unknown file");
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
  if (!std::is_sorted(out.parts.begin(), out.parts.end(), is_before)) {
    std::sort(out.parts.begin(), out.parts.end(), is_before);
  }
  add_cells(slot_bytes, out);
  return out;
}

void plan_cell(const ReadPlan& plan, const CellRange& cell, CellMode mode, std::uint64_t slot_bytes,
               CellReads& reads) {
  const auto gap_of = [&](const ReadPart& part) {
    if (mode.is_object) return kObjectGapBytes;
    return merge_gap_bytes(source_run_bytes(plan.regions[part.region]), mode.is_direct);
  };
  // What reads are rounded to. Runs less than a block apart share one, or their blocks touch.
  const std::uint64_t unit = mode.is_checked  ? kBlockBytes
                             : mode.is_direct ? io::kDirectAlignment
                                              : 1;
  const std::uint64_t near = mode.is_checked ? kBlockBytes - 1 : 0;
  reads.parts.clear();
  reads.extents.clear();
  for (std::uint32_t p = cell.first_part; p < cell.first_part + cell.part_count; ++p) {
    const ReadPart& whole = plan.parts[p];
    const plan::Region& simplified = plan.regions[whole.region];
    if (whole.end - whole.begin <= whole.elem_bytes) {  // one run
      reads.parts.push_back(whole);
      continue;
    }
    const plan::Region box{whole.elem_bytes, whole.lengths, simplified.src_strides,
                           simplified.dst_strides};
    for (plan::RegionPart& piece :
         plan::split_region(box, slot_bytes, std::max(gap_of(whole), near), whole.begin)) {
      const std::uint64_t at = whole.begin + piece.src_offset;
      reads.parts.push_back({whole.file, whole.region, at, at + piece.src_span,
                             whole.dest_offset + piece.dst_offset, std::move(piece.lengths),
                             piece.elem_bytes});
    }
  }
  if (!std::is_sorted(reads.parts.begin(), reads.parts.end(), is_before)) {
    std::sort(reads.parts.begin(), reads.parts.end(), is_before);
  }
  for (std::uint32_t p = 0; p < reads.parts.size(); ++p) {
    const ReadPart& part = reads.parts[p];
    const bool is_simple = is_ascending(plan.regions[part.region]);
    Extent* last = reads.extents.empty() ? nullptr : &reads.extents.back();
    const bool is_near =
        last != nullptr &&
        align_down(part.begin, unit) <=
            align_up(last->end, unit) + std::min(gap_of(part), gap_of(reads.parts[p - 1]));
    if (is_near) {
      last->is_disjoint = last->is_disjoint && is_simple && part.begin >= last->end;
      last->end = std::max(last->end, part.end);
      ++last->part_count;
    } else {
      reads.extents.push_back({part.file, part.begin, part.end, p, 1, is_simple});
    }
  }
}

}  // namespace dcpx::engine
