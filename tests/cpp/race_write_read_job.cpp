// WriteJob and ReadJob in one process, four workers each: what is written comes back, by boxes,
// with and without verification and direct I/O; damage is found; a stopped job leaves nothing
// running.
#include "check.h"
#include "engine/read_job.h"
#include "engine/write_job.h"
#include "format/crc32.h"
#include "job_samples.h"
#include "region_samples.h"
#include "scratch_dir.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;
using dcpx::kBlockBytes;
using dcpx::plan::Region;

ReadRegion whole(const Saved& saved, std::size_t i, const LocatedItem& located, std::byte* dest) {
  return {saved.wanted[i].file,
          located.payload_offset,
          {located.payload_bytes, {}, {}, {}},
          dest,
          saved.sources[i].fqn};
}

// Rows [r0, r1) and columns [c0, c1) of an item seen as a matrix, to a transposed destination.
ReadRegion random_box(RandomSource& random, const Saved& saved, std::size_t i,
                      const LocatedItem& located) {
  const std::uint64_t nbytes = saved.sources[i].payload.size();
  const std::uint64_t columns = random.between(1, std::min<std::uint64_t>(nbytes, 5000));
  const std::uint64_t rows = nbytes / columns;
  const std::uint64_t r0 = random.below(rows);
  const std::uint64_t c0 = random.below(columns);
  ReadRegion region;
  region.file = saved.wanted[i].file;
  region.src_offset = located.payload_offset + r0 * columns + c0;
  region.region.lengths = {random.between(1, rows - r0), random.between(1, columns - c0)};
  region.region.src_strides = {columns, 1};
  region.region.dst_strides = {1, region.region.lengths[0] + random.below(3)};
  if (random.chance(2)) region.region.dst_strides = {region.region.lengths[1], 1};
  region.fqn = saved.sources[i].fqn;
  return region;
}

// Reads everything and random boxes of it in one call; compares with the sources.
void check_reads(RandomSource& random, const ScratchDir& dir, const Saved& saved, bool verify,
                 bool use_direct) {
  const auto max_open = static_cast<std::uint32_t>(random.below(saved.files.size() + 1));
  ReadJob job(dir.fd(), dir.path(), {4, kSegmentBytes, use_direct, verify, max_open});
  const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
  for (int pass = 0; pass < 2; ++pass) {  // a job serves several windows
    std::vector<ReadRegion> regions;
    std::vector<std::vector<std::byte>> expected, found;
    for (std::size_t i = 0; i < saved.sources.size(); ++i) {
      const std::vector<std::byte>& payload = saved.sources[i].payload;
      CHECK_EQ(located[i].payload_bytes, payload.size());
      CHECK_EQ(located[i].payload_offset, saved.rows[i].payload_offset);
      CHECK_EQ(saved.rows[i].payload_crc, dcpx::crc32(0, payload.data(), payload.size()));
      regions.push_back(whole(saved, i, located[i], nullptr));
      expected.push_back(payload);
      for (int box = 0; box < 2 && !payload.empty(); ++box) {
        regions.push_back(random_box(random, saved, i, located[i]));
        const Region& region = regions.back().region;
        expected.emplace_back(dcpx::plan::dst_span_bytes(region) + 8, std::byte{0xA5});
        dcpx::plan::copy_region(
            region, payload.data() + (regions.back().src_offset - located[i].payload_offset),
            expected.back().data());
      }
    }
    std::uint64_t needed_bytes = 0;
    for (const auto& bytes : expected) found.emplace_back(bytes.size(), std::byte{0xA5});
    for (std::size_t r = 0; r < regions.size(); ++r) {
      regions[r].dest = found[r].data();
      const Region& region = regions[r].region;
      needed_bytes += std::accumulate(region.lengths.begin(), region.lengths.end(),
                                      region.elem_bytes, std::multiplies<>());
    }
    const ReadReport before = job.report();
    job.read(regions, {});
    CHECK(found == expected);
    const ReadReport report = job.report();
    CHECK_EQ(report.needed_bytes - before.needed_bytes, needed_bytes);
    CHECK_EQ(report.verified_bytes > 0, verify);
    CHECK(report.verified_bytes <= report.read_bytes);
    CHECK(report.direct_bytes == 0 || use_direct);
    CHECK(report.slot_bytes <= 4 * kSegmentBytes);
  }
}

