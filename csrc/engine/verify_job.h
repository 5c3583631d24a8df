// Compares all bytes of a checkpoint's data files with their checksums, at the speed of the reads.
//
// 1. add_*() look at the frame of one file, and say what its checksums cover (file_check.h).
// 2. sum() reads what is covered: cells of a slot's size, each by whichever worker is free, and
//    sums it while it is in the CPU's cache. Nothing ends at the first finding.
// A file is open only while one of its cells is read: memory and descriptors go with the workers.
// Of an object a cell is one request, whose answer takes the place of the slot; all that is read is
// of the object that add_*() has seen.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/unique_fd.h"
#include "common/worker_group.h"
#include "engine/file_check.h"
#include "engine/stored_file.h"

namespace dcpx::engine {

struct VerifyOptions {
  unsigned workers = 2;
  std::uint64_t slot_bytes = 2 << 20;  // a power of two, from 256 KiB; one slot a worker
  bool use_direct = true;              // O_DIRECT for what is not in the page cache
};

class VerifyJob {  // Not thread-safe, but for done_bytes().
 public:
  // `dir_fd` is duplicated. Throws Error(kStorage).
  VerifyJob(int dir_fd, std::string dir_path, const VerifyOptions& options);
  // Of objects.
  VerifyJob(std::shared_ptr<io::ObjectStore> store, std::string dir_path,
            const VerifyOptions& options);
  ~VerifyJob();

  // Whether a file claims to have a footer: then it is one of ours, whatever the metadata says.
  // Blocks. Throws Error where it cannot be opened or read.
  bool has_footer(const std::string& path);

  // Adds a file and looks at its footer; with a whole tail its blocks will be summed.
  // Blocks. Throws Error where it cannot be opened or read, and then the file is not added.
  FooterFacts add_file(const std::string& path, std::uint64_t* file_bytes,
                       std::vector<Finding>& findings);
  // The same for a file without a footer. REQUIRES: as check_items().
  void add_foreign(const std::string& path, const std::vector<ForeignItem>& items,
                   std::uint64_t* file_bytes, std::vector<Finding>& findings);

  // Sums all that the files added so far hold, and forgets them. Blocks. Throws only what `poll`
  // throws, and what is no error of a file.
  std::vector<Finding> sum(const PollFunction& poll);

  std::uint64_t done_bytes() const noexcept { return done_bytes_.load(); }
  std::uint64_t total_bytes() const noexcept { return total_bytes_; }
  // Of the bytes read, by O_DIRECT.
  std::uint64_t direct_bytes() const noexcept { return direct_bytes_.load(); }

 private:
  struct File;
  struct Cell;
  struct Piece;
  struct BadRun;

  VerifyJob(InputFolder folder, const VerifyOptions& options);

  io::InputFile take(const std::string& path);
  File& add(const std::string& path, io::InputFile input);
  void cut_blocks(File& file, std::uint32_t number);
  void cut_ranges(File& file, std::uint32_t number, const std::vector<SummedRange>& ranges);
  bool prepare(File& file);
  void release(File& file) noexcept;
  void read_cell(const Cell& cell, std::byte* slot, const StopFlag& stop);
  void fetch_cell(const Cell& cell);
  void sum_range(const Cell& cell, const std::byte* data, std::uint64_t begin, std::uint64_t end);
  void sum_pieces(File& file, const Cell& cell, const std::byte* data, std::uint64_t begin,
                  std::uint64_t end);
  void sum_blocks(const Cell& cell, const std::byte* data, std::uint64_t begin, std::uint64_t end);
  void join_ranges(File& file);
  void join_runs();
  void add(Finding finding);

  InputFolder folder_;
  VerifyOptions options_;
  std::string looked_path_;  // of the object that has_footer() has looked at last
  io::InputFile looked_;
  std::vector<std::unique_ptr<File>> files_;
  std::vector<Cell> cells_;
  std::uint64_t total_bytes_ = 0;
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<std::uint64_t> direct_bytes_{0};
  std::mutex mutex_;  // guards these two
  std::vector<BadRun> bad_runs_;
  std::vector<Finding> findings_;
};

}  // namespace dcpx::engine
