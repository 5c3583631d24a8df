// A walk over an untrusted pickle that executes nothing and allocates next to nothing. It proves
// what Python's unpickler takes on trust: that lengths lie inside the bytes, that the stack and the
// memo are used as a pickler uses them, and that nothing nests deeply enough to exhaust the C stack
// (a tuple's hash recurses), and that its objects weigh no more than a budget and its own size.
// Which names it may look up is the allow-list's business.
#pragma once

#include <cstddef>
#include <cstdint>

namespace dcpx {

struct PickleLimits {
  std::uint64_t max_bytes = std::uint64_t{4} << 30;
  std::uint64_t max_ops = std::uint64_t{1} << 30;
  std::uint32_t max_depth = 1000;      // marks inside marks, and containers inside containers
  std::uint32_t max_stack = 1U << 24;  // values on the stack at once
  // Bytes of memory that its objects may take beside one for each of its own.
  std::uint64_t base_cost = std::uint64_t{128} << 20;
  std::uint64_t said_earn_per_byte = 28;   // room for numbers and texts, and what holds them
  std::uint64_t states_earn_per_byte = 0;  // room for objects of metadata
  std::uint64_t storages = 0;              // of an archive, which make room for their tensors
  bool allow_persid = false;
};

struct PickleScan {
  std::uint64_t stop_bytes = 0;  // up to and including STOP; what follows was not looked at
  std::uint64_t ops = 0;
  std::uint64_t max_memo = 0;  // one more than the highest memo index, 0 without memo
  // Keys of dicts and sets whose hashes a file can choose: numbers of 64 bits and more, tuples,
  // frozensets, results of calls without a state. Texts, bytes and objects are none.
  std::uint64_t compound_keys = 0;
};

// Protocols 0 to 5. Throws Error(kCorruption) with the opcode's offset for anything beyond the
// limits, truncated, unknown, or not balanced; for extension codes and out-of-band buffers; and
// where no STOP is found.
// Also refused are keys of dicts and sets whose hashes would visit far more values than the pickle
// has bytes (tuples of tuples that share their parts).
PickleScan scan_pickle(const std::byte* data, std::size_t nbytes, const PickleLimits& limits);

}  // namespace dcpx