TEST(random_items_in_windows_and_files_come_back) {
  for (int round = 0; round < 6; ++round) {
    RandomSource random(100 + static_cast<std::uint64_t>(round));
    const ThreadCheck threads_end;
    const std::size_t files_before = count_of_open_files();
    {
      const ScratchDir dir;
      const Saved saved = save_random(random, dir, 1 + round % 4U, 1 + round % 3U, round % 2 == 0);
      for (const bool verify : {true, false}) {
        for (const bool use_direct : {true, false}) {
          check_reads(random, dir, saved, verify, use_direct);
        }
      }
    }
    CHECK(threads_end.holds());
    CHECK_EQ(count_of_open_files(), files_before);
  }
}

TEST(every_block_checksum_of_a_file_is_right_and_padding_is_zero) {
  RandomSource random(110);
  const ScratchDir dir;
  const Saved saved = save_random(random, dir, 2, 3, true);
  for (std::size_t f = 0; f < saved.files.size(); ++f) {
    const std::vector<std::byte> file = dir.content(saved.files[f].path);
    CHECK_EQ(file.size(), saved.files[f].file_bytes);
    const std::byte* raw = file.data() + file.size() - dcpx::kTailBytes;
    const dcpx::Tail tail = dcpx::parse_tail(raw, file.size(), "f");
    std::vector<bool> is_item(tail.index_offset, false);
    for (std::size_t i = 0; i < saved.rows.size(); ++i) {
      if (saved.sources[i].file != f) continue;
      const auto first = is_item.begin() + static_cast<std::ptrdiff_t>(saved.rows[i].item_offset);
      std::fill_n(first, saved.rows[i].item_bytes, true);
    }
    for (std::uint64_t at = 0; at < tail.index_offset; ++at) {
      CHECK(is_item[at] || file[at] == std::byte{0});
    }
    for (std::uint64_t block = 0; block < tail.block_count; ++block) {
      const std::uint64_t begin = block * kBlockBytes;
      const std::uint64_t nbytes = std::min(kBlockBytes, tail.data_bytes - begin);
      std::uint32_t expected = 0;
      std::memcpy(&expected, file.data() + tail.table_offset + 4 * block, 4);
      CHECK_EQ(dcpx::crc32(0, file.data() + begin, nbytes), expected);
    }
  }
}

TEST(flipped_byte_is_found_and_named) {
  RandomSource random(120);
  for (int round = 0; round < 8; ++round) {
    const ScratchDir dir;
    const Saved saved = save_random(random, dir, 2, 1, round % 2 == 0);
    std::size_t victim = random.below(saved.sources.size());
    while (saved.sources[victim].payload.empty()) victim = (victim + 1) % saved.sources.size();
    const auto& row = saved.rows[victim];
    const std::uint64_t at = row.payload_offset + random.below(row.payload_bytes);
    const StoredFileSpec& file = saved.files[saved.sources[victim].file];
    dir.flip_byte(file.path, at);
    const auto max_open = static_cast<std::uint32_t>(round % 3);
    ReadJob job(dir.fd(), dir.path(), {4, kSegmentBytes, round % 4 < 2, true, max_open});
    const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
    const std::size_t files_open = count_of_open_files();
    std::vector<std::byte> out(row.payload_bytes);
    const std::vector<ReadRegion> bad{whole(saved, victim, located[victim], out.data())};
    try {
      job.read(bad, {});
      CHECK(false);
    } catch (const dcpx::Error& error) {
      CHECK(error.code() == ErrorCode::kCorruption);
      CHECK_EQ(error.path, dir.path() + "/" + file.path);
      CHECK_EQ(error.fqn, saved.sources[victim].fqn);
      CHECK(static_cast<std::uint64_t>(error.offset) <= at &&
            at < static_cast<std::uint64_t>(error.offset + error.nbytes));
      // What did not go straight was checked before it was copied.
      CHECK(job.touched().at(0) || out == std::vector<std::byte>(row.payload_bytes));
    }
    // The job survives its error, and so does what lies in other blocks; the file that the error
    // left open is closed by the next read, whatever that reads.
    std::byte other_byte{};
    const std::uint32_t other_file = 1 - saved.sources[victim].file;
    job.read({{other_file, 0, {1, {}, {}, {}}, &other_byte, "w"}}, {});
    CHECK_EQ(count_of_open_files(), files_open);
    for (std::size_t i = 0; i < saved.sources.size(); ++i) {
      const auto& other = saved.rows[i];
      const bool is_near =
          saved.sources[i].file == saved.sources[victim].file &&
          other.payload_offset / kBlockBytes <= at / kBlockBytes &&
          (other.payload_offset + other.payload_bytes) / kBlockBytes >= at / kBlockBytes;
      if (is_near) continue;
      std::vector<std::byte> good(other.payload_bytes);
      job.read({whole(saved, i, located[i], good.data())}, {});
      CHECK(good == saved.sources[i].payload);
    }
    // Unverified, the same read succeeds and brings the damage along.
    ReadJob careless(dir.fd(), dir.path(), {4, kSegmentBytes, false, false});
    careless.locate(saved.files, saved.wanted, {});
    careless.read(bad, {});
    CHECK(out != saved.sources[victim].payload);
  }
}

