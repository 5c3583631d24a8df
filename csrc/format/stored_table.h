// The columns of a `.metadata` as one table: lengths and numbers that contradict each other are
// refused, so that nothing is read outside of a column, whatever a file says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "format/column_checks.h"

namespace dcpx {

// One column of int64.
struct NumberColumn {
  const std::int64_t* values = nullptr;
  std::size_t count = 0;
  std::int64_t operator[](std::size_t at) const { return values[at]; }  // REQUIRES: at < count
};

// Not thread-safe while it is filled. The columns' owner keeps them alive.
struct StoredTable {
  // The column of a name; throws for one that is not there.
  using Find = std::function<RawColumn(const char* name)>;
  struct Begins {
    std::size_t sizes = 0;    // in tensor_sizes
    std::size_t cells = 0;    // in chunk_offsets and chunk_sizes
    std::size_t strides = 0;  // in strides
  };
  // What the columns say of one tensor.
  struct Tensor {
    std::size_t ndim = 0;
    const std::int64_t* sizes = nullptr;    // [ndim]
    const std::int64_t* offsets = nullptr;  // of chunks, [chunks x ndim]
    const std::int64_t* lengths = nullptr;  // as `offsets`
    std::size_t chunks = 0;
  };
  static constexpr std::size_t kMaxItems = UINT32_MAX;

  // `string_count`: of those that columns of string numbers name. `descriptor_count`: of lists that
  // storage_descriptors names. `has_strides`: whether there are columns of them.
  // Throws Error(kPlan) where lengths or numbers contradict each other.
  StoredTable(const Find& find, std::size_t string_count, std::size_t descriptor_count,
              bool has_strides);

  // What is said of entry `number`. Throws Error(kPlan) where it is no tensor.
  Tensor tensor(std::int64_t number) const;

  std::vector<std::int64_t> tensor_of;  // by entry; -1: bytes
  std::vector<Begins> begins;           // by tensor
  NumberColumn ndims, tensor_sizes, chunk_counts, chunk_offsets, chunk_sizes;
  NumberColumn dtype_numbers, layout_numbers;  // not compared: their names are looked up
  NumberColumn stride_counts, strides;         // empty without strides
  const std::uint8_t* flags = nullptr;         // [tensors]
  const std::uint8_t* format_codes = nullptr;  // [tensors]

  NumberColumn storage_fqn, storage_ndim, storage_offsets, hints, paths, file_offsets, lengths,
      descriptor_numbers;
  std::vector<std::size_t> offset_begins;  // by item, in storage_offsets

 private:
  void take_entries(const Find& find, bool has_strides);
  void take_items(const Find& find, std::size_t string_count, std::size_t descriptor_count);
};

}  // namespace dcpx
