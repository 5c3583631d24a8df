// Host twins of kernels: the fake cannot run a fatbin, so a kernel's name stands for one of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <vector>

#include "world.h"

namespace fake {

// Thrown by a twin that touches what a kernel cannot: the device is lost, as in CUDA.
struct IllegalAddress : std::exception {};

// What a kernel may touch: allocations of its device, and registered host memory.
class KernelMemory {
 public:
  explicit KernelMemory(int device) : device_(device) {}
  // Where the bytes of [address, address + nbytes) are. Reports and throws IllegalAddress. Takes
  // the world's mutex.
  std::byte* at(Address address, std::uint64_t nbytes) const;

 private:
  int device_;
};

struct Launch {
  unsigned blocks = 0;
  unsigned threads = 0;  // a block
  std::vector<std::vector<std::byte>> arguments;
  std::uint64_t seed = 0;
};

struct TwinInfo {
  const char* name;
  std::vector<std::size_t> argument_bytes;
  void (*run)(const Launch& launch, const KernelMemory& memory);
};

const TwinInfo* find_twin(const char* name) noexcept;

}  // namespace fake
