// A streamed WriteJob and uploaders that hold its memory as long as a store would: whatever the
// items, the calls and the order of answers, what arrives is what a job with a directory writes,
// nobody waits for ever at the smallest budgets, and all end when the save is given up.
#include <future>

#include "check.h"
#include "engine/read_job.h"
#include "engine/write_job.h"
#include "format/crc32.h"
#include "scratch_dir.h"
#include "stream_samples.h"
#include "upload_samples.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;

// Whether a load that verifies gets all items out of what was uploaded.
void check_objects(const Saved& saved, const Calls& calls, const Uploads& uploads) {
  const ScratchDir dir;
  for (std::size_t f = 0; f < saved.files.size(); ++f) {
    const std::vector<std::byte>& bytes = uploads.object(f);
    std::ofstream(dir.path() + "/" + saved.files[f].path, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }
  ReadJob job(dir.fd(), dir.path(), {2, kSegmentBytes, false, true});
  const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
  std::vector<std::vector<std::byte>> found;
  std::vector<ReadRegion> regions;
  for (std::size_t i = 0; i < calls.sources.size(); ++i) {
    const std::vector<std::byte>& payload = calls.sources[i].payload;
    CHECK_EQ(located[i].payload_bytes, payload.size());
    CHECK_EQ(saved.rows[i].payload_crc, dcpx::crc32(0, payload.data(), payload.size()));
    found.emplace_back(payload.size());
    regions.push_back({calls.sources[i].file,
                       located[i].payload_offset,
                       {payload.size(), {}, {}, {}},
                       found.back().data(),
                       calls.sources[i].fqn});
  }
  job.read(regions, {});
  for (std::size_t i = 0; i < found.size(); ++i) CHECK(found[i] == calls.sources[i].payload);
}

// Saves twice, to a directory and to uploaders, and compares.
void check_save(RandomSource& random, Calls& calls, const Budget& budget, const Shape& shape,
                UploadOptions upload_options) {
  const ScratchDir dir;
  WriteJob plain(dir.fd(), dir.path(), options_of(budget, shape, false));
  add_files(plain, shape.files);
  Saved expected;
  write_all(plain, calls, {}, expected, false);

  upload_options.part_bytes = budget.part_bytes;
  WriteJob job(-1, "s3://bucket", options_of(budget, shape, true));
  add_files(job, shape.files);
  Saved saved;
  Uploads uploads(job.queue(), shape.files, upload_options, random.below(1 << 30));
  try {
    write_all(job, calls, uploads.progress.poll(), saved, true);
  } catch (...) {
    job.abandon();
    uploads.join();
    uploads.throw_first_error();
    throw;
  }
  uploads.join();
  uploads.throw_first_error();
  CHECK_EQ(saved.files.size(), shape.files);
  for (std::size_t f = 0; f < shape.files; ++f) {
    CHECK_EQ(saved.files[f].file_bytes, uploads.object(f).size());
    const auto announced = uploads.announced_size(f);
    CHECK(!announced || *announced == saved.files[f].file_bytes);
    CHECK(announced || calls.ends.size() > 1);
    // A temporary item is written from its own memory only by the job with a directory.
    const bool is_same = shape.in_place == InPlace::kNever || !calls.has_temporary();
    if (is_same) CHECK(uploads.object(f) == dir.content(expected.files[f].path));
  }
  check_objects(saved, calls, uploads);
  std::uint64_t payload_bytes = 0, file_bytes = 0;
  for (const Source& source : calls.sources) payload_bytes += source.payload.size();
  for (const StoredFileSpec& file : saved.files) file_bytes += file.file_bytes;
  const WriteReport report = job.report();
  CHECK_EQ(job.queue()->gone_bytes(), payload_bytes);
  CHECK_EQ(report.done_bytes, payload_bytes);
  CHECK_EQ(report.total_bytes, payload_bytes);
  CHECK_EQ(report.buffered_bytes, file_bytes);
  const std::uint64_t footer_bytes = shape.files * (16 << 10);  // at most: they pass the limit
  CHECK(job.queue()->size_bytes() + uploads.meter.peak() <=
        budget.memory_bytes / 4 * 3 + footer_bytes);
}

TEST(streamed_files_are_what_a_job_with_a_directory_writes) {
  const ThreadCheck threads_end;
  for (std::uint64_t round = 0; round < 24; ++round) {
    RandomSource random(400 + round);
    std::uint64_t segment_bytes = kSegmentBytes;
    if (random.chance(3)) segment_bytes += 65536 * random.between(1, 4);
    const Budget budget = budget_of(
        random.chance(2) ? 8 * segment_bytes : segment_bytes * random.between(64, 192) / 8,
        segment_bytes);
    const Shape shape{
        static_cast<std::uint32_t>(random.between(1, 6)),
        random.pick<unsigned>({1, 2, 4}),
        random.pick<InPlace>({InPlace::kAuto, InPlace::kAlways, InPlace::kNever}),
    };
    Calls calls = random_calls(random, shape.files);
    if (random.chance(2)) calls.is_lasting.assign(calls.is_lasting.size(), true);
    check_save(random, calls, budget, shape, random_uploads(random));
  }
  CHECK(threads_end.holds());
}

// Each item has a segment for itself, little more than half full, so that many pieces make a part.
TEST(part_that_waits_for_more_bytes_never_holds_all_slots) {
  RandomSource random(430);
  for (const Budget& budget :
       {budget_of(kLeastBytes), budget_of(6 * kSegmentBytes), budget_of(2656 << 10),
        budget_of(12 * kSegmentBytes), budget_of(4 << 20, 384 << 10)}) {
    for (std::uint64_t more = 0; more < 24 << 10; more += 4 << 10) {
      Calls calls;
      for (std::uint64_t i = 0; i < 20; ++i) {
        calls.sources.push_back(
            plain_source(random, 0, budget.segment_bytes / 2 + more, calls.sources.size()));
        calls.is_lasting.push_back(random.chance(2));
      }
      calls.ends = {calls.sources.size()};
      check_save(random, calls, budget, {1, random.pick<unsigned>({1, 4})}, random_uploads(random));
    }
  }
}

// What a file's last call has left waits for the file's end, not for the end of the next call.
TEST(file_whose_last_items_came_with_an_earlier_call_holds_no_memory) {
  for (std::uint64_t round = 0; round < 8; ++round) {
    RandomSource random(440 + round);
    Calls calls;
    const bool is_even = round % 2 == 0;  // each piece has its slot
    for (std::uint32_t f = 0; f < 4; ++f) {
      for (std::uint64_t n = is_even ? 3 + f % 2 * 3 : random.between(3, 12); n > 0; --n) {
        const std::uint64_t nbytes =
            is_even ? 140'000 : random.pick<std::uint64_t>({60'000, 140'000, 200'000});
        calls.sources.push_back(plain_source(random, f, nbytes, calls.sources.size()));
        calls.is_lasting.push_back(true);
      }
      calls.ends.push_back(calls.sources.size());
    }
    check_save(random, calls, budget_of(kLeastBytes), {4, 4, InPlace::kAuto},
               random_uploads(random));
  }
}

