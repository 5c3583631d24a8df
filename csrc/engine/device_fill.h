// Payloads in device memory: copied to where a segment wants them, before it is framed.
#pragma once

#include <cstddef>
#include <vector>

#include "common/worker_group.h"
#include "device/copy_stream.h"
#include "engine/write_layout.h"

namespace dcpx::engine {

// Copies what the segment's pieces hold of payloads in device memory to their places in `to`, in
// one batch a device, and waits for it; fill_segment then finds them there. Strided payloads arrive
// in C order. What lies in host memory is not touched. Blocks. Throws Error(kStaging), which names
// the first of the tensors.
// REQUIRES: `to` has segment.end - segment.begin bytes, on which nothing else works.
void fetch_payloads(const WriteLayout& layout, const Segment& segment,
                    const std::vector<WriteItem>& items, device::CopyStreams& streams,
                    const StopFlag& stop, std::byte* to);

}  // namespace dcpx::engine
