// What the walk over a pickle knows of its values: depth, nodes and width, and what they weigh.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace dcpx::pickle_value {

// Bytes of memory that a value takes at its peak: as Python's object, in the containers that hold
// it, and while `unpickle/settle` makes what it stands for. Measured:
// tests/unpickle/test_weight.py.
constexpr std::uint64_t kPlaceCost = 24;  // on the stack
constexpr std::uint64_t kHeldCost = 16;   // in a list
constexpr std::uint64_t kNumberCost = 32;
constexpr std::uint64_t kTextCost = 56;       // and its bytes,
constexpr std::uint64_t kWideText = 1 << 12;  // or from here on what its widest letter asks for
constexpr std::uint64_t kEmptyCost = 88;      // of a list or dict
constexpr std::uint64_t kFirstMemberCost = 64;
constexpr std::uint64_t kFirstPairCost = 150;
constexpr std::uint64_t kSettledCost = 150;  // of a container that is not small and plain
constexpr std::uint64_t kPlainTupleCost = 80;
constexpr std::uint64_t kTupleCost = 280;
constexpr std::uint64_t kPartCost = 32;  // of a tuple, with its copies
constexpr std::uint64_t kSetCost = 580;
constexpr std::uint64_t kCallCost = 400;
constexpr std::uint64_t kCalledMemberCost = 100;  // what a call made writes it down
constexpr std::uint64_t kMemberCost = 24;         // of a dict's pair, or of a member of a set
constexpr std::uint64_t kManyMembers = 16;        // from here on a container is copied as it grows
constexpr std::uint64_t kOfManyCost = 180;
constexpr std::uint64_t kMemoCost = 32;
constexpr std::uint32_t kMostPlain = 8;  // `unpickle/settle` leaves so small plain ones as they are

// Records of numbers and texts weigh more than they have bytes, however many there are: so what
// they say earns room, and in metadata so do objects with a state, of which it consists. What says
// nothing (empty containers, places in the memo) earns none.
constexpr std::uint64_t kEarnedPerByte = 28;  // of numbers and texts
constexpr std::uint64_t kMostOfText = 16;     // bytes of one text that earn
constexpr std::uint64_t kEarnedByState = 4000;

// A text is as wide in memory as its widest letter: 1, 2 or 4 bytes each.
inline std::uint64_t width_of(const std::byte* text, std::uint64_t nbytes) noexcept {
  std::byte most{0};
  for (std::uint64_t i = 0; i < nbytes; ++i) most = std::max(most, text[i]);
  return most >= std::byte{0xf0} ? 4 : most >= std::byte{0xc4} ? 2 : 1;
}

constexpr std::uint32_t kNoMemo = UINT32_MAX;
constexpr std::uint64_t kMostValues = UINT32_MAX;
constexpr std::uint32_t kMostHeld = UINT32_MAX >> 1;

// What the walk knows of one value. Its 16 bytes count: with 20 a scan took 15 % longer.
struct Slot {
  constexpr Slot() noexcept : Slot(0, 0) {}
  constexpr Slot(std::uint32_t depth_, std::uint32_t nodes_, bool is_compound_ = false) noexcept
      : depth(depth_), nodes(nodes_), width(0), is_compound(is_compound_) {}

  std::uint32_t depth;           // 0 for a leaf
  std::uint32_t nodes;           // values below and including it, shared ones once a use; saturates
  std::uint32_t memo = kNoMemo;  // where it was put, so that growth reaches the memo
  std::uint32_t width : 31;      // values that it holds itself; saturates
  bool is_compound : 1;          // see PickleScan::compound_keys
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

// Whether `unpickle/settle` leaves a container as it is, and remembers nothing of it.
constexpr bool is_plain(const Slot& container) noexcept {
  return container.depth == 1 && container.width <= kMostPlain;
}

}  // namespace dcpx::pickle_value
