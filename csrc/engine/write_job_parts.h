// What the two halves of WriteJob share: write_job.cpp and write_stream.cpp. Nobody else's.
#pragma once

#include <deque>
#include <set>

#include "common/bytes.h"
#include "device/copy_stream.h"
#include "engine/segment_fill.h"
#include "engine/write_job.h"

namespace dcpx::engine {

struct WriteJob::OpenFile {
  std::uint32_t number = 0;
  FileSpec spec;
  Mutex mutex;
  io::OutputFile file;  // opened under the mutex; whoever writes has seen it open
  struct Range {
    std::uint64_t begin, nbytes;
  };
  // What the page cache has not written back yet, oldest first.
  std::deque<Range> behind DCPX_GUARDED_BY(mutex);
  std::uint64_t behind_bytes DCPX_GUARDED_BY(mutex) = 0;
  std::uint64_t data_end = 0;                   // behind the last item laid out so far
  std::uint64_t allocated_end = 0;              // as `file`
  std::atomic<std::uint32_t> segments_left{0};  // of the current call
  std::uint32_t first_segment = 0;              // of the current call
  std::uint32_t segment_count = 0;
  std::uint32_t first_item = 0;
  std::uint32_t item_count = 0;
  std::uint64_t index_bytes = 0;  // of all rows laid out so far
  bool is_last_call = false;
  bool is_finished = false;
  BlockTable blocks;
  std::vector<std::byte> index;  // encoded rows
  std::uint64_t row_count = 0;
  Tail tail;
};

// What one call of write() works on.
struct WriteJob::Window {
  std::vector<WriteItem>& items;
  std::set<int> devices;  // in whose memory items lie
  WriteLayout layout;
  std::vector<std::uint32_t> ready;  // segments that wait for nothing, in order
  std::atomic<std::uint32_t> next_ready{0};
  PayloadSums sums;
  std::vector<std::vector<BlockPart>> segment_parts;
  std::vector<std::uint32_t> seam_of;                         // item -> segment that waits for it
  std::unique_ptr<std::atomic<std::uint32_t>[]> pieces_left;  // per item, before its seam
};

// One thread of a call.
struct WriteJob::Worker {
  std::byte* slot;  // of a streamed job: the segment's
  StopFlag& stop;
  device::CopyStreams streams;
};

inline std::uint64_t block_count_of(std::uint64_t data_bytes) {
  return (data_bytes + kBlockBytes - 1) / kBlockBytes;
}

}  // namespace dcpx::engine
