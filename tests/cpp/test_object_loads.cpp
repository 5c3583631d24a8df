// A ReadJob over objects that a job with a directory has written: what arrives, and to the byte
// what is asked for, against a brute force that looks at single runs. Damage, changes, failures.
#include <numeric>

#include "check.h"
#include "common/bytes.h"
#include "engine/read_job.h"
#include "engine/read_plan.h"
#include "format/file_footer.h"
#include "memory_store.h"
#include "region_samples.h"
#include "scratch_dir.h"
#include "stream_samples.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;
using dcpx::kBlockBytes;

constexpr std::uint64_t kSlotBytes = 4 << 20;  // a cell

// What a directory job writes of these sources, as objects.
struct Objects {
  Objects(std::vector<Source> wanted_sources, std::uint32_t files) {
    sources = std::move(wanted_sources);
    const ScratchDir dir;
    WriteJob job(dir.fd(), dir.path(), {2, kSegmentBytes, false, false});
    add_files(job, files);
    std::vector<WriteItem> items;
    for (const Source& source : sources) items.push_back(to_item(source));
    job.write(items, true, {});
    for (const WriteItem& item : items) {
      wanted.push_back({item.file, item.row.item_offset, item.row.item_bytes,
                        item.row.kind == dcpx::ItemKind::kTensor});
      rows.push_back(item.row);
    }
    for (const FileResult& file : job.results()) {
      const std::vector<std::byte> bytes = dir.content(file.name);
      tails.push_back(
          dcpx::parse_tail(&bytes[bytes.size() - dcpx::kTailBytes], bytes.size(), file.name));
      store->put(file.name, bytes);
      specs.push_back({file.name, true, file.file_bytes, file.file_id, file.footer_crc, kSaveId});
    }
  }

  ReadRegion rows_of(std::size_t item, std::uint64_t elem_bytes,
                     const std::vector<std::uint64_t>& lengths,
                     const std::vector<std::uint64_t>& strides, std::uint64_t at = 0) const {
    ReadRegion region;
    region.file = sources[item].file;
    region.src_offset = rows[item].payload_offset + at;
    region.region = {elem_bytes, lengths, strides, std::vector<std::uint64_t>(lengths.size())};
    std::uint64_t stride = elem_bytes;
    for (std::size_t d = lengths.size(); d-- > 0;) {
      region.region.dst_strides[d] = stride;
      stride *= lengths[d];
    }
    region.fqn = sources[item].fqn;
    return region;
  }
  ReadRegion whole(std::size_t item) const {
    return rows_of(item, sources[item].payload.size(), {}, {});
  }

  std::vector<Source> sources;
  std::vector<WantedItem> wanted;
  std::vector<dcpx::IndexRow> rows;
  std::vector<StoredFileSpec> specs;
  std::vector<dcpx::Tail> tails;
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
};

// Two files of large and small items, one of bytes.
Objects make_objects() {
  RandomSource random(850);
  std::vector<Source> sources;
  for (const std::uint32_t file : {0, 1}) {
    for (const std::uint64_t nbytes : {9UL << 20, 3000UL, 700'000UL, 5UL, 70'000UL, 3UL << 20}) {
      sources.push_back(plain_source(random, file, nbytes, sources.size()));
      sources.back().is_bytes = nbytes == 70'000;
    }
  }
  return {std::move(sources), 2};
}

const Objects& objects() {
  static const Objects made = make_objects();
  return made;
}

// The requests that fetch the regions: neighbours less than kObjectGapBytes apart in a cell are
// one, and what is checked comes in whole blocks, with the checksums of each file before it.
std::vector<Request> expected_requests(const Objects& from, const std::vector<ReadRegion>& regions,
                                       bool is_checked, const std::vector<bool>& is_end_kept) {
  std::vector<Request> requests;
  for (std::uint32_t f = 0; f < from.specs.size(); ++f) {
    const dcpx::Tail& tail = from.tails[f];
    std::vector<std::pair<std::uint64_t, std::uint64_t>> runs;  // begin, end; each in one cell
    for (const ReadRegion& region : regions) {
      if (region.file != f) continue;
      BytePairs begins;
      dcpx::plan::Region box = region.region;
      const std::uint64_t run = std::exchange(box.elem_bytes, 1);
      append_pairs(box, region.src_offset, 0, begins);
      for (const auto& [unused, begin] : begins) {
        for (std::uint64_t at = begin; at < begin + run;) {
          const std::uint64_t end = std::min(at - at % kSlotBytes + kSlotBytes, begin + run);
          runs.emplace_back(at, end);
          at = end;
        }
      }
    }
    if (runs.empty()) continue;
    std::sort(runs.begin(), runs.end());
    if (is_checked && !is_end_kept[f]) {
      const std::uint64_t page = runs.front().first / kBlockBytes / dcpx::kPageEntries;
      const std::uint64_t begin = tail.table_offset + 4 * page * dcpx::kPageEntries;
      requests.push_back(
          {from.specs[f].path, begin, tail.page_checks_offset() + 4 * tail.page_count() - begin});
    }
    std::uint64_t cell = ~0UL;
    for (auto [begin, end] : runs) {
      if (is_checked) {
        begin = dcpx::align_down(begin, kBlockBytes);
        end = std::min(dcpx::align_up(end, kBlockBytes), tail.data_bytes);
      }
      Request& last = requests.empty() ? requests.emplace_back() : requests.back();
      if (cell == begin / kSlotBytes && begin <= last.offset + last.nbytes + kObjectGapBytes) {
        last.nbytes = std::max(last.offset + last.nbytes, end) - last.offset;
      } else {
        requests.push_back({from.specs[f].path, begin, end - begin});
        cell = begin / kSlotBytes;
      }
    }
  }
  requests.erase(std::remove(requests.begin(), requests.end(), Request{}), requests.end());
  std::sort(requests.begin(), requests.end());
  return requests;
}

