// The pickle that torch.save puts into `data.pkl` for one plain strided tensor, written and
// recognised. Nothing here executes a pickle: what is not exactly one of the known shapes is left
// to torch.load(weights_only=True).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace dcpx {

// How torch names the element type of a saved tensor:
//   {"torch", "FloatStorage", ""}                           torch._utils._rebuild_tensor_v2
//   {"torch.storage", "UntypedStorage", "float8_e4m3fn"}    torch._utils._rebuild_tensor_v3
struct TensorFraming {
  std::string storage_module;
  std::string storage_name;
  std::string dtype_name;  // without `torch.`; empty where the storage's class says it

  bool is_untyped() const { return !dtype_name.empty(); }
};

// Bytes of one element, or 0 for a framing that this build does not know (a dtype of a newer
// torch, or a quantized one).
std::uint64_t framing_elem_bytes(std::string_view storage_module, std::string_view storage_name,
                                 std::string_view dtype_name) noexcept;

// What the pickle says; the views point into its bytes.
struct PickledTensor {
  std::string_view storage_module;
  std::string_view storage_name;
  std::string_view dtype_name;
  std::string_view storage_key;       // the payload is the record `data/<key>`
  std::int64_t storage_numel = 0;     // elements; bytes where the storage is untyped
  std::int64_t storage_offset = 0;    // elements
  std::vector<std::int64_t> sizes;    // [D]
  std::vector<std::int64_t> strides;  // [D], elements
};

// Appends the pickle (protocol 2, no memo) of a contiguous or strided view that starts at element
// 0 of storage "0". REQUIRES: sizes.size() == strides.size().
void append_tensor_pickle(const TensorFraming& framing, std::uint64_t storage_numel,
                          const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& strides, std::vector<std::byte>& out);

// Returns whether the pickle is a plain tensor, and then fills `tensor`. The numbers are as
// found, signs and ranges unchecked.
bool parse_tensor_pickle(const std::byte* data, std::size_t nbytes, PickledTensor* tensor);

}  // namespace dcpx
