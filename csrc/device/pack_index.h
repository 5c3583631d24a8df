// The pack kernel's table and its index arithmetic, the same on the device (pack.cu), in the
// tests' twin of the kernel on the host, and in the code that fills the table.
//
// The table is one block of host memory: `PackTask`s, each worked on by the lanes of one warp, and
// the `PackShape`s that strided tasks name. Nothing in it depends on the direction: addresses are
// those that all processors share.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define DCPX_HD __host__ __device__
#else
#define DCPX_HD
#endif

namespace dcpx::device {

constexpr unsigned kPackMaxDims = 8;
constexpr unsigned kPackLanes = 32;                  // of a warp
constexpr std::uint64_t kPackTaskBytes = 8 << 10;    // what one task copies at most
constexpr std::uint32_t kPackNoShape = 0xffffffffU;  // a task that is one run of bytes
constexpr const char* kPackKernelName = "dcpx_pack";

// A part of a piece: units [begin, end), of bytes where there is no shape, else of grains.
struct PackTask {
  std::uint64_t dst;
  std::uint64_t src;
  std::uint64_t begin;
  std::uint64_t end;
  std::uint32_t shape;
  std::uint32_t unused;
};

// A strided box, dimensions outermost first. A grain is what one lane moves at once: a divisor of
// the contiguous run of elem_bytes to which both addresses and all strides are aligned.
struct PackShape {
  std::uint64_t lengths[kPackMaxDims];
  std::uint64_t src_strides[kPackMaxDims];  // bytes
  std::uint64_t dst_strides[kPackMaxDims];
  std::uint64_t grains_per_run;
  std::uint32_t grain_bytes;  // 1, 2, 4, 8 or 16
  std::uint32_t dims;
};

// The widest move, at most 16 bytes, to whose size `bits` (addresses, sizes and strides, or-ed) is
// aligned.
DCPX_HD inline std::uint32_t pack_grain(std::uint64_t bits) {
  std::uint32_t grain = 16;
  while ((bits & (grain - 1)) != 0) grain >>= 1;
  return grain;
}

// A run of bytes as `head` single bytes, `body` moves of `grain` aligned bytes, and the rest
// single.
struct PackRun {
  std::uint64_t head;
  std::uint64_t body;
  std::uint32_t grain;
};

DCPX_HD inline PackRun pack_run(std::uint64_t dst, std::uint64_t src, std::uint64_t nbytes) {
  PackRun run;
  run.grain = pack_grain(dst ^ src);  // both reach this alignment at the same byte
  run.head = (run.grain - (src & (run.grain - 1))) & (run.grain - 1);
  if (run.head > nbytes) run.head = nbytes;
  run.body = (nbytes - run.head) / run.grain;
  return run;
}

// Byte offsets of grain `index` of a box, from its origins.
DCPX_HD inline void pack_offsets(const PackShape& shape, std::uint64_t index, std::uint64_t* dst,
                                 std::uint64_t* src) {
  std::uint64_t rest = index / shape.grains_per_run;
  const std::uint64_t in_run = (index - rest * shape.grains_per_run) * shape.grain_bytes;
  std::uint64_t to = in_run;
  std::uint64_t from = in_run;
  for (std::uint32_t d = shape.dims; d-- > 0;) {
    const std::uint64_t outer = rest / shape.lengths[d];
    const std::uint64_t i = rest - outer * shape.lengths[d];
    to += i * shape.dst_strides[d];
    from += i * shape.src_strides[d];
    rest = outer;
  }
  *dst = to;
  *src = from;
}

// All moves of one lane of a task: `move(dst, src, nbytes)`, nbytes 1, 2, 4, 8 or 16 and both
// addresses aligned to it. The lanes [0, lanes) of a task together move each byte once.
template <class Move>
DCPX_HD inline void pack_lane(const PackTask& task, const PackShape* shapes, std::uint32_t lane,
                              std::uint32_t lanes, Move move) {
  if (task.shape != kPackNoShape) {
    const PackShape& shape = shapes[task.shape];
    for (std::uint64_t i = task.begin + lane; i < task.end; i += lanes) {
      std::uint64_t to;
      std::uint64_t from;
      pack_offsets(shape, i, &to, &from);
      move(task.dst + to, task.src + from, shape.grain_bytes);
    }
    return;
  }
  const std::uint64_t dst = task.dst + task.begin;
  const std::uint64_t src = task.src + task.begin;
  const std::uint64_t nbytes = task.end - task.begin;
  const PackRun run = pack_run(dst, src, nbytes);
  for (std::uint64_t i = lane; i < run.head; i += lanes) move(dst + i, src + i, 1U);
  for (std::uint64_t i = lane; i < run.body; i += lanes) {
    const std::uint64_t at = run.head + i * run.grain;
    move(dst + at, src + at, run.grain);
  }
  for (std::uint64_t i = run.head + run.body * run.grain + lane; i < nbytes; i += lanes) {
    move(dst + i, src + i, 1U);
  }
}

}  // namespace dcpx::device
