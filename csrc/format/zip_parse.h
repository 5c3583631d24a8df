// Finds the payload of a tensor item that stock DCP wrote, without executing its pickle.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "format/zip_directory.h"

namespace dcpx {

enum class ZipShape {
  kPlainTensor,  // what torch.save makes of one strided tensor of an unquantized dtype
  kOther,        // anything else that torch.save makes, or a zip that another tool compressed: for
                 // torch.load(weights_only=True)
};

struct ParsedTensor {
  std::string storage_module;  // the framing, see TensorFraming
  std::string storage_name;
  std::string dtype_name;
  std::uint64_t elem_bytes = 0;
  std::uint64_t payload_offset = 0;  // from the item's start
  std::uint64_t payload_bytes = 0;
  std::uint32_t payload_crc = 0;  // as the zip says; meaningless without has_payload_crc
  bool has_payload_crc = false;   // torch can be told to compute none; it then writes 0
  bool is_big_endian = false;
  std::int64_t storage_numel = 0;     // elements; bytes where the storage is untyped
  std::int64_t storage_offset = 0;    // elements
  std::vector<std::int64_t> sizes;    // [D], each >= 0
  std::vector<std::int64_t> strides;  // [D], elements, each >= 0
};

// Fills `tensor` for kPlainTensor; leaves it unspecified otherwise. With kPlainTensor, every
// element that sizes, strides and storage_offset reach lies inside the payload, and the payload
// inside the item. Two reads for a torch.save item, one below 8 KiB; allocates no more than a small
// multiple of the directory (at most 16 MiB) and data.pkl (at most 1 MiB).
// Throws Error(kCorruption) as list_zip_records(), unless the item begins as torch.save's format of
// before zips; and for a data.pkl that fails its CRC, and a tensor that contradicts its storage or
// its record.
ZipShape parse_zip_item(RangeReader& reader, std::uint64_t item_bytes, ParsedTensor* tensor);

}  // namespace dcpx
