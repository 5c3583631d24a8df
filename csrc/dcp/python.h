// Values of Python's that many calls take: texts, tuples of ints, memory.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/region_copy.h"

namespace dcpx {

// UTF-8 of a str; lone surrogates, which a key may hold, pass as they do in a pickle.
std::string to_string(const pybind11::handle& value);

// Appends the ints of a sequence and returns how many. Throws what Python raises for anything else.
std::size_t append_ints(const pybind11::handle& values, std::vector<std::int64_t>* out);

// The ints of a sequence, as `append_ints` takes them.
std::vector<std::int64_t> int_tuple(const pybind11::handle& values);
// The same, of lengths or strides. Throws Error(kPlan) for a negative one.
std::vector<std::uint64_t> unsigned_tuple(const pybind11::handle& values);
// The region in fields 2 to 5 of a row: bytes of an element, lengths, strides of source and
// destination. Throws where these differ in number.
plan::Region row_region(const pybind11::handle& row);
pybind11::tuple to_tuple(const std::vector<std::int64_t>& values);

// Buffers that must stay exported while workers use their memory. Give it back with the GIL held.
class PinnedBuffers {
 public:
  PinnedBuffers() = default;
  PinnedBuffers(const PinnedBuffers&) = delete;
  PinnedBuffers& operator=(const PinnedBuffers&) = delete;
  ~PinnedBuffers();

  // `source` is an address (int) with `nbytes` valid bytes behind it, or an object with a
  // contiguous buffer, whose size replaces `nbytes`. Throws what Python raises.
  std::byte* add(const pybind11::handle& source, bool is_writable, std::uint64_t& nbytes);

 private:
  std::vector<Py_buffer> views_;
};

}  // namespace dcpx