TEST(items_that_the_index_does_not_hold_are_refused) {
  RandomSource random(131);
  const ScratchDir dir;
  const Saved saved = save_random(random, dir, 2, 1, false);
  for (std::size_t i = 0; i < saved.wanted.size(); ++i) {
    for (int change = 0; change < 3; ++change) {
      WantedItem wanted = saved.wanted[i];
      if (change == 0) wanted.offset += 1;
      if (change == 1) wanted.nbytes += 1;
      if (change == 2) wanted.is_tensor = !wanted.is_tensor;
      ReadJob job(dir.fd(), dir.path(), {2, kSegmentBytes, true, true});
      CHECK_THROWS(job.locate(saved.files, {wanted}, {}), ErrorCode::kCorruption);
    }
  }
  ReadJob job(dir.fd(), dir.path(), {2, kSegmentBytes, true, true});
  job.locate({saved.files[0]}, {}, {});
  CHECK_THROWS(job.locate({saved.files[1]}, {saved.wanted[0]}, {}), ErrorCode::kPlan);
  CHECK_THROWS(job.locate({}, {{9, 0, 0, true}}, {}), ErrorCode::kPlan);
}

TEST(files_that_stay_open_are_read_after_they_were_removed) {
  RandomSource random(133);
  for (const std::uint32_t max_open : {0u, 2u}) {
    const ScratchDir dir;
    const Saved saved = save_random(random, dir, 2, 2, false);
    const std::size_t files_before = count_of_open_files();
    {
      ReadJob job(dir.fd(), dir.path(), {4, kSegmentBytes, true, true, max_open});
      const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
      CHECK_EQ(count_of_open_files(), files_before + 1 + max_open);  // and the directory
      for (const StoredFileSpec& file : saved.files) {
        std::filesystem::remove(dir.path() + "/" + file.path);
      }
      for (int pass = 0; pass < 2; ++pass) {
        for (std::size_t i = 0; i < saved.sources.size(); ++i) {
          std::vector<std::byte> found(saved.sources[i].payload.size());
          const std::vector<ReadRegion> regions{whole(saved, i, located[i], found.data())};
          if (max_open == 0 && !found.empty()) {
            CHECK_THROWS(job.read(regions, {}), ErrorCode::kStorage);
          } else {
            job.read(regions, {});
            CHECK(found == saved.sources[i].payload);
          }
        }
      }
    }
    CHECK_EQ(count_of_open_files(), files_before);
  }
}

