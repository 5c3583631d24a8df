// Copies that wait to be queued, and the choice of how: what touches is merged, what is small is
// set aside for the kernel. No driver in here.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "plan/region_copy.h"

namespace dcpx::device {

enum class Direction { kToHost, kToDevice };

struct Piece {
  Direction direction = Direction::kToHost;
  std::uint64_t dst = 0;
  std::uint64_t src = 0;
  std::uint64_t nbytes = 0;

  std::uint64_t host() const noexcept { return direction == Direction::kToHost ? dst : src; }
  std::uint64_t device() const noexcept { return direction == Direction::kToHost ? src : dst; }
};

// A simplified region of at least one dimension.
struct Box {
  Direction direction = Direction::kToHost;
  plan::Region region;
  std::uint64_t dst = 0;
  std::uint64_t src = 0;

  std::uint64_t host() const noexcept { return direction == Direction::kToHost ? dst : src; }
  std::uint64_t host_span_bytes() const;
};

constexpr std::uint64_t kSmallBytes = 32 << 10;     // pieces below it are work for the kernel
constexpr std::uint64_t kNarrowRowBytes = 4 << 10;  // as are boxes whose rows are below it

class CopyList {
 public:
  struct Batch {
    std::vector<Piece> pieces;
    std::vector<Box> boxes;
  };

  void add(Direction direction, std::uint64_t dst, std::uint64_t src, std::uint64_t nbytes);
  void add(Direction direction, const plan::Region& region, std::uint64_t dst, std::uint64_t src);
  bool empty() const noexcept { return batch_.pieces.empty() && batch_.boxes.empty(); }
  void clear() noexcept;

  // What was added, in ascending order of host addresses, neighbours merged; empties the list.
  // `is_border(address)` says that an allocation of the device begins at the address: one copy must
  // not cross it. Asked only where two copies touch.
  Batch take(const std::function<bool(std::uint64_t device_address)>& is_border);

 private:
  Batch batch_;
};

}  // namespace dcpx::device
