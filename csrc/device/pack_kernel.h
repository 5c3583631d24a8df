// The kernel that moves many small or strided pieces at once, and the table that tells it which.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/slot.h"
#include "device/copy_list.h"
#include "device/cuda_abi.h"
#include "device/pack_index.h"
#include "device/pinned.h"

namespace dcpx::device {

constexpr std::size_t kFewPieces = 8;  // for fewer a kernel is not worth its wait for a busy device

constexpr std::uint64_t kPackTableBytes = 512 << 10;  // pinned host memory of one PackTable

// Whether this build has the kernel (DCPX_CUDA).
bool has_pack_image() noexcept;
// The kernel on a device, loaded when first asked for; null where this build has none or the driver
// refuses it, which is kept: copies do the work. Throws Error(kStaging) where the device is lost.
// REQUIRES: the device's context is current.
Function pack_kernel(int device);
// From now on pack_kernel() gives null for the device.
void refuse_pack_kernel(int device, const std::string& reason);
// Why the last device that asked has no kernel; empty where it has one or none asked.
std::string pack_refusal();

// For tests: what to load instead of the embedded image; empty: the embedded one. Forgets what was
// loaded. REQUIRES: no CopyStream is alive.
void set_pack_image(std::vector<std::byte> image);

// The table's form of a box. REQUIRES: at most kPackMaxDims dimensions.
PackShape pack_shape(const Box& box) noexcept;

// Tasks for launches of one stream, in pinned memory that the kernel reads while it runs. Filled,
// launched, filled further behind that; reset once the launches are done. Not thread-safe.
class PackTable {
 public:
  explicit PackTable(int device);  // Throws std::bad_alloc.
  PackTable(const PackTable&) = delete;
  ~PackTable();  // The memory stays as long as launches that took too long may still read it.

  bool is_usable() const noexcept { return memory_->pinned.is_pinned(); }
  // False where there is no room: launch() what there is, wait for it, and reset().
  bool add(const Piece& piece);
  bool add(const Box& box);  // REQUIRES: as of pack_shape.
  bool has_tasks() const noexcept { return first_ < end_; }
  // Queues the work added since the last launch; what the driver answered.
  Result launch(Function kernel, Stream stream);
  void reset() noexcept;

 private:
  bool add(const PackTask& whole, std::uint64_t units, std::uint64_t units_per_task);

  struct Memory {
    Slot slot;
    Pinned pinned;  // after the memory: goes before it
  };
  std::shared_ptr<Memory> memory_;
  PackShape* shapes_ = nullptr;
  PackTask* tasks_ = nullptr;
  std::size_t shape_count_ = 0;
  std::size_t first_ = 0;  // of the tasks that are not launched yet
  std::size_t end_ = 0;
};

}  // namespace dcpx::device
