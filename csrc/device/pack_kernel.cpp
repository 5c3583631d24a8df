#include "device/pack_kernel.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "device/cuda_driver.h"

// Made by setup.py from pack.cu; null where the build has no nvcc (DCPX_CUDA).
extern const unsigned long long dcpx_pack_fatbin[] __attribute__((weak));

namespace dcpx::device {
namespace {

constexpr std::size_t kMaxShapes = 256;
constexpr std::size_t kMaxTasks =
    (kPackTableBytes - kMaxShapes * sizeof(PackShape)) / sizeof(PackTask);
constexpr std::uint64_t kMaxTasksPerBox = 4096;
static_assert(kMaxTasksPerBox < kMaxTasks, "an empty table takes any box");
static_assert(kMaxTasks * kPackTaskBytes > 2 * kSmallBytes, "and any piece");

// A launch leaves most of the device to the work that it runs beside: this many warps keep enough
// moves under way for a PCIe link.
constexpr unsigned kWarpsPerBlock = 8;
constexpr unsigned kMaxBlocks = 64;

struct Kernels {
  std::mutex mutex;
  std::vector<std::byte> image;  // of a test
  std::map<int, Function> by_device;
  std::string refusal;
};

Kernels& kernels() {
  static auto* const instance = new Kernels;
  return *instance;
}

const void* embedded_image() noexcept { return dcpx_pack_fatbin; }

}  // namespace

bool has_pack_image() noexcept { return embedded_image() != nullptr; }

Function pack_kernel(int device) {
  Kernels& all = kernels();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_device.find(device);
  if (found != all.by_device.end()) return found->second;
  const void* const image = all.image.empty() ? embedded_image() : all.image.data();
  Driver& driver = Driver::get();
  const Api& api = driver.api();
  Module module = nullptr;
  Function function = nullptr;
  if (image == nullptr) {
    all.refusal = "built without the kernel (DCPX_CUDA)";
  } else if (driver.attribute(device, kAttributeHostPointerForRegisteredMem, 0) == 0) {
    all.refusal = "device " + std::to_string(device) + " cannot use host addresses";
  } else {
    const char* call = "cuModuleLoadData";
    Result result = api.cuModuleLoadData(&module, image);
    if (result == kSuccess) {
      call = "cuModuleGetFunction";
      result = api.cuModuleGetFunction(&function, module, kPackKernelName);
    }
    const std::string doing = "loading the pack kernel on device " + std::to_string(device);
    if (is_lost(result)) driver.check(result, call, doing);
    if (result != kSuccess) {  // an older driver, or a device that the image does not know
      function = nullptr;
      all.refusal = driver.describe(result, call, doing);
    }
  }
  all.by_device[device] = function;
  return function;
}

void refuse_pack_kernel(int device, const std::string& reason) {
  Kernels& all = kernels();
  const std::lock_guard lock(all.mutex);
  all.by_device[device] = nullptr;
  all.refusal = reason;
}

std::string pack_refusal() {
  Kernels& all = kernels();
  const std::lock_guard lock(all.mutex);
  return all.refusal;
}

void set_pack_image(std::vector<std::byte> image) {
  Kernels& all = kernels();
  const std::lock_guard lock(all.mutex);
  all.image = std::move(image);
  all.by_device.clear();
  all.refusal.clear();
}

PackShape pack_shape(const Box& box) noexcept {
  const plan::Region& region = box.region;
  PackShape shape{};
  std::uint64_t bits = box.dst | box.src | region.elem_bytes;
  for (std::size_t d = 0; d < region.dims(); ++d) {
    shape.lengths[d] = region.lengths[d];
    shape.src_strides[d] = region.src_strides[d];
    shape.dst_strides[d] = region.dst_strides[d];
    bits |= region.src_strides[d] | region.dst_strides[d];
  }
  shape.dims = static_cast<std::uint32_t>(region.dims());
  shape.grain_bytes = pack_grain(bits);
  shape.grains_per_run = region.elem_bytes / shape.grain_bytes;
  return shape;
}

PackTable::PackTable(int device) : memory_(std::make_shared<Memory>()) {
  memory_->slot = Slot(kPackTableBytes);
  std::byte* const data = memory_->slot.data();
  memory_->pinned = Pinned::try_pin(data, kPackTableBytes, device);
  shapes_ = reinterpret_cast<PackShape*>(data);
  tasks_ = reinterpret_cast<PackTask*>(data + kMaxShapes * sizeof(PackShape));
}

PackTable::~PackTable() { let_go_when_unused(std::move(memory_)); }

bool PackTable::add(const PackTask& whole, std::uint64_t units, std::uint64_t units_per_task) {
  const std::uint64_t count = (units + units_per_task - 1) / units_per_task;
  if (count > kMaxTasks - end_) return false;
  for (std::uint64_t at = 0; at < units; at += units_per_task) {
    PackTask task = whole;
    task.begin = at;
    task.end = std::min(units, at + units_per_task);
    tasks_[end_++] = task;
  }
  return true;
}

bool PackTable::add(const Piece& piece) {
  return add({piece.dst, piece.src, 0, 0, kPackNoShape, 0}, piece.nbytes, kPackTaskBytes);
}

bool PackTable::add(const Box& box) {
  if (shape_count_ == kMaxShapes) return false;
  const PackShape shape = pack_shape(box);
  std::uint64_t grains = shape.grains_per_run;
  for (const std::uint64_t length : box.region.lengths) grains *= length;
  const std::uint64_t per_task = std::max(kPackTaskBytes / shape.grain_bytes,
                                          (grains + kMaxTasksPerBox - 1) / kMaxTasksPerBox);
  const auto number = static_cast<std::uint32_t>(shape_count_);
  if (!add({box.dst, box.src, 0, 0, number, 0}, grains, per_task)) return false;
  shapes_[shape_count_++] = shape;
  return true;
}

Result PackTable::launch(Function kernel, Stream stream) {
  const PackTask* tasks = tasks_ + first_;
  const PackShape* shapes = shapes_;
  std::uint64_t count = end_ - first_;
  void* arguments[] = {static_cast<void*>(&tasks), static_cast<void*>(&shapes), &count};
  const auto blocks = static_cast<unsigned>(
      std::min<std::uint64_t>(kMaxBlocks, (count + kWarpsPerBlock - 1) / kWarpsPerBlock));
  first_ = end_;
  return Driver::get().api().cuLaunchKernel(kernel, blocks, 1, 1, kWarpsPerBlock * kPackLanes, 1, 1,
                                            0, stream, arguments, nullptr);
}

void PackTable::reset() noexcept { shape_count_ = first_ = end_ = 0; }

}  // namespace dcpx::device
