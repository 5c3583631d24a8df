// What one thread sees of an UploadQueue: the order of pieces, sizes, slots, and its end.
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <future>
#include <stdexcept>
#include <thread>

#include "check.h"
#include "engine/upload_queue.h"
#include "random_source.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;
using dcpx::PollFunction;
using dcpx::StopFlag;

constexpr std::uint64_t kSlotBytes = 64 << 10;
constexpr std::uint64_t kOwnedBytes = 1000;

struct Queue {
  explicit Queue(int files = 1, unsigned slots = 3, std::uint64_t piece_bytes = 0,
                 std::chrono::milliseconds poll_interval = std::chrono::milliseconds(100))
      : queue(poll_interval) {
    queue.allocate(slots, kSlotBytes, -1, {kOwnedBytes, piece_bytes});
    for (int f = 0; f < files; ++f) queue.add_file();
  }
  UploadQueue* operator->() { return &queue; }

  UploadQueue queue;
};

// A wait that nothing ends is an error: it is asked about ten times a second.
struct Deadline {  // no measure of speed: of a test that would never end
  Deadline() { stop.poll_inline(poll); }

  StopFlag stop;
  const PollFunction poll = [end = std::chrono::steady_clock::now() + std::chrono::minutes(3)] {
    if (std::chrono::steady_clock::now() > end) throw std::runtime_error("a wait has no end");
  };
};

int take_slot(Queue& queue) {
  const Deadline deadline;
  return queue->take_slot(deadline.stop);
}

// Whether take_slot() still waits when the second poll comes: before the first it may not have
// looked. It has polled without the mutex, or another thread would not get through.
bool has_to_wait(Queue& queue) {
  StopFlag stop;
  int polls = 0;
  const PollFunction poll = [&] {
    auto other = std::async(std::launch::async, [&] { queue->gone_bytes(); });
    // The other thread would never end.
    if (other.wait_for(std::chrono::seconds(30)) != std::future_status::ready) std::quick_exit(3);
    if (++polls == 2) stop.set();
  };
  stop.poll_inline(poll);
  const int slot = queue->take_slot(stop);
  CHECK_EQ(slot == kNoSlot, polls >= 2);
  queue->give_back(slot);
  return slot == kNoSlot;
}

UploadPiece owned_piece(std::uint64_t nbytes, std::uint64_t payload_bytes = 0) {
  UploadPiece piece;
  piece.owned.assign(nbytes, std::byte{7});
  piece.data = piece.owned.data();
  piece.nbytes = nbytes;
  piece.payload_bytes = payload_bytes;
  return piece;
}

// Bytes that somebody else has, and perhaps a slot.
UploadPiece borrowed_piece(const std::vector<std::byte>& bytes, int slot = kNoSlot) {
  return {bytes.data(), bytes.size(), slot, bytes.size(), {}};
}

struct Interrupted : std::exception {};

template <typename Work>
bool is_interrupted(const Work& work) {
  try {
    work([] { throw Interrupted(); });
  } catch (const Interrupted&) {
    return true;
  }
  return false;
}

template <typename Work>
bool is_canceled(const Work& work) {
  try {
    work();
  } catch (const dcpx::Error& error) {
    return error.code() == ErrorCode::kStorage && error.sys_errno == ECANCELED;
  }
  return false;
}

