// Writes the files of one rank's save: layout, segments over workers, footers, fsync.
//
// 1. lay_out() places the items of the call; the file is preallocated.
// 2. Workers take segments of a few files in turn: fill (copy, gather, frame) or in place,
//    checksum, pwrite. The worker that ends the last piece before a seam writes the seam. Payloads
//    in device memory are copied to a worker's slot by the device, while others checksum and write.
// 3. The worker that ends the last segment of a complete file writes its footer, fsyncs, checks the
//    size and closes it. At most one file per worker, plus `files_at_once`, is open at a time.
// Nothing that exists is ever truncated, overwritten or removed. The directory is the caller's to
// fsync.
//
// A streamed job (write_stream.cpp) writes no file: uploaders take the bytes of its files from a
// queue, while the workers fill. Its segments are filled in the order of the files, seams in their
// turn, and large dense items of host memory go out from where they lie.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "common/spans.h"
#include "common/unique_fd.h"
#include "common/worker_group.h"
#include "device/source_events.h"
#include "engine/block_sums.h"
#include "engine/job_slots.h"
#include "engine/upload_queue.h"
#include "engine/write_layout.h"
#include "format/file_footer.h"
#include "io/file.h"

namespace dcpx::engine {

// Which large items of host memory are written from where they lie.
enum class InPlace : std::uint8_t {
  kAuto,    // those on huge pages; all where no O_DIRECT is asked for
  kAlways,  // all
  kNever,
};

struct WriteOptions {
  unsigned workers = 2;
  std::uint64_t segment_bytes = 1 << 20;  // of a worker's slot, and the most it writes from there
  bool use_direct = true;                 // O_DIRECT where the file system takes it
  bool is_durable = true;                 // fsync every file
  unsigned files_at_once = 1;             // that a call's segments are written to in turn
  InPlace in_place = InPlace::kAuto;
  // Bound on slots, and tables of the kernel where items are on devices: fewer workers. 0: none.
  std::uint64_t memory_bytes = 0;
  bool is_streamed = false;  // no files: queue() has the bytes
};

struct FileSpec {
  std::vector<std::string> names;  // candidates; the first that does not exist is taken
  FileId file_id{};
  std::uint32_t rank = 0;
  SaveId save_id{};
};

struct FileResult {
  std::string name;
  FileId file_id{};
  std::uint64_t file_bytes = 0;
  std::uint32_t footer_crc = 0;
};

struct WriteReport {
  std::uint64_t direct_bytes = 0;  // by how they were written
  std::uint64_t buffered_bytes = 0;
  std::uint64_t in_place_bytes = 0;  // from the tensor's own memory, part of the two above
  std::uint64_t slot_bytes = 0;      // peak memory of the workers' slots
  std::uint64_t done_bytes = 0;      // payload bytes written so far
  std::uint64_t total_bytes = 0;     // payload bytes given to write() so far
  std::uint64_t copy_ns = 0;         // summed over workers: copies, framing, checksums,
  std::uint64_t write_ns = 0;        // pwrite, footers included,
  std::uint64_t fsync_ns = 0;        // fsync
  std::uint64_t engine_ns = 0;       // wall time of all calls of write()
};

// One job at a time; not thread-safe but for report(). After an exception only created(), report()
// and abandon() may be called.
class WriteJob {
 public:
  // `dir_fd` is duplicated; a streamed job has none. Throws Error(kStorage).
  WriteJob(int dir_fd, std::string dir_path, const WriteOptions& options);
  ~WriteJob();

  std::uint32_t add_file(FileSpec spec);

  // Writes `items`, sorted by file, none for a file before that of an earlier call's last item.
  // A file is complete once items of a later one come, or with `is_final`. On return the rows of
  // `items` hold offsets, lengths and CRCs. Items in device memory are read after what `after` says
  // their streams had queued, and never when this has returned. Blocks. Throws Error.
  // REQUIRES: `after` has the devices of all items.
  // A streamed job has then filled all, and what lies in place stays in use until it is uploaded.
  void write(std::vector<WriteItem>& items, bool is_final, const PollFunction& poll,
             const device::SourceEvents* after = nullptr);

  // Complete files, in the order of add_file(); those without items were never created.
  std::vector<FileResult> results() const;
  // Closes what is open, the directory included, so that the space of removed files is free.
  // Only created() may be called afterwards.
  void abandon() noexcept;
  // Names of all files that exist because of this job, for whoever cleans up after a failure.
  std::vector<std::string> created() const;
  // What a streamed job's uploaders ask; it outlives the job where they hold it.
  const std::shared_ptr<UploadQueue>& queue() const noexcept { return queue_; }
  // Thread-safe: `poll` may ask while write() runs.
  WriteReport report() const;
  const SpanLog& spans() const noexcept { return spans_; }  // As report().

 private:
  struct OpenFile;
  struct Window;
  struct Worker;

  void prepare(Window& window, bool is_final);
  void place(Window& window, bool is_final);
  void choose_in_place(std::vector<WriteItem>& items) const;
  void complete_others(Window& window, bool is_final, const PollFunction& poll);
  void make_slots(const Window& window, unsigned workers);
  void work(Window& window, Worker& worker);
  void write_segment(Window& window, std::uint32_t index, Worker& worker);
  // Returns where the segment's bytes lie, its checksums in `summer`; nullptr if the job was
  // stopped meanwhile.
  const std::byte* fill(Window& window, const Segment& segment, SegmentSummer& summer,
                        Worker& worker);
  FittingWorkers make_queue_slots(const Window& window, unsigned workers, bool is_only_call);
  // Of a streamed job: a piece so short owns its bytes, and holds no slot.
  std::uint64_t owned_piece_bytes() const noexcept { return options_.segment_bytes / 2; }
  void stream(Window& window, Worker& worker);
  bool stream_segment(Window& window, std::uint32_t index, int slot, Worker& worker);
  void announce_sizes();
  void stream_footer(OpenFile& file, std::vector<std::byte> footer);
  // False if the job was stopped meanwhile.
  bool write_bytes(OpenFile& file, const std::byte* data, std::uint64_t nbytes,
                   std::uint64_t offset, Worker& worker);
  bool open(OpenFile& file, const StopFlag& stop);  // False as for write_bytes.
  void write_back(OpenFile& file, std::uint64_t begin, std::uint64_t nbytes);
  void complete(Window& window, OpenFile& file, Worker& worker);
  void finish(OpenFile& file, Worker& worker);
  void write_footer(OpenFile& file, const std::vector<std::byte>& footer, Worker& worker);

  UniqueFd dir_fd_;
  std::string dir_path_;
  WriteOptions options_;
  std::vector<std::unique_ptr<OpenFile>> files_;
  mutable Mutex created_mutex_;
  std::vector<std::string> created_ DCPX_GUARDED_BY(created_mutex_);
  std::atomic<std::uint64_t> direct_bytes_{0};
  std::atomic<std::uint64_t> buffered_bytes_{0};
  std::atomic<std::uint64_t> in_place_bytes_{0};
  std::atomic<std::uint64_t> slot_bytes_{0};
  std::atomic<std::uint64_t> done_bytes_{0};
  std::atomic<std::uint64_t> total_bytes_{0};
  SpanLog spans_;
  JobSlots slots_;                      // kept from call to call, until the last
  std::shared_ptr<UploadQueue> queue_;  // of a streamed job
};

}  // namespace dcpx::engine
