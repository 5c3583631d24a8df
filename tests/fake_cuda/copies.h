// Copies as work: what each reads and writes, checked when it is queued and again when it runs.
#pragma once

#include <string>
#include <vector>

#include "world.h"

namespace fake {

// `rows` rows of `nbytes`; one for a plain copy. Pitches in bytes.
struct CopyPiece {
  Address dst = 0;
  Address src = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t rows = 1;
  std::uint64_t dst_pitch = 0;
  std::uint64_t src_pitch = 0;

  std::uint64_t dst_span() const noexcept { return (rows - 1) * dst_pitch + nbytes; }
  std::uint64_t src_span() const noexcept { return (rows - 1) * src_pitch + nbytes; }
};

// Queues the pieces, which may run in any order, as one work. As CUDA does with memory that is not
// registered: a source is read before this returns, and a destination is written before it returns.
// `order`: a SourceOrder. Returns what the call is to return; `failed` is the piece to blame.
Result queue_copies(Call& call, const StreamPtr& stream, std::vector<CopyPiece> pieces, int order,
                    std::size_t& failed);

// One end of a copy or of a kernel's access. Reports and returns an error where device memory is
// touched outside of allocations.
struct Side {
  int device = -1;  // -1: host memory
  bool is_pinned = false;
  std::uint64_t allocation = 0;
  std::byte* memory = nullptr;
};
Result resolve(const std::string& what, Address address, std::uint64_t span, Side& side);

}  // namespace fake
