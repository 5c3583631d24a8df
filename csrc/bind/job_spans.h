// What a job's workers did, as Python takes it: rows of 32 B, packed.
#pragma once

#include <pybind11/pybind11.h>

#include "common/spans.h"

namespace dcpx {

template <typename Row>
pybind11::bytes packed(const std::vector<Row>& rows) {
  return {reinterpret_cast<const char*>(rows.data()), rows.size() * sizeof(Row)};
}

inline void add_spans(const SpanLog& log, pybind11::dict& report) {
  report["spans"] = packed(log.spans());
  report["busy"] = packed(log.sums());
}

}  // namespace dcpx
