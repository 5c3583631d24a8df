// WriteJob and ReadJob with items and destinations on two fake devices, four workers each: what the
// callers' streams had queued is saved, and what is read lies on the devices when read() returns.
#include <algorithm>
#include <memory>

#include "device_samples.h"
#include "job_samples.h"
#include "region_samples.h"

namespace {

using namespace dcpx::engine;
using dcpx::device::CallerStream;
using dcpx::device::SourceEvents;

constexpr std::byte kCanary{0xA5};

// A stream of the caller on each device.
struct Callers {
  std::uint64_t streams[2] = {fake_make_stream(0, 1), fake_make_stream(1, 1)};

  SourceEvents events() const {
    return SourceEvents(std::vector<CallerStream>{{0, streams[0]}, {1, streams[1]}});
  }
  // Queues that the memory, of `device`, becomes `bytes`.
  void write_later(int device, const DeviceMemory& memory, const std::vector<std::byte>& bytes) {
    CHECK_EQ(
        fake_stream_write(device, streams[device], memory.address(), bytes.data(), bytes.size()),
        0);
  }
};

std::byte* to_pointer(std::uint64_t address) { return reinterpret_cast<std::byte*>(address); }

// Writes random items, tensors from devices 0 and 1 or the host in turn, to one file.
Saved save_from_devices(RandomSource& random, const ScratchDir& dir, Callers& callers) {
  Saved saved;
  for (std::uint64_t i = 0; i < 14; ++i) saved.sources.push_back(random_source(random, 0, i));
  std::vector<std::unique_ptr<DeviceMemory>> memories;
  std::vector<WriteItem> items;
  for (std::size_t i = 0; i < saved.sources.size(); ++i) {
    const Source& source = saved.sources[i];
    items.push_back(to_item(source));
    const int device = static_cast<int>(i % 3) - 1;
    if (source.is_bytes || device < 0 || source.payload.empty()) continue;
    memories.push_back(std::make_unique<DeviceMemory>(device, source.memory.size()));
    callers.write_later(device, *memories.back(), source.memory);
    items.back().source = to_pointer(memories.back()->address() + source.phase);
    items.back().device = device;
  }
  WriteJob job(dir.fd(), dir.path(), {4, kSegmentBytes, random.chance(2), false});
  dcpx::FileId id{};
  job.add_file({{"f"}, id, 0});
  const SourceEvents after = callers.events();
  job.write(items, true, {}, &after);
  for (const WriteItem& item : items) {
    saved.rows.push_back(item.row);
    saved.wanted.push_back(
        {0, item.row.item_offset, item.row.item_bytes, item.row.kind == dcpx::ItemKind::kTensor});
  }
  const FileResult file = job.results().at(0);
  saved.files.push_back({file.name, true, file.file_bytes, file.file_id, file.footer_crc});
  return saved;
}

// A box of an item, seen as a matrix, with room between the rows of its destination.
ReadRegion random_box(RandomSource& random, const Saved& saved, std::size_t i,
                      const LocatedItem& located) {
  const std::uint64_t nbytes = saved.sources[i].payload.size();
  const std::uint64_t columns = random.between(1, std::min<std::uint64_t>(nbytes, 9000));
  const std::uint64_t rows = nbytes / columns;
  const std::uint64_t r0 = random.below(rows);
  const std::uint64_t c0 = random.below(columns);
  ReadRegion region;
  region.src_offset = located.payload_offset + r0 * columns + c0;
  region.region.lengths = {random.between(1, rows - r0), random.between(1, columns - c0)};
  region.region.src_strides = {columns, 1};
  region.region.dst_strides = {region.region.lengths[1] + random.below(30), 1};
  region.fqn = saved.sources[i].fqn;
  return region;
}

void load_to_devices(RandomSource& random, const ScratchDir& dir, const Saved& saved,
                     Callers& callers) {
  ReadJob job(dir.fd(), dir.path(), {4, kSegmentBytes, random.chance(2), random.chance(2), 1, 0});
  const std::vector<LocatedItem> located = job.locate(saved.files, saved.wanted, {});
  std::vector<ReadRegion> regions;
  std::vector<std::vector<std::byte>> expected;
  std::vector<std::unique_ptr<DeviceMemory>> memories;
  for (std::size_t i = 0; i < saved.sources.size(); ++i) {
    const std::vector<std::byte>& payload = saved.sources[i].payload;
    CHECK_EQ(located[i].payload_bytes, payload.size());
    for (int box = 0; box < 2 && !payload.empty(); ++box) {
      ReadRegion region = random_box(random, saved, i, located[i]);
      if (box == 0) {
        region.src_offset = located[i].payload_offset;
        region.region = {payload.size(), {}, {}, {}};
      }
      const std::uint64_t nbytes = dcpx::plan::dst_span_bytes(region.region) + 8;
      expected.emplace_back(nbytes, kCanary);
      dcpx::plan::copy_region(region.region,
                              payload.data() + (region.src_offset - located[i].payload_offset),
                              expected.back().data());
      region.device = static_cast<int>(random.below(2));
      memories.push_back(std::make_unique<DeviceMemory>(region.device, nbytes));
      callers.write_later(region.device, *memories.back(), std::vector<std::byte>(nbytes, kCanary));
      region.dest = to_pointer(memories.back()->address());
      regions.push_back(std::move(region));
    }
  }
  const SourceEvents after = callers.events();
  job.read(regions, {}, &after);
  for (std::size_t r = 0; r < regions.size(); ++r) CHECK(memories[r]->read() == expected[r]);
}

TEST(items_on_devices_come_back_to_devices) {
  constexpr int kVersions[] = {12000, 12080, 13000};
  for (std::uint64_t round = 0; round < 6; ++round) {
    FakeDriver driver(round, kVersions[round % 3]);
    if (round % 2 == 1) dcpx::device::set_pack_image({});
    {
      RandomSource random(200 + round);
      const ScratchDir dir;
      Callers callers;
      const Saved saved = save_from_devices(random, dir, callers);
      load_to_devices(random, dir, saved, callers);
    }
    driver.check_clean();
  }
}

TEST(failed_copy_ends_both_jobs_with_its_tensors_name) {
  for (const char* entry : {"cuEventRecord", "cuStreamWaitEvent", "cuEventQuery"}) {
    FakeDriver driver(1);
    {
      RandomSource random(210);
      const ScratchDir dir;
      Callers callers;
      const Saved saved = save_from_devices(random, dir, callers);
      for (const std::int64_t nth : {3, 5, 9}) {     // behind those of the callers' events
        CHECK_EQ(fake_fail(entry, nth, 400, 0), 0);  // of a device that is well
        try {
          load_to_devices(random, dir, saved, callers);
        } catch (const dcpx::Error& error) {
          CHECK(error.code() == dcpx::ErrorCode::kStaging);
          CHECK_EQ(std::string(error.what()).rfind(entry, 0), 0U);
          CHECK(!error.fqn.empty());
        }
        fake_clear_failures();
      }
    }
    driver.check_clean();
  }
}

TEST(device_without_its_event_is_refused) {
  FakeDriver driver(1);
  {
    const ScratchDir dir;
    WriteJob job(dir.fd(), dir.path(), {2, kSegmentBytes, false, false});
    job.add_file({{"f"}, {}, 0});
    RandomSource random(220);
    Source source = random_source(random, 0, 0);
    while (source.is_bytes) source = random_source(random, 0, 0);
    std::vector<WriteItem> items{to_item(source)};
    items[0].device = 1;
    CHECK_THROWS(job.write(items, true, {}), dcpx::ErrorCode::kPlan);
    const SourceEvents after(std::vector<CallerStream>{{0, 0}});
    CHECK_THROWS(job.write(items, true, {}, &after), dcpx::ErrorCode::kPlan);
  }
  driver.check_clean();
}

}  // namespace
