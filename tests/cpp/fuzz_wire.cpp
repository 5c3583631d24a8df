// Any bytes as a message between ranks: reading it throws Error(kPlan), or what is read lies
// inside.
#include <string_view>

#include "common/error.h"
#include "format/wire.h"
#include "fuzz.h"

namespace {

// Reads a column to its end, each time by another kind of read that its bytes choose.
void drain(dcpx::wire::Reader& column) {
  while (!column.is_done()) {
    const std::size_t left = column.left();
    const std::uint64_t value = column.get();
    switch (value % 4) {
      case 0:
        if (!column.is_done()) column.get_signed();
        break;
      case 1:
        if (column.get_text(value / 4).size() != value / 4) __builtin_trap();
        break;
      case 2:
        if (!column.is_done() && column.get_below(1 + value) > value) __builtin_trap();
        break;
      default:
        break;
    }
    if (column.left() >= left) __builtin_trap();
  }
}

}  // namespace

FUZZ(wire) {
  const std::string_view message(reinterpret_cast<const char*>(data), size);
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {
    try {
      std::vector<dcpx::wire::Reader> columns = dcpx::wire::split(message, count);
      std::size_t total = 0;
      for (const dcpx::wire::Reader& column : columns) total += column.left();
      if (columns.size() != count || total > size) __builtin_trap();
      for (dcpx::wire::Reader& column : columns) drain(column);
      dcpx::wire::check_done(columns);
    } catch (const dcpx::Error& error) {
      if (error.code() != dcpx::ErrorCode::kPlan) __builtin_trap();
    }
  }
}