// A job that has located all, and what it has kept of the ends.
struct Load {
  Load(const Objects& objects, bool verifies)
      : from(objects),
        verify(verifies),
        job(objects.store, "s3://bucket", {3, kSlotBytes, true, verifies}),
        is_end_kept(objects.specs.size(), objects.specs.size() <= 32) {
    located = job.locate(from.specs, from.wanted, {});
    CHECK_EQ(from.store->take_looks(), from.specs.size());
    locate_requests = from.store->take_reads();
  }

  const Objects& from;
  bool verify;
  ReadJob job;
  std::vector<bool> is_end_kept;  // until the checksums are loaded
  std::vector<LocatedItem> located;
  std::vector<Request> locate_requests;
};

// Reads the regions and compares what arrives, and what is asked for.
void check_read(Load& load, std::vector<ReadRegion> regions) {
  const Objects& from = load.from;
  ReadJob& job = load.job;
  const bool verify = load.verify;
  std::vector<std::vector<std::byte>> found, expected;
  std::uint64_t needed_bytes = 0;
  for (ReadRegion& region : regions) {
    const auto item = std::find_if(from.sources.begin(), from.sources.end(),
                                   [&](const Source& source) { return source.fqn == region.fqn; });
    const std::uint64_t at =
        region.src_offset -
        from.rows[static_cast<std::size_t>(item - from.sources.begin())].payload_offset;
    found.emplace_back(dcpx::plan::dst_span_bytes(region.region), std::byte{0xA5});
    expected.push_back(found.back());
    dcpx::plan::copy_region(region.region, item->payload.data() + at, expected.back().data());
    region.dest = found.back().data();
    needed_bytes += found.back().size();
  }
  const ReadReport before = job.report();
  job.read(regions, {});
  CHECK(found == expected);
  const ReadReport after = job.report();
  CHECK_EQ(from.store->take_looks(), 0U);
  const std::vector<Request> requests = from.store->take_reads();
  CHECK(requests == expected_requests(from, regions, verify, load.is_end_kept));
  for (const ReadRegion& region : regions) {
    if (verify) load.is_end_kept[region.file] = false;
  }
  std::uint64_t asked_bytes = 0;
  for (const Request& request : requests) asked_bytes += request.nbytes;
  CHECK_EQ(after.needed_bytes - before.needed_bytes, needed_bytes);
  CHECK(after.read_bytes - before.read_bytes <= asked_bytes);
  CHECK_EQ(after.verified_bytes - before.verified_bytes,
           verify ? after.read_bytes - before.read_bytes : 0);
  CHECK_EQ(after.direct_bytes, 0U);
}

