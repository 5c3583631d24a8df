// The kernel over pack_index.h's table: a warp a task. It holds no state and allocates nothing.
#include "device/pack_index.h"

namespace {

template <class Word>
__device__ inline void move_word(unsigned long long dst, unsigned long long src) {
  *reinterpret_cast<Word*>(dst) = *reinterpret_cast<const Word*>(src);
}

struct DeviceMove {
  __device__ void operator()(unsigned long long dst, unsigned long long src,
                             unsigned nbytes) const {
    switch (nbytes) {
      case 16:
        return move_word<uint4>(dst, src);
      case 8:
        return move_word<unsigned long long>(dst, src);
      case 4:
        return move_word<unsigned>(dst, src);
      case 2:
        return move_word<unsigned short>(dst, src);
      default:
        return move_word<unsigned char>(dst, src);
    }
  }
};

}  // namespace

extern "C" __global__ void dcpx_pack(const dcpx::device::PackTask* tasks,
                                     const dcpx::device::PackShape* shapes,
                                     unsigned long long count) {
  using dcpx::device::kPackLanes;
  const unsigned lane = threadIdx.x % kPackLanes;
  const unsigned warps_per_block = blockDim.x / kPackLanes;
  const unsigned long long warps = static_cast<unsigned long long>(gridDim.x) * warps_per_block;
  for (unsigned long long i =
           static_cast<unsigned long long>(blockIdx.x) * warps_per_block + threadIdx.x / kPackLanes;
       i < count; i += warps) {
    const dcpx::device::PackTask task = tasks[i];
    dcpx::device::pack_lane(task, shapes, lane, kPackLanes, DeviceMove{});
  }
}
