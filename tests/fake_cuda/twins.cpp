#include "twins.h"

#include <cstring>

#include "copies.h"
#include "device/pack_index.h"

namespace fake {

namespace {

template <typename T>
T argument(const Launch& launch, std::size_t index) {
  T value;
  std::memcpy(&value, launch.arguments[index].data(), sizeof value);
  return value;
}

using dcpx::device::PackShape;
using dcpx::device::PackTask;

// Bytes from the first to behind the last that a strided box touches on one side.
std::uint64_t span_of(const PackShape& shape, const std::uint64_t* strides) {
  std::uint64_t span = shape.grains_per_run * shape.grain_bytes;
  for (std::uint32_t d = 0; d < shape.dims; ++d) span += (shape.lengths[d] - 1) * strides[d];
  return span;
}

// csrc/device/pack.cu, with the warps one after the other, beginning where the seed says.
void run_pack(const Launch& launch, const KernelMemory& memory) {
  const auto count = argument<std::uint64_t>(launch, 2);
  const auto tasks_at = argument<Address>(launch, 0);
  const auto shapes_at = argument<Address>(launch, 1);
  const auto* tasks =
      reinterpret_cast<const PackTask*>(memory.at(tasks_at, count * sizeof(PackTask)));
  std::uint64_t shape_count = 0;
  for (std::uint64_t i = 0; i < count; ++i)
    if (tasks[i].shape != dcpx::device::kPackNoShape && tasks[i].shape >= shape_count)
      shape_count = std::uint64_t{tasks[i].shape} + 1;
  const PackShape* shapes = nullptr;
  if (shape_count > 0)
    shapes =
        reinterpret_cast<const PackShape*>(memory.at(shapes_at, shape_count * sizeof(PackShape)));
  for (std::uint64_t n = 0; n < count; ++n) {
    const PackTask& task = tasks[(n + launch.seed) % count];
    if (task.begin >= task.end) continue;
    const bool is_run = task.shape == dcpx::device::kPackNoShape;
    const PackShape* shape = is_run ? nullptr : &shapes[task.shape];
    const std::uint64_t dst_span = is_run ? task.end : span_of(*shape, shape->dst_strides);
    const std::uint64_t src_span = is_run ? task.end : span_of(*shape, shape->src_strides);
    const std::uint64_t first = is_run ? task.begin : 0;
    // What is added to an address to get to its bytes.
    const Address to = reinterpret_cast<Address>(memory.at(task.dst + first, dst_span - first)) -
                       (task.dst + first);
    const Address from = reinterpret_cast<Address>(memory.at(task.src + first, src_span - first)) -
                         (task.src + first);
    for (std::uint32_t lane = 0; lane < dcpx::device::kPackLanes; ++lane) {
      dcpx::device::pack_lane(task, shapes, lane, dcpx::device::kPackLanes,
                              [&](std::uint64_t dst, std::uint64_t src, std::uint32_t nbytes) {
                                if (dst % nbytes != 0 || src % nbytes != 0) throw IllegalAddress{};
                                std::memcpy(reinterpret_cast<void*>(dst + to),
                                            reinterpret_cast<const void*>(src + from), nbytes);
                              });
    }
  }
}

// For the fake's own tests: fills memory with a byte.
void run_fill(const Launch& launch, const KernelMemory& memory) {
  const auto nbytes = argument<std::uint64_t>(launch, 1);
  std::memset(memory.at(argument<Address>(launch, 0), nbytes), argument<std::uint8_t>(launch, 2),
              nbytes);
}

}  // namespace

std::byte* KernelMemory::at(Address address, std::uint64_t nbytes) const {
  World& w = world();
  const std::lock_guard lock(w.mutex);
  Side side;
  if (resolve("a kernel", address, nbytes, side) != kSuccess) throw IllegalAddress{};
  int pieces = 0;
  if (side.device < 0 && !w.memory.is_pinned(address, nbytes, device_, pieces)) {
    w.report("a kernel: host memory that is not registered");
    throw IllegalAddress{};
  }
  if (side.device >= 0 && side.device != device_) {
    w.report("a kernel of device " + std::to_string(device_) + ": memory of device " +
             std::to_string(side.device));
    throw IllegalAddress{};
  }
  return side.memory;
}

const TwinInfo* find_twin(const char* name) noexcept {
  static const TwinInfo kTwins[] = {
      {"dcpx_pack", {8, 8, 8}, run_pack},
      {"fake_fill_kernel", {8, 8, 1}, run_fill},
  };
  for (const TwinInfo& twin : kTwins)
    if (std::strcmp(twin.name, name) == 0) return &twin;
  return nullptr;
}

}  // namespace fake
