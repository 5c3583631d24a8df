// RangeJob: several jobs, four workers each, fill one file with boxes of a matrix, from memory in
// either order; every byte is where it belongs, and the shares of all jobs make up the CRC.
#include <cstring>

#include "check.h"
#include "engine/range_job.h"
#include "format/crc32.h"
#include "random_source.h"
#include "scratch_dir.h"

namespace {

using namespace dcpx::engine;
using dcpx::ErrorCode;

const dcpx::PollFunction kNoPoll = [] {};
constexpr std::uint64_t kOffset = 777;  // of the payload in the file

// A box of a matrix of `columns` elements a row, and the memory that it comes from.
struct Box {
  std::vector<std::byte> memory;
  RangeRow row;
};

Box box_of(const std::vector<std::byte>& matrix, std::uint64_t elem, std::uint64_t columns,
           std::uint64_t r0, std::uint64_t r1, std::uint64_t c0, std::uint64_t c1, bool is_turned) {
  const std::uint64_t rows = r1 - r0, width = c1 - c0;
  Box box;
  box.memory.resize(rows * width * elem);
  const std::uint64_t row_stride = is_turned ? elem : width * elem;
  const std::uint64_t column_stride = is_turned ? rows * elem : elem;
  for (std::uint64_t r = 0; r < rows; ++r)
    for (std::uint64_t c = 0; c < width; ++c)
      std::memcpy(box.memory.data() + r * row_stride + c * column_stride,
                  matrix.data() + ((r0 + r) * columns + c0 + c) * elem, elem);
  box.row.offset = kOffset + (r0 * columns + c0) * elem;
  box.row.region = {elem, {rows, width}, {row_stride, column_stride}, {columns * elem, elem}};
  box.row.source = box.memory.data();
  box.row.tag = 1;
  box.row.payload_end = kOffset + matrix.size();
  return box;
}

// The jobs' shares of a file meet within a page; with `is_direct` whole pages of long runs go past
// the page cache.
void fill_together(RandomSource& random, std::uint64_t elem, std::uint64_t columns,
                   bool is_direct) {
  const ScratchDir dir;
  const std::uint64_t rows = random.between(2, is_direct ? 9 : 300);
  const std::vector<std::byte> matrix = random.bytes(rows * columns * elem);
  const std::uint64_t r = random.between(1, rows - 1), c = random.between(1, columns - 1);
  const bool is_turned = random.chance(2);
  std::vector<Box> boxes;
  boxes.push_back(box_of(matrix, elem, columns, 0, r, 0, columns, random.chance(2)));
  boxes.push_back(box_of(matrix, elem, columns, r, rows, 0, c, is_turned));
  boxes.push_back(box_of(matrix, elem, columns, r, rows, c, columns, is_turned));
  const std::uint64_t file_bytes = kOffset + matrix.size() + 5;
  RangeJob first(dir.fd(), dir.path(), {4, 256 << 10, true, is_direct});
  RangeJob second(dir.fd(), dir.path(), {3, 128 << 10, is_direct, is_direct && random.chance(2)});
  first.add_file("f", file_bytes, true, kNoPoll);
  second.add_file("f", file_bytes, false, kNoPoll);
  first.write({boxes[0].row}, kNoPoll);
  second.write({boxes[1].row, boxes[2].row}, kNoPoll);
  const std::uint32_t crc = first.crc_shares()[1] ^ second.crc_shares()[1];
  CHECK_EQ(crc, dcpx::crc32(0, matrix.data(), matrix.size()));
  second.finish(false, kNoPoll);
  first.finish(true, kNoPoll);
  const std::vector<std::byte> found = dir.content("f");
  CHECK_EQ(found.size(), file_bytes);
  CHECK(std::memcmp(found.data() + kOffset, matrix.data(), matrix.size()) == 0);
  CHECK_EQ(first.report().written_bytes + second.report().written_bytes, matrix.size());
}

TEST(range_jobs_fill_a_file_together) {
  RandomSource random(41);
  for (int round = 0; round < 30; ++round) {
    const auto elem = random.pick<std::uint64_t>({1, 2, 4, 8});
    fill_together(random, elem, random.between(2, 3000), false);
  }
  for (int round = 0; round < 6; ++round)
    fill_together(random, 4, random.between(100'000, 400'000), true);
}

TEST(range_job_refuses_rows_that_reach_behind_their_file) {
  const ScratchDir dir;
  RangeJob job(dir.fd(), dir.path(), {2, 256 << 10, false});
  job.add_file("f", 100, true, kNoPoll);
  const std::vector<std::byte> bytes(64);
  RangeRow row;
  row.offset = 37;
  row.region.elem_bytes = 64;
  row.source = bytes.data();
  CHECK_THROWS(job.write({row}, kNoPoll), ErrorCode::kPlan);
  row.offset = 36;
  row.tag = 0;
  row.payload_end = 99;
  CHECK_THROWS(job.write({row}, kNoPoll), ErrorCode::kPlan);
  row.payload_end = 100;
  job.write({row}, kNoPoll);
  CHECK_THROWS(job.add_file("f", 100, true, kNoPoll), ErrorCode::kStorage);
  CHECK_THROWS(job.add_file("absent", 100, false, kNoPoll), ErrorCode::kStorage);
  job.finish(true, kNoPoll);
}

}  // namespace