TEST(pieces_put_in_any_order_come_out_by_offset_file_by_file) {
  for (std::uint64_t round = 0; round < 30; ++round) {
    RandomSource random(700 + round);
    const std::uint32_t files = static_cast<std::uint32_t>(random.between(1, 3));
    Queue queue(static_cast<int>(files));
    struct Put {
      std::uint32_t file;
      std::uint64_t offset;
      std::uint64_t nbytes;
    };
    std::vector<std::vector<std::byte>> expected;
    std::vector<Put> puts;
    for (std::uint32_t f = 0; f < files; ++f) {
      const std::uint64_t count = random.between(1, 8);
      std::uint64_t end = 0;
      for (std::uint64_t n = 0; n < count; ++n) {
        puts.push_back({f, end, random.between(1, 5000)});
        end += puts.back().nbytes;
      }
      expected.push_back(random.bytes(end));
    }
    std::shuffle(puts.begin(), puts.end(), random.engine());
    for (const Put& put : puts) {
      const std::byte* from = expected[put.file].data() + put.offset;
      UploadPiece piece{from, put.nbytes, kNoSlot, put.nbytes, {}};
      if (random.chance(2)) {
        piece.owned.assign(from, from + put.nbytes);
        piece.data = piece.owned.data();
      }
      queue->put(put.file, put.offset, std::move(piece));
    }
    std::uint64_t gone_bytes = 0;
    for (std::uint32_t f = files; f-- > 0;) {
      queue->end(f, expected[f].size());
      std::vector<std::byte> found;
      while (const auto piece = queue->next(f, {})) {
        found.insert(found.end(), piece->data, piece->data + piece->nbytes);
        CHECK_EQ(queue->gone_bytes(), gone_bytes);  // what is only taken is not gone
        queue->let_go(*piece);
        gone_bytes += piece->payload_bytes;
      }
      CHECK(found == expected[f]);
      CHECK(!queue->next(f, {}));  // as often as it is asked
    }
    CHECK_EQ(queue->gone_bytes(), gone_bytes);
  }
}

TEST(pieces_that_contradict_are_refused) {
  const std::vector<std::byte> bytes(10);
  Queue queue(2);
  queue->put(0, 0, borrowed_piece(bytes));
  CHECK_THROWS(queue->put(0, 0, borrowed_piece(bytes)), ErrorCode::kPlan);
  CHECK(queue->next(0, {}).has_value());
  CHECK_THROWS(queue->put(0, 0, borrowed_piece(bytes)), ErrorCode::kPlan);  // taken before
  CHECK_THROWS(queue->put(2, 0, borrowed_piece(bytes)), ErrorCode::kPlan);
  CHECK_THROWS(queue->next(2, {}), ErrorCode::kPlan);
  CHECK_THROWS(queue->size_of(2, {}), ErrorCode::kPlan);
  queue->put(1, 0, borrowed_piece(bytes));
  queue->end(1, 20);  // ten of which nobody has put
  CHECK(queue->next(1, {}).has_value());
  CHECK_THROWS(queue->next(1, {}), ErrorCode::kPlan);
}

TEST(failed_queue_hands_out_nothing_and_takes_back_what_was_taken) {
  Queue queue(3);
  StopFlag stop;
  const std::vector<std::byte> bytes(10);
  queue->check();
  const int slot = take_slot(queue);
  queue->put(0, 0, borrowed_piece(bytes, slot), slot);
  queue->put(0, 10, borrowed_piece(bytes));
  const auto taken = queue->next(0, {});
  queue->end(1, 0);
  queue->fail();
  queue->fail();
  CHECK(is_canceled([&] { queue->check(); }));
  CHECK(is_canceled([&] { queue->next(0, {}); }));  // a piece is there
  CHECK(is_canceled([&] { queue->next(1, {}); }));  // has ended
  CHECK(is_canceled([&] { queue->next(2, {}); }));
  CHECK(is_canceled([&] { queue->size_of(2, {}); }));
  CHECK_EQ(take_slot(queue), kNoSlot);
  CHECK(!queue->wait(stop, [] { return false; }));
  queue->let_go(*taken);
  CHECK_EQ(queue->gone_bytes(), 10U);
}

TEST(second_allocation_changes_nothing) {
  Queue queue(1, 2);
  const std::uint64_t size_bytes = queue->size_bytes();
  const int slot = take_slot(queue);
  std::byte* const begin = queue->slot(slot);
  queue->allocate(9, 2 * kSlotBytes, -1, {});
  CHECK_EQ(queue->size_bytes(), size_bytes);
  CHECK_EQ(queue->slot(slot), begin);
  CHECK(take_slot(queue) != slot);
  CHECK(has_to_wait(queue));
}

