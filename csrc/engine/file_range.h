// An item of a file as the zip parser wants it: offsets from the item's start.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "format/zip_directory.h"
#include "io/file.h"

namespace dcpx::engine {

// Keeps of an object both ends of an item, where a zip's records lie, and what follows: behind the
// end of an item the next one begins. Throws as InputFile::keep().
inline void keep_zip_ends(io::InputFile& file, std::uint64_t offset, std::uint64_t nbytes) {
  static constexpr std::uint64_t kEndBytes = 8 << 10;
  static constexpr std::uint64_t kAheadBytes = 248 << 10;
  const std::uint64_t count = std::min(nbytes, kEndBytes);
  file.keep(offset, count, kAheadBytes);
  file.keep(offset + nbytes - count, count, kAheadBytes);
}

class FileRange : public RangeReader {  // Not thread-safe. REQUIRES: `file` outlives this.
 public:
  FileRange(const io::InputFile& file, std::uint64_t begin) : file_(file), begin_(begin) {}
  void read(std::uint64_t offset, std::size_t nbytes, std::byte* into) override {
    file_.read_at(into, nbytes, begin_ + offset);
  }
  std::string_view path() const override { return file_.path(); }
  std::uint64_t origin() const override { return begin_; }

 private:
  const io::InputFile& file_;
  std::uint64_t begin_;
};

}  // namespace dcpx::engine
