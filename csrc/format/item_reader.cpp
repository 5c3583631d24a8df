#include <algorithm>

#include "format/zip_directory.h"

namespace dcpx {
namespace {

// Holds the directory and end records of a torch.save item (about 900 B), and its small records
// with the payload's local header (about 700 B).
constexpr std::uint64_t kWindowBytes = 4096;

}  // namespace

ItemReader::ItemReader(RangeReader& reader, std::uint64_t item_bytes)
    : reader_(reader), item_bytes_(item_bytes) {
  const bool is_small = item_bytes <= 2 * kWindowBytes;
  const std::uint64_t tail_bytes = is_small ? item_bytes : kWindowBytes;
  load(tail_, item_bytes - tail_bytes, tail_bytes);
}

void ItemReader::load(Window& window, std::uint64_t offset, std::uint64_t nbytes) {
  window.offset = offset;
  window.bytes.resize(static_cast<std::size_t>(nbytes));
  if (nbytes > 0) reader_.read(offset, window.bytes.size(), window.bytes.data());
}

bool ItemReader::copy_from(const Window& window, std::uint64_t offset, std::size_t nbytes,
                           std::byte* into) {
  if (offset < window.offset || offset - window.offset > window.bytes.size()) return false;
  const auto skip = static_cast<std::size_t>(offset - window.offset);
  if (nbytes > window.bytes.size() - skip) return false;
  std::copy_n(window.bytes.begin() + static_cast<std::ptrdiff_t>(skip), nbytes, into);
  return true;
}

void ItemReader::copy(std::uint64_t offset, std::size_t nbytes, std::byte* into) {
  if (nbytes == 0 || copy_from(tail_, offset, nbytes, into) ||
      copy_from(recent_, offset, nbytes, into)) {
    return;
  }
  if (nbytes > kWindowBytes) return reader_.read(offset, nbytes, into);
  load(recent_, offset, std::min(kWindowBytes, item_bytes_ - offset));
  copy_from(recent_, offset, nbytes, into);
}

Error ItemReader::corrupt(std::uint64_t offset, std::uint64_t nbytes, std::string_view what,
                          std::string_view expected, std::string_view found) const {
  const std::uint64_t start = std::min(offset, item_bytes_);  // hostile numbers may be anything
  return corruption_error(reader_.path(), static_cast<std::int64_t>(reader_.origin() + start),
                          static_cast<std::int64_t>(std::min(nbytes, item_bytes_ - start)), what,
                          expected, found);
}

}  // namespace dcpx
