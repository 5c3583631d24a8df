// Where the bytes of one extent go: runs straight to the memory that wants them, the rest to a slot
// and from there to where it belongs. What belongs to a device always lands in the slot.
//
// Only reads through the page cache go straight: there it saves a copy. A direct read wants memory
// on huge pages, which slots have and tensors mostly do not: small pages lie scattered in the
// machine's memory, and a request falls apart after some 250 of them. Cold, 1.5 GiB of 64 MiB
// tensors, verified, of the speed of a C program that reads 1 MiB by 4 threads (medians of 5
// interleaved rounds, three runs): straight into small pages 0.84, 0.75 and 0.72, through slots and
// copied 1.10, 0.92 and, noisily, 0.65. Tensors on huge pages gain nothing from a read straight
// into them: 0.89 and 0.88 in the second run. And a damaged block is found before it is copied.
#pragma once

#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/copy_stream.h"
#include "engine/read_plan.h"

namespace dcpx::engine {

class ExtentPieces {  // One worker's, reused from extent to extent. Not thread-safe.
 public:
  // Lays out the file range [begin, end), which holds the extent. Runs of kInPlaceRunBytes or more
  // go straight to their destination, but for a direct read. `slot` mirrors the range: what is not
  // taken straight lands at its offset from `begin`.
  // REQUIRES: `slot` has end - begin bytes; for a direct read it is aligned, as are both ends.
  void lay_out(const ReadPlan& plan, const std::vector<ReadRegion>& regions,
               const std::vector<ReadPart>& parts, const Extent& extent, std::uint64_t begin,
               std::uint64_t end, bool is_direct, std::byte* slot);

  // The range in order, without a gap; at most IOV_MAX pieces.
  const std::vector<iovec>& pieces() const noexcept { return pieces_; }
  // Of the wanted bytes, those that go straight.
  std::uint64_t in_place_bytes() const noexcept { return in_place_bytes_; }
  // Copies what the slot holds of the regions; what belongs to a device is collected by its stream,
  // and the slot is in use until that has finished. Throws Error(kStaging).
  // REQUIRES: the pieces are filled; regions, plan and parts of lay_out() are alive.
  void copy_out(device::CopyStreams& streams) const;

 private:
  struct Copy {
    const std::byte* from;
    std::byte* to;
    std::uint64_t nbytes;  // of a run to host memory; 0: the whole box of `part`
    const ReadPart* part;
  };

  void add_run(std::uint64_t begin, std::byte* dest, std::uint64_t nbytes, const ReadPart& part);
  void fill_slot_up_to(std::uint64_t offset);

  const ReadPlan* plan_ = nullptr;
  const std::vector<ReadRegion>* regions_ = nullptr;
  std::uint64_t begin_ = 0;
  std::uint64_t at_ = 0;  // behind the last piece
  std::byte* slot_ = nullptr;
  std::vector<iovec> pieces_;
  std::vector<Copy> copies_;
  std::uint64_t in_place_bytes_ = 0;
};

}  // namespace dcpx::engine
