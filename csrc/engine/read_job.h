// Reads the bytes of one load: plans extents, reads them with several workers, verifies, places.
//
// 1. locate() opens the files, checks them against the metadata and finds every payload. As many
//    as it may stay open.
// 2. read() cuts the wanted regions into extents, in the order of the files. Workers take a cell of
//    a slot's size at a time. What is in the page cache is read straight into the destinations
//    where runs are long, else into a slot and copied out; what is not, by O_DIRECT into the slot.
//    Every block that contributes is checked against the footer while it is in the CPU's cache;
//    what went into the slot is checked before it is copied out. What belongs to a device is copied
//    from the slot by that device, while the worker reads the next cell into its other slot.
// 3. After the first error no further extent is started, and it is thrown when all workers ended.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/spans.h"
#include "common/unique_fd.h"
#include "common/worker_group.h"
#include "device/source_events.h"
#include "engine/extent_pieces.h"
#include "engine/job_slots.h"
#include "engine/leaving.h"
#include "engine/read_plan.h"
#include "engine/stored_file.h"

namespace dcpx::engine {

struct ReadOptions {
  unsigned workers = 2;
  std::uint64_t slot_bytes = 1 << 20;
  bool use_direct = true;  // O_DIRECT for files that are not in the page cache
  bool verify = true;      // check every block that is read
  // Files that all jobs of the process may leave open in locate(), so that read() gets them even
  // when they were removed in the meantime; the others are opened again.
  std::uint32_t max_open_files = 0;
  // Bound on slots of all workers, each of which has two where a region is on a device, and on the
  // kernel's tables as if they were slots; 0: none.
  unsigned max_slots = 0;
  // Whether leave() may be called: all goes through slots, since a system call that returns when
  // the caller has left must not write to where the bytes belong.
  bool may_be_left = false;
};

struct ReadReport {
  std::uint64_t needed_bytes = 0;    // sum of the regions
  std::uint64_t read_bytes = 0;      // from files, block edges and gaps included
  std::uint64_t verified_bytes = 0;  // of read_bytes, checked against a footer
  std::uint64_t in_place_bytes = 0;  // of needed_bytes, read straight to the destination
  std::uint64_t direct_bytes = 0;    // of read_bytes, by O_DIRECT
  std::uint64_t foreign_bytes = 0;   // of read_bytes, from files that hold no checksums
  std::uint64_t slot_bytes = 0;      // peak memory of the workers' slots
  // Time, summed over the workers: opening files, finding items, loading checksums; in reads; on
  // checksums; copying out of slots.
  std::uint64_t locate_ns = 0;
  std::uint64_t read_ns = 0;
  std::uint64_t verify_ns = 0;
  std::uint64_t copy_ns = 0;
  std::uint64_t engine_ns = 0;  // wall time inside locate() and read()
};

class ReadJob {  // Not thread-safe.
 public:
  // `dir_fd` is duplicated. Throws Error(kStorage).
  ReadJob(int dir_fd, std::string dir_path, const ReadOptions& options);
  // Of objects, in which all that is read is checked against the tag that locate() has seen.
  ReadJob(std::shared_ptr<io::ObjectStore> store, std::string dir_path, const ReadOptions& options);
  ~ReadJob();

  // Adds files and finds `wanted` in them (WantedItem::file counts all files added so far).
  // Blocks. Throws Error; no destination is known yet, so nothing was touched.
  std::vector<LocatedItem> locate(const std::vector<StoredFileSpec>& files,
                                  const std::vector<WantedItem>& wanted, const PollFunction& poll);

  // Fills the destinations; those in device memory after what `after` says their streams had
  // queued, and before this returns. Blocks. Throws Error; touched() then says where bytes may have
  // landed. REQUIRES: `after` has the devices of all regions.
  void read(const std::vector<ReadRegion>& regions, const PollFunction& poll,
            const device::SourceEvents* after = nullptr);

  // Ends a locate() or read() under way on another thread as soon as its system calls return, by
  // Error(kStorage), ECANCELED. When this has returned, host memory gets no byte of it any more.
  // Thread-safe. Blocks while bytes are copied. REQUIRES: may_be_left.
  void leave() { leaving_.leave(); }
  // Grows as files are opened, read and checked. Thread-safe.
  std::uint64_t moved() const noexcept {
    return read_bytes_.load() + spans_.total_ns(SpanKind::kLocate) +
           spans_.total_ns(SpanKind::kVerify);
  }

  // Closes what is open, the directory included. Only the reports may be asked for afterwards.
  void close() noexcept;

  // Per region of the last read(): whether a byte may have been written to its destination.
  std::vector<bool> touched() const;
  ReadReport report() const;
  const SpanLog& spans() const noexcept { return spans_; }

 private:
  struct OpenFile;
  struct Pass;
  struct Worker;

  bool keep_open() const noexcept;
  bool is_checked(const OpenFile& file) const noexcept;
  void start(Pass& pass);
  void work(Pass& pass, Worker& worker, const StopFlag& stop);
  void prepare(OpenFile& file);
  static void release(OpenFile& file) noexcept;
  void read_cell(const Pass& pass, const CellRange& cell, Worker& worker, const StopFlag& stop);
  void read_extent(const Pass& pass, const CellRange& cell, const Extent& extent, Worker& worker,
                   bool is_direct);
  void verify_extent(const Pass& pass, const Extent& extent, const Worker& worker,
                     std::uint64_t begin, std::uint64_t end) const;
  Error damaged_block(const Pass& pass, const Extent& extent, const Worker& worker,
                      std::uint64_t block, std::uint64_t end, std::uint32_t found) const;

  InputFolder folder_;
  ReadOptions options_;
  Leaving leaving_{options_.may_be_left};
  std::vector<std::unique_ptr<OpenFile>> files_;
  std::unique_ptr<std::atomic<bool>[]> touched_;
  std::size_t touched_count_ = 0;
  ReadReport report_;
  std::atomic<std::uint64_t> read_bytes_{0};
  std::atomic<std::uint64_t> verified_bytes_{0};
  std::atomic<std::uint64_t> in_place_bytes_{0};
  std::atomic<std::uint64_t> direct_bytes_{0};
  std::atomic<std::uint64_t> foreign_bytes_{0};
  SpanLog spans_;
};

}  // namespace dcpx::engine