TEST(items_rows_and_columns_arrive_by_no_other_requests_than_foreseen) {
  const Objects& from = objects();
  for (const bool verify : {true, false}) {
    Load load(from, verify);
    CHECK(load.locate_requests.empty());  // all footers are in what opening has brought
    std::vector<ReadRegion> all;
    for (std::size_t i = 0; i < from.sources.size(); ++i) {
      CHECK_EQ(load.located[i].payload_offset, from.rows[i].payload_offset);
      CHECK_EQ(load.located[i].payload_bytes, from.rows[i].payload_bytes);
      all.push_back(from.whole(i));
      check_read(load, {all.back()});
    }
    check_read(load, all);
    check_read(load, {});
    for (const std::uint64_t gap : {1UL, 4096UL, kObjectGapBytes - 1, kObjectGapBytes,
                                    kObjectGapBytes + 1, kObjectGapBytes + 2 * kBlockBytes}) {
      for (const std::uint64_t run : {64UL, 5000UL, 200'000UL}) {
        const std::uint64_t count = (8UL << 20) / (run + gap);
        const std::uint64_t rows = std::min<std::uint64_t>(count, 20);
        check_read(load, {from.rows_of(0, run, {rows}, {run + gap})});
        check_read(load, {from.rows_of(0, 4, {rows, run / 4}, {run + gap, 4}, 12),
                          from.rows_of(6, run, {rows}, {run + gap}, 1 << 19)});
      }
    }
  }
}

TEST(random_boxes_of_several_files_arrive_by_no_other_requests_than_foreseen) {
  const Objects& from = objects();
  for (std::uint64_t round = 0; round < 40; ++round) {
    RandomSource random(860 + round);
    Load load(from, round % 2 == 0);
    std::vector<ReadRegion> regions;
    for (std::uint64_t n = random.between(1, 6); n > 0; --n) {
      const std::size_t item = random.below(from.sources.size());
      const std::uint64_t nbytes = from.sources[item].payload.size();
      const std::uint64_t width = random.between(1, nbytes);
      const std::uint64_t run = random.between(1, width);
      const std::uint64_t count = random.between(1, std::min<std::uint64_t>(nbytes / width, 300));
      regions.push_back(from.rows_of(item, run, {count}, {width}));
    }
    check_read(load, regions);
  }
}

TEST(footer_longer_than_the_end_that_opening_brings_takes_one_request_more) {
  RandomSource random(900);
  std::vector<Source> sources;
  for (int i = 0; i < 6000; ++i) sources.push_back(plain_source(random, 0, 40, sources.size()));
  const Objects from(std::move(sources), 1);
  const dcpx::Tail& tail = from.tails[0];
  CHECK(tail.index_bytes > dcpx::io::kObjectEndBytes);
  Load load(from, true);
  CHECK(load.locate_requests ==
        std::vector<Request>({{"f0", tail.index_offset, tail.index_bytes}}));
  std::vector<ReadRegion> regions;
  for (std::size_t i = 0; i < from.sources.size(); ++i) regions.push_back(from.whole(i));
  check_read(load, regions);
}

// More of them would hold too much memory.
TEST(ends_of_up_to_32_objects_are_kept_for_their_checksums) {
  for (const std::uint32_t files : {32, 33}) {
    RandomSource random(910);
    std::vector<Source> sources;
    for (std::uint32_t f = 0; f < files; ++f) sources.push_back(plain_source(random, f, 99, f));
    const Objects from(std::move(sources), files);
    Load load(from, true);
    CHECK(load.locate_requests.empty());
    std::vector<ReadRegion> regions;
    for (std::size_t i = 0; i < files; ++i) regions.push_back(from.whole(i));
    for (int n = 0; n < 2; ++n) check_read(load, regions);
  }
}

TEST(flipped_byte_is_found_before_it_lands_and_only_where_it_lies) {
  const Objects from = make_objects();
  const std::size_t item = 2;
  from.store->flip_byte("f0", from.rows[item].payload_offset + 123'456);
  std::vector<std::byte> out(from.sources[item].payload.size());
  std::vector<ReadRegion> regions{from.whole(item)};
  regions[0].dest = out.data();
  Load load(from, true);
  try {
    load.job.read(regions, {});
    CHECK(false);
  } catch (const dcpx::Error& error) {
    CHECK(error.code() == ErrorCode::kCorruption);
    CHECK_EQ(error.path, "s3://bucket/f0");
    CHECK_EQ(error.fqn, "item2");
  }
  CHECK(out == std::vector<std::byte>(out.size()));
  CHECK(!load.job.touched().at(0));
  from.store->take_reads();
  load.is_end_kept[0] = false;
  check_read(load, {from.whole(5), from.whole(8)});  // the job goes on
  Load careless(from, false);
  careless.job.read(regions, {});
  CHECK(out != from.sources[item].payload);
}

TEST(request_that_fails_ends_the_load_with_its_error_and_the_next_goes_on) {
  const Objects& from = objects();
  Load load(from, true);
  const std::vector<ReadRegion> regions{from.whole(0), from.whole(6)};
  check_read(load, regions);  // after which no end is kept
  const std::size_t requests = expected_requests(from, regions, true, load.is_end_kept).size();
  CHECK(requests > 6);
  std::vector<std::byte> out(9 << 20), other(9 << 20);
  for (std::size_t n = 0; n <= requests; ++n) {
    std::vector<ReadRegion> wanted = regions;
    wanted[0].dest = out.data();
    wanted[1].dest = other.data();
    from.store->fail_after(n);
    if (n < requests) {
      CHECK_THROWS(load.job.read(wanted, {}), ErrorCode::kStorage);
    } else {
      load.job.read(wanted, {});
    }
    from.store->fail_after(1 << 20);
    from.store->take_reads();
    check_read(load, regions);
  }
  from.store->fail_after(0);
  ReadJob late(from.store, "s3://bucket", {3, kSlotBytes, true, true});
  CHECK_THROWS(late.locate(from.specs, from.wanted, {}), ErrorCode::kStorage);
  from.store->take_looks();
}

}  // namespace
