// Any bytes: a `.metadata` is declined, or its columns fit each other and its texts lie in it.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "format/metadata_unpickle.h"
#include "fuzz.h"

namespace {

std::size_t total(const std::vector<std::int64_t>& counts) {
  std::size_t sum = 0;
  for (const std::int64_t count : counts) {
    sum += static_cast<std::size_t>(std::max<std::int64_t>(count, 0));
  }
  return sum;
}

bool are_within(const std::vector<std::int64_t>& values, std::int64_t low,
                std::int64_t high = INT64_MAX) {
  return std::all_of(values.begin(), values.end(),
                     [&](std::int64_t value) { return value >= low && value <= high; });
}

bool have_ends(const std::vector<std::int64_t>& begins, const std::vector<std::int64_t>& lengths) {
  for (std::size_t at = 0; at < begins.size(); ++at) {
    std::int64_t end = 0;
    if (__builtin_add_overflow(begins[at], lengths[at], &end)) return false;
  }
  return begins.size() == lengths.size();
}

// Lengths, numbers of strings, ranges; and that nothing is larger than `size` bytes may make it.
bool are_whole(const dcpx::UnpickledColumns& c, const std::byte* data, std::size_t size) {
  const char* first = reinterpret_cast<const char*>(data);
  for (const std::string_view text : c.strings) {
    if (text.data() < first || text.data() + text.size() > first + size) return false;
  }
  const auto last = static_cast<std::int64_t>(c.strings.size()) - 1;
  for (const auto* column : {&c.entry_fqn, &c.tensor_dtype, &c.tensor_layout, &c.storage_fqn,
                             &c.storage_path, &c.planner_fqn}) {
    if (!are_within(*column, 0, last)) return false;
  }
  const auto tensors =
      static_cast<std::size_t>(std::count(c.entry_kind.begin(), c.entry_kind.end(), 0));
  std::size_t cells = 0;
  for (std::size_t at = 0; at < c.tensor_ndim.size() && at < c.tensor_chunk_count.size(); ++at) {
    cells += static_cast<std::size_t>(c.tensor_ndim[at] * c.tensor_chunk_count[at]);
  }
  const std::size_t items = c.storage_fqn.size();
  const auto lists = static_cast<std::int64_t>(c.descriptors.size());
  return c.entry_kind.size() == c.entry_fqn.size() && c.tensor_dtype.size() == tensors &&
         c.tensor_layout.size() == tensors && c.tensor_flags.size() == tensors &&
         c.tensor_memory_format.size() == tensors && c.tensor_ndim.size() == tensors &&
         c.tensor_chunk_count.size() == tensors && c.tensor_stride_count.size() == tensors &&
         c.tensor_sizes.size() == total(c.tensor_ndim) &&
         c.tensor_strides.size() == total(c.tensor_stride_count) &&
         c.chunk_flags.size() == total(c.tensor_chunk_count) && c.chunk_offsets.size() == cells &&
         have_ends(c.chunk_offsets, c.chunk_sizes) && are_within(c.tensor_sizes, 0) &&
         are_within(c.chunk_offsets, 0) && are_within(c.chunk_sizes, 0) && cells <= size &&
         c.storage_ndim.size() == items && c.storage_hint.size() == items &&
         c.storage_path.size() == items && c.storage_descriptors.size() == items &&
         c.storage_offsets.size() == total(c.storage_ndim) && c.storage_offset.size() == items &&
         have_ends(c.storage_offset, c.storage_bytes) && are_within(c.storage_offsets, 0) &&
         are_within(c.storage_hint, -1) && are_within(c.storage_descriptors, -1, lists - 1) &&
         c.planner_len.size() == c.planner_fqn.size() &&
         c.planner_tag.size() == total(c.planner_len) &&
         c.planner_value.size() == c.planner_tag.size() && c.version <= last;
}

}  // namespace

FUZZ(metadata_unpickle) {
  dcpx::UnpickledColumns columns;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  if (dcpx::unpickle_metadata(bytes, size, {1, 2}, &columns) && !are_whole(columns, bytes, size)) {
    __builtin_trap();
  }
}
