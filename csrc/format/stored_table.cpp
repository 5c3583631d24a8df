#include "format/stored_table.h"

#include <algorithm>

#include "common/error.h"

namespace dcpx {
namespace {

// Adds to the length of a column what one row of it takes.
void extend(std::size_t* length, std::int64_t rows, std::int64_t width = 1) {
  std::size_t cells = 0;
  DCPX_CHECK(rows >= 0 && width >= 0 && !__builtin_mul_overflow(rows, width, &cells) &&
                 !__builtin_add_overflow(*length, cells, length),
             "a column of metadata has more values than memory");
}

NumberColumn numbers(const RawColumn& column) {
  const auto address = reinterpret_cast<std::uintptr_t>(column.begin);
  DCPX_CHECK(column.nbytes == 0 || address % sizeof(std::int64_t) == 0,
             "a column of numbers begins at a multiple of 8");
  return {reinterpret_cast<const std::int64_t*>(column.begin),
          column.nbytes / sizeof(std::int64_t)};
}

NumberColumn numbers(const RawColumn& column, std::size_t count) {
  const NumberColumn found = numbers(column);
  DCPX_CHECK(found.count == count, "a column of metadata has another length");
  return found;
}

const std::uint8_t* bytes(const RawColumn& column, std::size_t count) {
  DCPX_CHECK(column.nbytes == count, "a column of metadata has another length");
  return reinterpret_cast<const std::uint8_t*>(column.begin);
}

void check_within(const NumberColumn& column, std::int64_t low, std::size_t end,
                  const char* message) {
  const auto bound = static_cast<std::int64_t>(end);
  DCPX_CHECK(std::all_of(column.values, column.values + column.count,
                         [&](std::int64_t number) { return number >= low && number < bound; }),
             message);
}

}  // namespace

StoredTable::StoredTable(const Find& find, std::size_t string_count, std::size_t descriptor_count,
                         bool has_strides) {
  take_entries(find, has_strides);
  take_items(find, string_count, descriptor_count);
}

void StoredTable::take_entries(const Find& find, bool has_strides) {
  const RawColumn kinds = find("entry_kind");
  tensor_of.resize(kinds.nbytes);
  std::size_t tensors = 0;
  for (std::size_t i = 0; i < kinds.nbytes; ++i) {
    const bool is_tensor = kinds.begin[i] == std::byte{0};
    tensor_of[i] = is_tensor ? static_cast<std::int64_t>(tensors++) : -1;
  }
  ndims = numbers(find("tensor_ndim"), tensors);
  chunk_counts = numbers(find("tensor_chunk_count"), tensors);
  if (has_strides) stride_counts = numbers(find("tensor_stride_count"), tensors);
  begins.resize(tensors);
  Begins end;
  std::size_t chunks = 0;
  for (std::size_t i = 0; i < tensors; ++i) {
    begins[i] = end;
    extend(&chunks, chunk_counts[i]);
    extend(&end.sizes, ndims[i]);
    extend(&end.cells, ndims[i], chunk_counts[i]);
    if (has_strides) extend(&end.strides, std::max<std::int64_t>(stride_counts[i], 0));
  }
  bytes(find("chunk_flags"), chunks);  // a byte a chunk, also of tensors without dimensions
  tensor_sizes = numbers(find("tensor_sizes"), end.sizes);
  chunk_offsets = numbers(find("chunk_offsets"), end.cells);
  chunk_sizes = numbers(find("chunk_sizes"), end.cells);
  if (has_strides) strides = numbers(find("tensor_strides"), end.strides);
  dtype_numbers = numbers(find("tensor_dtype"), tensors);
  layout_numbers = numbers(find("tensor_layout"), tensors);
  flags = bytes(find("tensor_flags"), tensors);
  format_codes = bytes(find("tensor_memory_format"), tensors);
}

void StoredTable::take_items(const Find& find, std::size_t string_count,
                             std::size_t descriptor_count) {
  constexpr const char* kNoString = "a column of metadata numbers no string";
  storage_fqn = numbers(find("storage_fqn"));
  check_within(storage_fqn, 0, string_count, kNoString);
  const std::size_t items = storage_fqn.count;
  DCPX_CHECK(items < kMaxItems, "metadata of 2^32 items");
  storage_ndim = numbers(find("storage_ndim"), items);
  offset_begins.resize(items);
  std::size_t end = 0;
  for (std::size_t i = 0; i < items; ++i) {
    offset_begins[i] = end;
    extend(&end, std::max<std::int64_t>(storage_ndim[i], 0));
  }
  storage_offsets = numbers(find("storage_offsets"), end);
  hints = numbers(find("storage_hint"), items);
  paths = numbers(find("storage_path"), items);
  check_within(paths, 0, string_count, kNoString);
  file_offsets = numbers(find("storage_offset"), items);
  lengths = numbers(find("storage_bytes"), items);
  descriptor_numbers = numbers(find("storage_descriptors"), items);
  check_within(descriptor_numbers, -1, descriptor_count,
               "a column of metadata numbers no descriptors");
}

StoredTable::Tensor StoredTable::tensor(std::int64_t number) const {
  DCPX_CHECK(number >= 0 && static_cast<std::size_t>(number) < tensor_of.size() &&
                 tensor_of[static_cast<std::size_t>(number)] >= 0,
             "a stored tensor's number is wanted");
  const auto at = static_cast<std::size_t>(tensor_of[static_cast<std::size_t>(number)]);
  const Begins& begin = begins[at];
  return {static_cast<std::size_t>(ndims[at]), tensor_sizes.values + begin.sizes,
          chunk_offsets.values + begin.cells, chunk_sizes.values + begin.cells,
          static_cast<std::size_t>(chunk_counts[at])};
}

}  // namespace dcpx
