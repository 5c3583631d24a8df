// What the objects of a pickle take of memory, against what a pickle of its size may take.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "format/pickle_scan.h"
#include "format/pickle_values.h"

namespace dcpx::pickle_value {

// Bytes of memory that a value takes at its peak: as Python's object, in the containers that hold
// it, and while `unpickle/settle` makes what it stands for. Measured:
// tests/unpickle/test_weight.py.
constexpr std::uint64_t kPlaceCost = 24;  // on the stack
constexpr std::uint64_t kHeldCost = 16;   // in a list
constexpr std::uint64_t kNumberCost = 32;
constexpr std::uint64_t kTextCost = 56;       // and its letters,
constexpr std::uint64_t kWideText = 1 << 12;  // or from here on what the widest one asks for
constexpr std::uint64_t kEmptyCost = 88;      // of a list or dict
constexpr std::uint64_t kFirstMemberCost = 64;
constexpr std::uint64_t kFirstPairCost = 150;
constexpr std::uint64_t kSettledCost = 150;  // of a container that is not small and plain
constexpr std::uint64_t kPlainTupleCost = 80;
constexpr std::uint64_t kTupleCost = 280;
constexpr std::uint64_t kPartCost = 32;  // of a tuple, with its copies
constexpr std::uint64_t kSetCost = 580;
constexpr std::uint64_t kCallCost = 400;
constexpr std::uint64_t kInstanceCost = 240;      // of a class of metadata, without its state
constexpr std::uint64_t kFirstPlainCost = 70;     // of the pairs of its state, which no copies are
constexpr std::uint64_t kStateCost = 240;         // of what its state has beside numbers and texts
constexpr std::uint64_t kTensorCost = 1000;       // of what a tensor has beside its storage
constexpr std::uint64_t kCalledMemberCost = 100;  // what a call made writes it down
constexpr std::uint64_t kMemberCost = 24;         // of a dict's pair, or of a member of a set
constexpr std::uint64_t kManyMembers = 16;        // from here on a container is copied as it grows
constexpr std::uint64_t kOfManyCost = 180;
constexpr std::uint64_t kMemoCost = 32;

// What says something weighs more than it has bytes, however much there is of it. So numbers and
// texts earn what they take, and what the containers take that hold them; the tensors of an archive
// do, for each of its storages; in metadata the objects of which it consists do. Each earns no more
// than an honest one takes. What says nothing (empty containers, places in the memo, values named
// again) earns nothing.
// Measured, of each byte of the file: integers of four bytes 10 bytes, stock's metadata that is not
// read as columns 8 to 14, tensors of torch.save 11.
constexpr std::uint64_t kMostOfText = 16;  // bytes of one text that earn
constexpr std::uint64_t kEarnedByState = 1400;
constexpr std::uint64_t kEarnedByStorage = 2500;

// A text takes 1, 2 or 4 bytes for each letter, as its widest one asks for.
inline std::uint64_t letters_cost(const std::byte* text, std::uint64_t nbytes) noexcept {
  if (nbytes < kWideText) return nbytes;
  std::byte most{0};
  std::uint64_t letters = 0;
  for (std::uint64_t i = 0; i < nbytes; ++i) {
    most = std::max(most, text[i]);
    letters += (text[i] & std::byte{0xc0}) != std::byte{0x80} ? 1 : 0;
  }
  return letters * (most >= std::byte{0xf0} ? 4 : most >= std::byte{0xc4} ? 2 : 1);
}

inline Role role_of(std::string_view name) noexcept {
  if (name == "Size") return kSizeRole;
  for (const std::string_view one :
       {"ChunkStorageMetadata", "MetadataIndex", "_StorageInfo", "TensorStorageMetadata",
        "TensorProperties", "BytesStorageMetadata", "WriteItem", "TensorWriteData",
        "BytesIOWriteData", "SavePlan", "StorageMeta", "Metadata"}) {
    if (name == one) return kStateRole;
  }
  return kNoRole;
}

class PickleWeight {
 public:
  PickleWeight(std::uint64_t nbytes, const PickleLimits& limits)
      : free_(limits.base_cost + nbytes), limits_(limits) {}

  void charge(std::uint64_t nbytes) { cost_ += nbytes; }
  void charge(std::uint64_t nbytes, bool says) {
    cost_ += nbytes;
    if (says) draw(nbytes);
  }
  void give_back(std::uint64_t nbytes) { cost_ -= nbytes; }
  void draw(std::uint64_t nbytes) { drawn_ += nbytes; }  // of what was charged
  void say(std::uint64_t nbytes, std::uint64_t cost) {
    said_ += std::min(nbytes, kMostOfText);
    charge(cost, true);
  }
  void add_state(bool says) {
    ++states_;
    give_back(says ? kFirstPairCost - kFirstPlainCost : kTupleCost - kPlainTupleCost);
    draw(kInstanceCost + kStateCost);
  }
  void add_storage() {
    if (storages_ == limits_.storages) return;
    ++storages_;
    draw(kTensorCost);
  }

  std::string text() const { return std::to_string(cost_ / 1'000'000) + " MB"; }
  bool is_too_heavy(std::uint64_t walked) const {
    if (cost_ <= free_) return false;
    const std::uint64_t by_states =
        std::min(kEarnedByState * states_, limits_.states_earn_per_byte * walked);
    const std::uint64_t earned =
        limits_.said_earn_per_byte * said_ + kEarnedByStorage * storages_ + by_states;
    return cost_ > free_ + std::min(earned, drawn_);
  }

 private:
  std::uint64_t free_;  // bytes that anything may take
  const PickleLimits& limits_;
  std::uint64_t cost_ = 0;
  std::uint64_t drawn_ = 0;     // of it, by what says something
  std::uint64_t said_ = 0;      // bytes of numbers and texts
  std::uint64_t states_ = 0;    // that objects of metadata have got
  std::uint64_t storages_ = 0;  // that were named
};

}  // namespace dcpx::pickle_value