// Nothing of such a file passes a worker.
TEST(files_without_bytes_end_before_later_ones_are_filled) {
  for (const std::uint64_t first_bytes : {0, 140'000}) {
    RandomSource random(445);
    Calls calls;
    const auto add = [&](std::uint32_t file, std::uint64_t nbytes) {
      calls.sources.push_back(plain_source(random, file, nbytes, calls.sources.size()));
      calls.sources.back().is_bytes = nbytes == 0;
      calls.is_lasting.push_back(true);
    };
    add(0, first_bytes);
    if (first_bytes > 0) {
      add(0, first_bytes / 2);
      calls.ends.push_back(calls.sources.size());
    }
    add(0, 0);
    for (int i = 0; i < 20; ++i) add(1, 140'000);
    calls.ends.push_back(calls.sources.size());
    UploadOptions options = random_uploads(random);
    options.threads = first_bytes == 0 ? 1 : 2;
    check_save(random, calls, budget_of(kLeastBytes), {2, 4}, options);
  }
}

// Pieces of less than half a segment hold no slot, and only so many at a time are not let go.
TEST(short_pieces_own_no_more_than_the_budget_leaves) {
  RandomSource random(450);
  constexpr std::uint32_t kFiles = 30;
  Calls calls;
  for (std::uint32_t f = 0; f < kFiles; ++f) {
    calls.sources.push_back(plain_source(random, f, 110'000, f));
    calls.is_lasting.push_back(true);
  }
  calls.ends = {kFiles};
  const Budget budget = budget_of(kLeastBytes);
  WriteJob job(-1, "s3://bucket", options_of(budget, {kFiles, 4}, true));
  add_files(job, kFiles);
  Progress progress;
  Meter meter;
  std::atomic<std::uint64_t> taken_bytes{0};
  std::atomic<unsigned> with_slot{0};
  std::atomic<std::uint32_t> next_file{0};
  // Keeps all that comes, until nothing comes any more.
  struct Quiet {};
  const auto take_all = [&] {
    std::vector<HeldPiece> held;
    const auto end_wait = [&] {
      progress.check();
      if (!held.empty()) throw Quiet();
    };
    for (std::uint32_t f = next_file.fetch_add(1); f < kFiles; f = next_file.fetch_add(1)) {
      while (true) {
        try {
          std::optional<UploadPiece> piece = job.queue()->next(f, end_wait);
          if (!piece) break;
          taken_bytes += piece->nbytes;
          if (piece->slot != kNoSlot) ++with_slot;
          held.push_back(hold(job.queue(), std::move(*piece), meter, progress));
        } catch (const Quiet&) {
          held.clear();
        }
      }
    }
  };
  std::vector<std::future<void>> takers;
  for (int n = 0; n < 4; ++n) takers.push_back(std::async(std::launch::async, take_all));
  Saved saved;
  write_all(job, calls, progress.poll(), saved, false);
  for (std::future<void>& taker : takers) taker.get();
  std::uint64_t file_bytes = 0;
  for (const StoredFileSpec& file : saved.files) file_bytes += file.file_bytes;
  CHECK_EQ(taken_bytes.load(), file_bytes);
  CHECK_EQ(with_slot.load(), 0U);
  CHECK(meter.peak() > 110'000 && job.queue()->size_bytes() + meter.peak() <= budget.memory_bytes);
}

}  // namespace
