// Random items for WriteJob, and what must be in the files that it writes.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "engine/read_job.h"
#include "engine/write_job.h"
#include "random_source.h"
#include "scratch_dir.h"

inline constexpr std::uint64_t kSegmentBytes = 256 << 10;
inline const dcpx::TensorFraming kByteFraming{"torch", "ByteStorage", ""};

// One item, the memory that it comes from, and what must be in the file.
struct Source {
  std::uint32_t file = 0;
  bool is_bytes = false;
  std::vector<std::byte> memory;
  std::uint64_t phase = 0;  // first byte of `memory` that counts
  std::vector<std::int64_t> sizes, strides;
  bool is_dense = true;
  std::vector<std::byte> payload;
  std::string fqn;
};

inline Source random_source(RandomSource& random, std::uint32_t file, std::uint64_t number) {
  Source source;
  source.file = file;
  source.fqn = "item" + std::to_string(number);
  source.is_bytes = random.chance(4);
  source.phase = random.below(4096);
  const std::uint64_t nbytes =
      random.pick<std::uint64_t>({0, 5, 4096, 65536, 65537, 300'000, 900'001, random.below(9000)});
  if (source.is_bytes || !random.chance(3)) {
    source.memory = random.bytes(source.phase + nbytes);
    source.payload.assign(source.memory.begin() + static_cast<std::ptrdiff_t>(source.phase),
                          source.memory.end());
    source.sizes = {static_cast<std::int64_t>(nbytes)};
    source.strides = {1};
    return source;
  }
  // A transposed matrix with room between its rows, 300 rows at most.
  const std::uint64_t rows = random.between(2, 300);
  const std::uint64_t columns = nbytes / rows + 2;
  source.is_dense = false;
  source.memory = random.bytes(source.phase + columns * (rows + 3));
  source.sizes = {static_cast<std::int64_t>(rows), static_cast<std::int64_t>(columns)};
  source.strides = {1, static_cast<std::int64_t>(rows + 3)};
  for (std::uint64_t r = 0; r < rows; ++r) {
    for (std::uint64_t c = 0; c < columns; ++c) {
      source.payload.push_back(source.memory[source.phase + r + c * (rows + 3)]);
    }
  }
  return source;
}

inline dcpx::engine::WriteItem to_item(const Source& source) {
  dcpx::engine::WriteItem item;
  item.file = source.file;
  item.source = source.memory.data() + source.phase;
  item.is_dense = source.is_dense;
  item.row.fqn = source.fqn;
  item.row.payload_bytes = source.payload.size();
  if (source.is_bytes) {
    item.row.kind = dcpx::ItemKind::kBytes;
    return item;
  }
  item.row.sizes = item.row.global_sizes = source.sizes;
  item.row.offsets.assign(source.sizes.size(), 0);
  item.row.strides = source.strides;
  if (!source.is_dense) {
    for (std::size_t d = 0; d < 2; ++d) {
      item.gather.lengths.push_back(static_cast<std::uint64_t>(source.sizes[d]));
      item.gather.src_strides.push_back(static_cast<std::uint64_t>(source.strides[d]));
      item.gather.dst_strides.push_back(0);
    }
    item.row.strides = {source.sizes[1], 1};
  }
  item.zip.emplace(dcpx::ZipItemSpec{&kByteFraming, item.row.sizes, item.row.strides,
                                     item.row.payload_bytes, 1});
  return item;
}

constexpr dcpx::SaveId kSaveId{std::byte{3}, std::byte{5}};

struct Saved {
  std::vector<Source> sources;
  std::vector<dcpx::engine::StoredFileSpec> files;
  std::vector<dcpx::engine::WantedItem> wanted;
  std::vector<dcpx::IndexRow> rows;
};

// Writes `files` files of random items in `windows` calls.
inline Saved save_random(RandomSource& random, const ScratchDir& dir, std::uint32_t files,
                         std::uint32_t windows, bool use_direct,
                         const dcpx::PollFunction& poll = {}) {
  Saved saved;
  std::vector<std::uint32_t> order;
  for (std::uint32_t i = 0; i < 8 * files; ++i) order.push_back(i / 8);
  // Durable where the page cache is used: that path writes back as it goes.
  const auto files_at_once = static_cast<unsigned>(random.between(1, files + 1));
  using dcpx::engine::InPlace;
  const auto in_place = random.pick<InPlace>({InPlace::kAuto, InPlace::kAlways, InPlace::kNever});
  dcpx::engine::WriteJob job(dir.fd(), dir.path(),
                             {4, kSegmentBytes, use_direct, !use_direct, files_at_once, in_place});
  for (std::uint32_t f = 0; f < files; ++f) {
    dcpx::FileId id{};
    id[0] = static_cast<std::byte>(f + 1);
    CHECK_EQ(job.add_file({{"f" + std::to_string(f)}, id, 7, kSaveId}), f);
  }
  for (const std::uint32_t file : order) {
    saved.sources.push_back(random_source(random, file, saved.sources.size()));
  }
  std::size_t begin = 0;
  for (std::uint32_t w = 0; w < windows; ++w) {
    const bool is_final = w + 1 == windows;
    const std::size_t end =
        is_final ? order.size() : random.between(begin, begin + (order.size() - begin) / 2);
    std::vector<dcpx::engine::WriteItem> items;
    for (std::size_t i = begin; i < end; ++i) items.push_back(to_item(saved.sources[i]));
    job.write(items, is_final, poll);
    for (const dcpx::engine::WriteItem& item : items) {
      saved.rows.push_back(item.row);
      saved.wanted.push_back({item.file, item.row.item_offset, item.row.item_bytes,
                              item.row.kind == dcpx::ItemKind::kTensor});
    }
    begin = end;
  }
  for (const dcpx::engine::FileResult& file : job.results()) {
    saved.files.push_back(
        {file.name, true, file.file_bytes, file.file_id, file.footer_crc, kSaveId});
  }
  CHECK_EQ(saved.files.size(), files);
  CHECK_EQ(job.created().size(), files);
  const dcpx::engine::WriteReport report = job.report();
  CHECK(report.slot_bytes <= 4 * kSegmentBytes);
  CHECK_EQ(report.done_bytes, report.total_bytes);
  return saved;
}
