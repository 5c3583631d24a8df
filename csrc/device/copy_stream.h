// Copies between host and device memory, on an own stream, in as few calls as the driver allows.
#pragma once

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/worker_group.h"
#include "device/copy_list.h"
#include "device/cuda_driver.h"
#include "device/source_events.h"
#include "plan/region_copy.h"

namespace dcpx::device {

class PackTable;

double copy_timeout_s() noexcept;    // how long copies may take, with what runs before them: 1800
double unwind_timeout_s() noexcept;  // how much longer once the job stops or has failed: 60
// For tests of what hangs.
void set_copy_timeouts(double copy_timeout_s, double unwind_timeout_s) noexcept;
constexpr std::uint64_t kPageableBytes = 64 << 20;  // of one copy: between two the job may stop

// One worker's stream on one device: non-blocking (beside the default stream), of the lowest
// priority. Collects copies, queues them by submit(), waits for them by finish(). One side of every
// copy is host memory, the other memory of this device; both stay valid and unchanged until
// finish() has returned. Where submit() or finish() throws, nothing is under way any more. The
// destructor waits for what is queued. Not thread-safe, and bound to no thread.
class CopyStream {
 public:
  // All work runs after the events that `after` has for this device (none: nullptr), which may go
  // once this has returned. The kernel has up to `max_tables` tables of kPackTableBytes, of which
  // one is kept once the copies are done; 0: it is not used. Throws Error(kStaging).
  CopyStream(int device, const SourceEvents* after, std::size_t max_tables = 1);
  CopyStream(const CopyStream&) = delete;
  ~CopyStream();

  // Collects; copies that touch on both sides become one. Does not block.
  void copy(Direction direction, std::uint64_t dst, std::uint64_t src, std::uint64_t nbytes);
  // Collects a strided box: for one copy, 2-D copies, or the kernel. Does not block.
  void copy_region(Direction direction, const plan::Region& region, std::uint64_t dst,
                   std::uint64_t src);

  // Queues what was collected: batches where the driver has them, the kernel for many pieces below
  // kSmallBytes, else single copies. Blocks where the host side is not pinned (CUDA copies such
  // memory in step with the host) and where the kernel's tables are full. Where `stop` is set, what
  // is not queued yet is dropped. Throws Error(kStaging), and what a poll of `stop` throws.
  void submit(const StopFlag* stop = nullptr);
  // Whether all that was submitted is done. Throws Error(kStaging) where it failed.
  bool is_done();
  // submit(), then waits for all of it, `timeout_s` at most. `what` follows "waiting for " in the
  // error. Where `stop` is set, what is only collected is dropped, and what is queued is waited
  // for, as it uses memory, up to unwind_timeout_s(). What a poll of `stop` throws is thrown after
  // that. Throws Error(kStaging); after a time-out no more work goes to the device until what is
  // under way has ended, and this stream serves no more. Both sides' memory must then stay until
  // that end: Driver::keep_while_used.
  void finish(const StopFlag& stop, const char* what, double timeout_s = copy_timeout_s());

  // Lets `stream`, of this device, go on only when all that was submitted by now is done; the host
  // goes on at once. Throws Error(kStaging).
  void hold_back(Stream stream);

  int device() const noexcept { return device_; }

 private:
  void submit_collected(const StopFlag* stop);
  bool submit_pieces(const std::vector<Piece>& pieces, const std::vector<Box>& packed,
                     const StopFlag* stop);
  bool is_for_kernel(const Box& box);
  bool has_kernel();
  bool add_table();
  bool pack(const std::vector<Piece>& pieces, const std::vector<Box>& boxes, const StopFlag* stop);
  bool launch();
  void copy_batch(const std::vector<Piece>& pieces);
  void copy_one(const Piece& piece);
  void copy_box(const Box& box, const StopFlag* stop);
  void copy_rows(const Box& box, std::size_t rows_dim, std::uint64_t dst, std::uint64_t src);
  bool is_border(std::uint64_t device_address);
  void order_before_pageable(const StopFlag* stop);
  std::uint64_t max_pitch();
  void begin_work() noexcept;  // before each call that queues
  void record();
  void wait(double timeout_s, const StopFlag* stop, const char* what);
  void give_up(const std::string& why) noexcept;
  void drain() noexcept;

  int device_;
  Driver& driver_;
  Stream stream_ = nullptr;
  Event event_ = nullptr;
  bool is_queued_ = false;    // something was queued and not waited for
  bool uses_memory_ = false;  // and copies are among it
  bool is_recorded_ = false;  // event_ stands behind all that was queued
  bool is_ordered_ = true;    // the source events are known to be done
  CopyList list_;
  std::size_t max_tables_;
  std::vector<std::unique_ptr<PackTable>> tables_;  // the last one is filled
  std::uint64_t range_begin_ = 0;  // of the device's allocation that was last asked for
  std::uint64_t range_end_ = 0;
  std::uint64_t max_pitch_ = 0;  // 0: not asked yet
};

// One worker's streams by device, made when first asked for. Not thread-safe.
class CopyStreams {
 public:
  // `after` (may be null) outlives this.
  explicit CopyStreams(const SourceEvents* after, std::size_t max_tables = 1)
      : after_(after), max_tables_(max_tables) {}
  CopyStream& on(int device);  // Throws Error(kStaging).
  bool empty() const noexcept { return streams_.empty(); }
  // As of CopyStream, for each; where one throws, nothing of it is under way, and the others wait
  // in their destructors.
  void submit_all(const StopFlag* stop = nullptr);
  bool are_done();
  void finish_all(const StopFlag& stop, const char* what, double timeout_s = copy_timeout_s());

 private:
  const SourceEvents* after_;
  std::size_t max_tables_;
  std::map<int, std::unique_ptr<CopyStream>> streams_;
};

}  // namespace dcpx::device
