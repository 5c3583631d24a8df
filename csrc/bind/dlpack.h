// DLPack's tensor, by which torch takes and gives memory without its headers. The layout is that of
// the standard's version 0, whose capsules are named "dltensor": all versions of torch know it.
#pragma once

#include <cstdint>

namespace dcpx::dlpack {

constexpr const char* kCapsuleName = "dltensor";
constexpr std::int32_t kHost = 1;  // kDLCPU

struct Device {
  std::int32_t type;
  std::int32_t id;
};

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* sizes;
  std::int64_t* strides;  // elements; null: C order
  std::uint64_t byte_offset;
};

struct ManagedTensor {
  Tensor tensor;
  void* manager;
  void (*deleter)(ManagedTensor*);
};

}  // namespace dcpx::dlpack