TEST(items_for_a_file_that_is_complete_are_refused) {
  const ScratchDir dir;
  RandomSource random(132);
  WriteJob job(dir.fd(), dir.path(), {4, kSegmentBytes, false, false});
  for (const char* name : {"a", "b", "c"}) job.add_file({{name}, {}, 0});
  std::vector<Source> sources;
  for (std::uint32_t f = 0; f < 3; ++f) sources.push_back(random_source(random, f, f));
  std::vector<WriteItem> first{to_item(sources[0])}, second{to_item(sources[1])};
  job.write(first, false, {});
  CHECK(job.results().empty());
  job.write(second, false, {});
  CHECK_EQ(job.results().size(), 1U);  // nothing of the first file stays open
  CHECK_THROWS(job.write(first, false, {}), ErrorCode::kPlan);
  std::vector<WriteItem> wrong_order{to_item(sources[2]), to_item(sources[1])};
  CHECK_THROWS(job.write(wrong_order, false, {}), ErrorCode::kPlan);
}

struct Interrupted : std::exception {};

// Whether `work` was ended by what the first poll, a tenth of a second after its start, threw.
template <typename Work>
bool is_interrupted(Work work) {
  try {
    work([] { throw Interrupted(); });
  } catch (const Interrupted&) {
    return true;
  }
  return false;
}

TEST(interrupted_save_leaves_no_thread_and_no_open_file) {
  const ScratchDir dir;
  const ThreadCheck threads_end;
  const std::size_t files_before = count_of_open_files();
  {
    // One byte, a billion times: gathered one by one, far longer than a tenth of a second.
    constexpr std::int64_t kCount = 1 << 30;
    const std::byte source{7};
    std::vector<WriteItem> items(1);
    items[0].source = &source;
    items[0].is_dense = false;
    items[0].row.payload_bytes = kCount;
    items[0].row.sizes = items[0].row.global_sizes = {kCount};
    items[0].row.offsets = {0};
    items[0].row.strides = {1};
    items[0].gather = {1, {kCount}, {0}, {0}};
    items[0].zip.emplace(dcpx::ZipItemSpec{&kByteFraming, {kCount}, {1}, kCount, 1});
    WriteJob job(dir.fd(), dir.path(), {4, kSegmentBytes, false, false});
    job.add_file({{"f"}, {}, 0});
    WriteReport report;
    CHECK(is_interrupted([&](auto poll) {
      job.write(items, true, [&] {
        report = job.report();
        poll();
      });
    }));
    CHECK(threads_end.holds());
    CHECK_EQ(report.total_bytes, static_cast<std::uint64_t>(kCount));
    CHECK(report.done_bytes > 0 && report.done_bytes < report.total_bytes);
    CHECK(report.copy_ns > 0 && report.write_ns > 0 && report.engine_ns == 0);
    CHECK(job.report().engine_ns > 0);
    CHECK(job.results().empty());
    CHECK(job.created() == std::vector<std::string>{"f"});
  }
  CHECK_EQ(count_of_open_files(), files_before);
}

TEST(interrupted_load_leaves_no_thread_and_no_open_file) {
  const ScratchDir dir;
  const ThreadCheck threads_end;
  constexpr std::uint64_t kCount = 100'000;
  constexpr std::uint64_t kRegions = 10'000;
  std::filesystem::resize_file((std::ofstream(dir.path() + "/sparse"), dir.path() + "/sparse"),
                               kSegmentBytes * kRegions);
  const std::size_t files_before = count_of_open_files();
  {
    // A billion bytes, copied one by one, each region to a single byte of its own, and each in a
    // cell of its own: else two workers would write that byte.
    std::vector<std::byte> out(kRegions, std::byte{1});
    std::vector<ReadRegion> regions;
    for (std::uint64_t r = 0; r < kRegions; ++r) {
      regions.push_back({0, r * kSegmentBytes, {1, {kCount}, {1}, {0}}, &out[r], "w"});
    }
    ReadJob job(dir.fd(), dir.path(), {4, kSegmentBytes, false, true});
    job.locate({{"sparse", false, 0, {}, 0}}, {}, {});
    CHECK(is_interrupted([&](auto poll) { job.read(regions, poll); }));
    CHECK(threads_end.holds());
    const std::vector<bool> touched = job.touched();
    for (std::size_t r = 0; r < kRegions; ++r) {
      CHECK_EQ(out[r] == std::byte{1}, !touched[r]);  // touched() tells the truth
    }
    CHECK(!touched.back());
  }
  CHECK_EQ(count_of_open_files(), files_before);
}

}  // namespace
