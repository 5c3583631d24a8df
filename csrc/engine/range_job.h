// Writes regions of memory to any places of files that several processes fill together: an export.
//
// 1. One process makes each file at its full size; the others open it.
// 2. write() cuts rows into blocks. Memory that lies as the file does is written from where it is,
//    other memory is gathered in a worker's slot. Of long runs the whole pages go past the page
//    cache, through a slot where memory is not aligned; their ends, and short runs, go through it:
//    neighbours from different processes may share a page, which direct writes would lose.
// 3. finish() makes this process' writes durable.
// A row may add its bytes to the CRC of a payload that many rows, of many processes, make up: CRCs
// are linear, so each adds its own share, in any order.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "common/slot.h"
#include "common/spans.h"
#include "common/unique_fd.h"
#include "common/worker_group.h"
#include "io/file.h"
#include "plan/region_copy.h"

namespace dcpx::engine {

inline constexpr std::uint32_t kNoTag = 0xffffffffu;

// One box of bytes in host memory and in a file.
struct RangeRow {
  std::uint32_t file = 0;
  std::uint64_t offset = 0;  // of the region's first byte in the file
  plan::Region region;       // from memory (src) to the file (dst)
  const std::byte* source = nullptr;
  std::uint32_t tag = kNoTag;     // the payload whose CRC the bytes belong to
  std::uint64_t payload_end = 0;  // byte of the file behind that payload
};

struct RangeOptions {
  unsigned workers = 2;
  std::uint64_t slot_bytes = 2 << 20;
  bool is_durable = true;
  bool use_direct = false;  // where the file system takes it
};

struct RangeReport {
  std::uint64_t written_bytes = 0;
  std::uint64_t in_place_bytes = 0;  // of these, from where they lay
  std::uint64_t direct_bytes = 0;    // of these, past the page cache
  std::uint64_t writes = 0;          // runs of bytes
  std::uint64_t slot_bytes = 0;      // peak memory of the workers' slots
  std::uint64_t engine_ns = 0;       // wall time inside write() and finish()
};

// Not thread-safe, but for report(). After an exception only report() and abandon() may be called.
class RangeJob {
 public:
  // `dir_fd` is duplicated. Throws Error(kStorage).
  RangeJob(int dir_fd, std::string dir_path, const RangeOptions& options);

  // Adds a file of `file_bytes`, and makes it (O_EXCL, preallocated, at its size) where `is_new`,
  // else opens it.
  // Blocks. Throws Error(kStorage).
  std::uint32_t add_file(const std::string& name, std::uint64_t file_bytes, bool is_new,
                         const PollFunction& poll);
  // Writes rows, no two of which share a byte of a file. Blocks. Throws Error(kStorage, kPlan).
  void write(const std::vector<RangeRow>& rows, const PollFunction& poll);
  // This job's share in the CRC of each tag; the xor of all jobs' shares is the CRC.
  const std::vector<std::uint32_t>& crc_shares() const noexcept { return shares_; }
  // Syncs and closes all files; with `is_whole`, checks their sizes. Polls
  // while it waits. Blocks. Throws Error(kStorage).
  void finish(bool is_whole, const PollFunction& poll);
  // Closes what is open.
  void abandon() noexcept;
  RangeReport report() const;

 private:
  struct Plan;
  struct Block;
  struct File {
    io::OutputFile file;
    io::OutputFile direct;  // the same, for direct I/O; opened with the first run that is for it
    std::uint64_t file_bytes = 0;
  };

  void write_block(const Plan& plan, const Block& block, std::byte* slot,
                   std::vector<std::uint32_t>& shares);
  void write_run(const Plan& plan, const std::byte* data, std::uint64_t nbytes,
                 std::uint64_t offset, std::byte* slot, std::vector<std::uint32_t>& shares);
  void write_cached(const Plan& plan, const std::byte* data, std::uint64_t nbytes,
                    std::uint64_t offset);
  void write_direct(const Plan& plan, const std::byte* data, std::uint64_t nbytes,
                    std::uint64_t offset, std::byte* slot);
  std::vector<Block> cut(const std::vector<Plan>& plans) const;
  void open_direct(const std::vector<Plan>& plans);

  UniqueFd dir_fd_;
  std::string dir_path_;
  RangeOptions options_;
  std::deque<File> files_;
  SlotArena slots_;  // of the workers, from the first write that needs them on
  std::mutex mutex_;
  std::vector<std::uint32_t> shares_;
  std::atomic<std::uint64_t> written_bytes_{0};
  std::atomic<std::uint64_t> in_place_bytes_{0};
  std::atomic<std::uint64_t> direct_bytes_{0};
  std::atomic<std::uint64_t> writes_{0};
  std::atomic<std::uint64_t> slot_bytes_{0};
  SpanLog spans_;
};

}  // namespace dcpx::engine
