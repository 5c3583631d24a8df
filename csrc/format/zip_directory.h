// The table of contents of a zip item that somebody else wrote, read with suspicion: every number
// is checked against the item before it is used, and what the local headers say against what the
// central directory says, so that no two readers can see two different archives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/error.h"

namespace dcpx {

// Where the bytes of one item come from. Implementations need not be thread-safe.
class RangeReader {
 public:
  virtual ~RangeReader() = default;

  // Blocks. Fills `into` with the item's bytes [offset, offset + nbytes).
  // Throws Error(kStorage) or Error(kShortRead). REQUIRES: the range lies inside the item.
  virtual void read(std::uint64_t offset, std::size_t nbytes, std::byte* into) = 0;

  // What an error message calls the file, and where in it the item starts.
  virtual std::string_view path() const { return "item"; }
  virtual std::uint64_t origin() const { return 0; }
};

struct ZipRecord {
  std::string name;          // with the archive's folder: `archive/data.pkl`
  std::uint16_t method = 0;  // 0 is stored
  std::uint64_t offset = 0;  // of the payload, from the item's start
  std::uint64_t nbytes = 0;  // as stored
  std::uint32_t crc = 0;     // of the plain bytes, as the directory says; not verified
};

// Reads small pieces of an item with few reads: the end comes with the first one, and every miss
// reads ahead. Not thread-safe. REQUIRES: the reader outlives it.
class ItemReader {
 public:
  ItemReader(RangeReader& reader, std::uint64_t item_bytes);

  std::uint64_t item_bytes() const noexcept { return item_bytes_; }

  // Throws as RangeReader::read. REQUIRES: the range lies inside the item.
  void copy(std::uint64_t offset, std::size_t nbytes, std::byte* into);

  // corruption_error() for [offset, offset + nbytes) of the item, in the file's coordinates.
  [[nodiscard]] Error corrupt(std::uint64_t offset, std::uint64_t nbytes, std::string_view what,
                              std::string_view expected = {}, std::string_view found = {}) const;

 private:
  struct Window {
    std::uint64_t offset = 0;
    std::vector<std::byte> bytes;
  };
  void load(Window& window, std::uint64_t offset, std::uint64_t nbytes);
  static bool copy_from(const Window& window, std::uint64_t offset, std::size_t nbytes,
                        std::byte* into);

  RangeReader& reader_;
  std::uint64_t item_bytes_;
  Window tail_;
  Window recent_;
};

// All records in the directory's order. Compressed records are listed as well.
// Throws Error(kCorruption) where the item is no zip, is encrypted, spans disks, has a directory of
// more than 16 MiB, records that overlap or leave the item, duplicate names, or local headers and
// data descriptors that contradict the directory; and what the reader throws.
std::vector<ZipRecord> list_zip_records(ItemReader& item);
std::vector<ZipRecord> list_zip_records(RangeReader& reader, std::uint64_t item_bytes);

}  // namespace dcpx
