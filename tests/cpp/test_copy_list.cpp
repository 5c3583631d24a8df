// Which copies become one.
#include "check.h"
#include "device/copy_list.h"
#include "region_samples.h"

namespace {

using dcpx::device::CopyList;
using dcpx::device::Direction;
using dcpx::device::Piece;

constexpr auto kNoBorder = [](std::uint64_t) { return false; };

BytePairs pairs_of(const std::vector<Piece>& pieces) {
  BytePairs pairs;
  for (const Piece& piece : pieces) {
    for (std::uint64_t b = 0; b < piece.nbytes; ++b)
      pairs.emplace_back(piece.dst + b, piece.src + b);
  }
  std::sort(pairs.begin(), pairs.end());
  return pairs;
}

TEST(copies_that_touch_on_both_sides_are_one_in_any_order_of_adding) {
  RandomSource random(3);
  for (int round = 0; round < 200; ++round) {
    std::vector<Piece> pieces;
    std::uint64_t dst = 1000;
    std::uint64_t src = 500000;
    std::size_t gaps = 0;
    const std::uint64_t count = random.between(1, 30);
    for (std::uint64_t i = 0; i < count; ++i) {
      const std::uint64_t nbytes = random.between(1, 50);
      pieces.push_back({Direction::kToHost, dst, src, nbytes});
      dst += nbytes;
      src += nbytes;
      const std::uint64_t gap = i + 1 < count ? random.below(4) : 0;
      if ((gap & 1) != 0) dst += 7;
      if ((gap & 2) != 0) src += 9;
      gaps += gap != 0 ? 1 : 0;
    }
    const BytePairs wanted = pairs_of(pieces);
    std::shuffle(pieces.begin(), pieces.end(), random.engine());
    CopyList list;
    for (const Piece& piece : pieces) list.add(piece.direction, piece.dst, piece.src, piece.nbytes);
    const CopyList::Batch batch = list.take(kNoBorder);
    CHECK_EQ(batch.pieces.size(), gaps + 1);
    CHECK(pairs_of(batch.pieces) == wanted);
    CHECK(list.empty());
  }
}

TEST(copies_of_two_directions_or_over_a_border_of_allocations_stay_apart) {
  CopyList list;
  list.add(Direction::kToHost, 100, 1000, 10);
  list.add(Direction::kToDevice, 110, 1010, 10);
  CHECK_EQ(list.take(kNoBorder).pieces.size(), 2U);
  list.add(Direction::kToHost, 100, 1000, 10);
  list.add(Direction::kToHost, 110, 1010, 10);
  list.add(Direction::kToHost, 120, 1020, 10);
  const auto batch = list.take([](std::uint64_t address) { return address == 1020; });
  CHECK_EQ(batch.pieces.size(), 2U);
  CHECK_EQ(batch.pieces[0].nbytes, 20U);
}

TEST(the_driver_is_asked_for_borders_of_the_devices_side_only_where_copies_touch) {
  CopyList list;
  std::vector<std::uint64_t> asked;
  list.add(Direction::kToDevice, 1000, 100, 10);
  list.add(Direction::kToDevice, 1010, 110, 10);
  list.add(Direction::kToDevice, 1030, 130, 10);
  list.take([&](std::uint64_t address) {
    asked.push_back(address);
    return false;
  });
  CHECK(asked == std::vector<std::uint64_t>{1010});
}

TEST(regions_without_gaps_are_pieces_and_those_without_elements_nothing) {
  CopyList list;
  list.add(Direction::kToHost, {4, {3, 5}, {20, 4}, {20, 4}}, 100, 1000);
  list.add(Direction::kToHost, {4, {3, 0}, {20, 4}, {20, 4}}, 300, 3000);
  list.add(Direction::kToHost, 400, 4000, 0);
  list.add(Direction::kToHost, {4, {3, 4}, {20, 4}, {16, 4}}, 500, 5000);
  const auto batch = list.take(kNoBorder);
  CHECK_EQ(batch.pieces.size(), 1U);
  CHECK_EQ(batch.pieces[0].nbytes, 60U);
  CHECK_EQ(batch.boxes.size(), 1U);
  CHECK_EQ(batch.boxes[0].region.elem_bytes, 16U);
}

}  // namespace
