// Data files as a save writes them, of one item each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "format/crc32.h"
#include "format/file_footer.h"
#include "random_source.h"

// Returns a file with one item of random bytes, named `fqn`, and its footer.
inline std::vector<std::byte> file_with_footer(RandomSource& random, const std::string& fqn,
                                               std::uint64_t nbytes) {
  std::vector<std::byte> data = random.bytes(nbytes);
  std::vector<std::uint32_t> blocks;
  for (std::uint64_t at = 0; at < nbytes; at += dcpx::kBlockBytes) {
    const std::uint64_t count = std::min(nbytes - at, dcpx::kBlockBytes);
    blocks.push_back(dcpx::crc32(0, data.data() + at, count));
  }
  dcpx::IndexRow row;
  row.kind = dcpx::ItemKind::kBytes;
  row.item_bytes = row.payload_bytes = nbytes;
  row.fqn = fqn;
  std::vector<std::byte> index;
  dcpx::append_row(row, index);
  dcpx::Tail tail;
  tail.data_bytes = nbytes;
  const std::vector<std::byte> footer = dcpx::encode_footer(index, 1, blocks, tail);
  data.resize(tail.index_offset);
  data.insert(data.end(), footer.begin(), footer.end());
  return data;
}
