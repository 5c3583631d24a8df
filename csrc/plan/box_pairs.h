// Which boxes of two sets meet, in any order and in little more time than it takes to name them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

namespace dcpx::plan {

// Boxes by where they begin and end along each dimension.
struct BoxEnds {
  const std::int64_t* begins = nullptr;  // [count x ndim]
  const std::int64_t* ends = nullptr;    // as `begins`
  std::size_t count = 0;
};

// Called with the numbers of two boxes that meet; returns whether it wants another pair.
using VisitPair = std::function<bool(std::uint32_t a, std::uint32_t b)>;

// Calls `visit` once with each pair of a box of `a` and one of `b` where, along every dimension,
// each begins before the other ends. Returns false where `visit` ended it.
//
// Two meet along a dimension where one of them begins inside the other. So along each dimension
// but the first, what begins is halved until a box holds all of a part: those pairs meet there
// whatever they do elsewhere, and only the dimensions before are asked. O(n log^(d-1) n + pairs)
// for the d dimensions along which the boxes are cut, however they lie; a sweep along one
// dimension alone compares boxes that another one keeps apart, up to n^2 of them.
//
// A box without elements meets those that it lies strictly inside of.
//
// REQUIRES: fewer than 2^32 boxes; ndim >= 1.
bool visit_meeting(std::size_t ndim, const BoxEnds& a, const BoxEnds& b, const VisitPair& visit);

}  // namespace dcpx::plan
