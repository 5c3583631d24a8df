// What the walk over a pickle knows of its values: depth, nodes and width, and what they weigh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace dcpx::pickle_value {

constexpr std::uint32_t kNoMemo = UINT32_MAX;
constexpr std::uint64_t kMostValues = UINT32_MAX;
constexpr std::uint32_t kMostHeld = UINT32_MAX >> 5;

// What a value of metadata is: such objects come in millions, of a known weight. A role is of a
// name, and of the class that it names; an instance without its state has the last one.
enum Role : std::uint32_t { kNoRole, kSizeRole, kStateRole, kNewRole };
constexpr std::uint32_t kRoles = 3;  // their bits

// What the walk knows of one value. Its 16 bytes count: with 20 a scan took 15 % longer.
struct Slot {
  constexpr Slot() noexcept : Slot(0, 0) {}
  constexpr Slot(std::uint32_t depth_, std::uint32_t nodes_, bool is_compound_ = false) noexcept
      : depth(depth_),
        nodes(nodes_),
        width(0),
        role(kNoRole),
        says(0),
        is_new(1),
        is_compound(is_compound_) {}

  std::uint32_t depth;           // 0 for a leaf
  std::uint32_t nodes;           // values below and including it, shared ones once a use; saturates
  std::uint32_t memo = kNoMemo;  // where it was put, so that growth reaches the memo
  std::uint32_t width : 27;      // values that it holds itself; saturates
  std::uint32_t role : 2;        // a Role
  std::uint32_t says : 1;        // is a number or text just written, or holds one: see PickleWeight
  std::uint32_t is_new : 1;      // just written, and not named again
  std::uint32_t is_compound : 1;  // see PickleScan::compound_keys
};
static_assert(sizeof(Slot) == 16);
constexpr Slot kLeaf{0, 1};
constexpr Slot kLargeNumber{0, 1, true};
constexpr Slot kEmptyContainer{1, 1};
constexpr std::size_t kSmallNumberBytes = 7;    // of LONG1: below 2^61 - 1, where hashes repeat
constexpr std::size_t kSmallNumberDigits = 18;  // of a text

constexpr std::size_t kMaxNumberBytes = 1024;  // int(text) is quadratic, and no count needs more
constexpr std::uint64_t kMemoSlack = 1024;     // gaps that an optimizer may have left
// A key's hash visits every node below it, and sharing makes nodes cheap: 40 times DUP TUPLE2 is a
// tuple of 2^40 leaves in 80 bytes. Keys of real pickles stay far below one node a byte.
constexpr std::uint64_t kKeyNodesBase = 1 << 20;
constexpr std::uint64_t kKeyNodesPerByte = 64;
// A call copies its arguments, and one tuple in the memo can be those of a call every three bytes.
// Arguments of real pickles are written for their call.
constexpr std::uint64_t kArgumentsBase = 1 << 20;
constexpr std::uint64_t kArgumentsPerByte = 4;

class PickleMemo {  // Not thread-safe.
 public:
  std::size_t size() const { return slots_.size(); }
  std::uint64_t used() const { return used_; }

  bool put(std::uint64_t index, Slot* value) {  // false: far beyond the end
    if (index >= used_ + kMemoSlack) return false;
    if (index >= slots_.size()) slots_.resize(static_cast<std::size_t>(index) + 1);
    Slot& slot = slots_[static_cast<std::size_t>(index)];
    if (slot.memo == kNoMemo) ++used_;
    value->memo = static_cast<std::uint32_t>(index);
    slot = *value;
    return true;
  }

  const Slot* get(std::uint64_t index) const {  // null: it was never put
    const bool is_there = index < slots_.size() && slots_[index].memo != kNoMemo;
    return is_there ? &slots_[static_cast<std::size_t>(index)] : nullptr;
  }

  void update(const Slot& value) {
    if (value.memo != kNoMemo) slots_[value.memo] = value;
  }

 private:
  std::vector<Slot> slots_;  // one whose own `memo` is kNoMemo was never put
  std::uint64_t used_ = 0;
};

constexpr std::uint32_t kMostOfState = 16;  // fields and their values
constexpr std::uint32_t kMostPlain = 8;  // `unpickle/settle` leaves so small plain ones as they are

// Whether an object gets a state as those of metadata have: fields, just written, and once.
constexpr bool is_of_metadata(const Slot& made, const Slot& state) noexcept {
  const bool has_fields = 0 < state.width && state.width <= kMostOfState;
  return made.role == kNewRole && state.is_new != 0 && has_fields;
}

// Whether `unpickle/settle` leaves a container as it is, and remembers nothing of it.
constexpr bool is_plain(const Slot& container) noexcept {
  return container.depth == 1 && container.width <= kMostPlain;
}

}  // namespace dcpx::pickle_value