TEST(slots_wait_until_pieces_own_no_more_than_the_limit) {
  Queue queue;
  queue->put(0, 0, owned_piece(kOwnedBytes));
  CHECK(!has_to_wait(queue));
  queue->put(0, kOwnedBytes, owned_piece(1));
  CHECK(has_to_wait(queue));
  const auto first = queue->next(0, {});
  CHECK(has_to_wait(queue));  // taken, and still owned
  const auto second = queue->next(0, {});
  queue->let_go(*second);
  CHECK(!has_to_wait(queue));
  queue->let_go(*first);
  CHECK(!has_to_wait(queue));
}

// Whatever a segment comes to own, it never waits for room: it has it with its slot.
TEST(slots_taken_leave_room_for_a_piece_each) {
  Queue queue(1, 5, kOwnedBytes / 3);
  std::vector<int> taken;
  for (int n = 0; n < 3; ++n) taken.push_back(take_slot(queue));
  CHECK(has_to_wait(queue));  // slots are free
  queue->give_back(taken[2]);
  CHECK(!has_to_wait(queue));
  queue->put(0, 0, owned_piece(kOwnedBytes / 3), taken[1]);
  CHECK_EQ(take_slot(queue), taken[1]);  // free, as the piece does not have it
  CHECK(has_to_wait(queue));
  const auto piece = queue->next(0, {});
  queue->let_go(*piece);
  CHECK(!has_to_wait(queue));
}

TEST(piece_that_keeps_its_slot_owns_nothing) {
  Queue queue(1, 3, kOwnedBytes);
  const std::vector<std::byte> bytes(10);
  const int slot = take_slot(queue);
  CHECK(has_to_wait(queue));
  queue->put(0, 0, borrowed_piece(bytes, slot), slot);
  CHECK(!has_to_wait(queue));
}

// Nobody looks again by itself for an hour: who is woken wakes the next, as long as there is room.
TEST(one_piece_let_go_wakes_all_workers_that_have_room) {
  constexpr unsigned kWorkers = 4;
  for (const unsigned held : {0U, 1U}) {
    Queue queue(1, kWorkers, kOwnedBytes / kWorkers, std::chrono::hours(1));
    queue->put(0, 0, owned_piece(kOwnedBytes));
    const auto piece = queue->next(0, {});
    StopFlag stop;
    std::atomic<unsigned> taken{0};
    std::vector<std::future<void>> workers;
    for (unsigned n = 0; n < kWorkers; ++n) {
      workers.push_back(std::async(std::launch::async, [&] {
        const int slot = queue->take_slot(stop);
        if (taken.fetch_add(1) + 1 <= held) queue->put(0, kOwnedBytes, owned_piece(1), slot);
      }));
    }
    for (int n = 0; n < 1000; ++n) std::this_thread::yield();  // most wait by now
    queue->let_go(*piece);
    for (auto& worker : workers) {
      if (worker.wait_for(std::chrono::seconds(60)) != std::future_status::ready)
        std::quick_exit(3);
    }
    CHECK_EQ(taken.load(), kWorkers);
  }
}

TEST(stop_flag_of_another_thread_ends_all_waits_of_workers) {
  Queue queue(1, 1);
  StopFlag stop;
  const int slot = take_slot(queue);
  CHECK(queue->wait(stop, [] { return true; }));
  const auto other = std::async(std::launch::async, [&] { stop.set(); });
  CHECK_EQ(queue->take_slot(stop), kNoSlot);
  CHECK(!queue->wait(stop, [] { return false; }));
  queue->give_back(slot);
}

TEST(worker_and_uploader_poll_without_the_mutex) {
  Queue queue;
  StopFlag stop;
  const auto lets_others_in = [&] {
    auto other = std::async(std::launch::async, [&] { queue->gone_bytes(); });
    if (other.wait_for(std::chrono::seconds(20)) != std::future_status::ready) std::quick_exit(3);
    throw Interrupted();
  };
  const PollFunction poll = lets_others_in;
  const auto ends = [&](const auto& work) {
    try {
      work();
    } catch (const Interrupted&) {
      return true;
    }
    return false;
  };
  CHECK(ends([&] { queue->next(0, poll); }));
  CHECK(ends([&] { queue->size_of(0, poll); }));
  stop.poll_inline(poll);
  CHECK(ends([&] { queue->wait(stop, [] { return false; }); }));
}

}  // namespace
