// The rows of torch_dcpx.writer.rows as the engine takes them.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <deque>
#include <vector>

#include "dcp/python.h"
#include "engine/write_job.h"

namespace dcpx {

// What one call of WriteJob.write works on.
struct WriteRows {
  std::vector<engine::WriteItem> items;
  PinnedBuffers buffers;
  std::deque<std::vector<std::byte>> archives;  // of rows that gave a pickle
};

// Fills `out` from a list of WriteRow and the list of ItemType that they refer to. REQUIRES: the
// GIL. Throws Error(kPlan) and what Python raises for values of another type.
void decode_write_rows(const pybind11::list& rows, const pybind11::list& types, WriteRows& out);

}  // namespace dcpx
