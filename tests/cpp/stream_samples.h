// Calls of a streamed WriteJob, and budgets as a save chooses them.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "engine/write_job.h"
#include "job_samples.h"
#include "upload_samples.h"

// What a streamed job may use, and the largest parts with which it never stands still: see
// WriteJob::make_queue_slots. torch_dcpx/storage/object_uploads.py has the same rule for more
// memory.
struct Budget {
  std::uint64_t memory_bytes = 0;
  std::uint64_t segment_bytes = 0;
  std::uint64_t part_bytes = 0;
};

inline Budget budget_of(std::uint64_t memory_bytes, std::uint64_t segment_bytes = kSegmentBytes) {
  const std::uint64_t slots = memory_bytes / 2 / segment_bytes;
  return {memory_bytes, segment_bytes, std::min((slots - 2) * segment_bytes / 2, memory_bytes / 4)};
}
inline constexpr std::uint64_t kLeastBytes = 8 * kSegmentBytes;

struct Shape {
  std::uint32_t files = 1;
  unsigned workers = 4;
  dcpx::engine::InPlace in_place = dcpx::engine::InPlace::kAuto;
};

// One save: the calls of write(), each with the items [begin, end) of the sources.
struct Calls {
  std::vector<Source> sources;
  std::vector<bool> is_lasting;
  std::vector<std::size_t> ends;

  bool has_temporary() const {
    return std::find(is_lasting.begin(), is_lasting.end(), false) != is_lasting.end();
  }
};

inline Source plain_source(RandomSource& random, std::uint32_t file, std::uint64_t nbytes,
                           std::uint64_t number) {
  Source source;
  source.file = file;
  source.fqn = "item" + std::to_string(number);
  source.memory = source.payload = random.bytes(nbytes);
  source.sizes = {static_cast<std::int64_t>(nbytes)};
  source.strides = {1};
  return source;
}

inline Calls random_calls(RandomSource& random, std::uint32_t files) {
  Calls calls;
  for (std::uint32_t f = 0; f < files; ++f) {
    const bool is_empty = random.chance(8);  // items without a byte
    for (std::uint64_t n = random.between(1, 9); n > 0; --n) {
      Source source = random_source(random, f, calls.sources.size());
      if (is_empty) {
        source = plain_source(random, f, 0, calls.sources.size());
        source.is_bytes = true;
      }
      calls.sources.push_back(std::move(source));
      calls.is_lasting.push_back(!random.chance(3));
    }
  }
  const std::size_t count = calls.sources.size();
  for (std::size_t end = 0; end < count && random.chance(2);) {
    end = random.between(end, count);
    while (random.chance(2) && end > 0 && end < count &&
           calls.sources[end].file == calls.sources[end - 1].file) {
      ++end;
    }
    calls.ends.push_back(end);
  }
  calls.ends.push_back(count);
  return calls;
}

inline dcpx::engine::WriteOptions options_of(const Budget& budget, const Shape& shape,
                                             bool is_streamed) {
  return {shape.workers,  budget.segment_bytes, false,      false, 1,
          shape.in_place, budget.memory_bytes,  is_streamed};
}

inline void add_files(dcpx::engine::WriteJob& job, std::uint32_t files) {
  for (std::uint32_t f = 0; f < files; ++f) {
    dcpx::FileId id{};
    id[0] = static_cast<std::byte>(f + 1);
    job.add_file({{"f" + std::to_string(f)}, id, 7, kSaveId});
  }
}

// What temporary items lie in means something else after each call.
inline void write_all(dcpx::engine::WriteJob& job, Calls& calls, const dcpx::PollFunction& poll,
                      Saved& saved, bool is_overwritten) {
  std::size_t begin = 0;
  for (std::size_t call = 0; call < calls.ends.size(); ++call) {
    std::vector<dcpx::engine::WriteItem> items;
    for (std::size_t i = begin; i < calls.ends[call]; ++i) {
      items.push_back(to_item(calls.sources[i]));
      items.back().is_lasting = calls.is_lasting[i];
    }
    job.write(items, call + 1 == calls.ends.size(), poll);
    for (std::size_t i = begin; i < calls.ends[call] && is_overwritten; ++i) {
      std::vector<std::byte>& memory = calls.sources[i].memory;
      if (!calls.is_lasting[i]) std::fill(memory.begin(), memory.end(), std::byte{0xEE});
    }
    for (const dcpx::engine::WriteItem& item : items) {
      saved.rows.push_back(item.row);
      saved.wanted.push_back({item.file, item.row.item_offset, item.row.item_bytes,
                              item.row.kind == dcpx::ItemKind::kTensor});
    }
    begin = calls.ends[call];
  }
  for (const dcpx::engine::FileResult& file : job.results()) {
    saved.files.push_back(
        {file.name, true, file.file_bytes, file.file_id, file.footer_crc, kSaveId});
  }
}

inline UploadOptions random_uploads(RandomSource& random) {
  UploadOptions options;
  options.threads = static_cast<unsigned>(random.between(1, 4));
  options.parts_at_once = random.pick<unsigned>({1, 2, 4, 16});
  options.is_pulled_ahead = random.chance(2);
  return options;
}
