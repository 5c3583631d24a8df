// The records that every archive of ours holds beside a tensor's payload, and how they are framed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/bytes.h"
#include "format/crc32.h"
#include "format/zip_wire.h"

namespace dcpx::zip_records {

inline constexpr std::string_view kPickleName = "archive/data.pkl";

struct SmallRecord {
  std::string_view name;
  std::string_view content;
};
inline constexpr SmallRecord kSmallRecords[] = {
    {"archive/.format_version", "1"},
    {"archive/.storage_alignment", "64"},
    {"archive/byteorder", "little"},
    {"archive/version", "3\n"},
};
inline constexpr std::size_t kSmallCount = std::size(kSmallRecords);

inline const std::array<std::uint32_t, kSmallCount>& small_crcs() noexcept {
  static const auto crcs = [] {
    std::array<std::uint32_t, kSmallCount> sums{};
    for (std::size_t i = 0; i < kSmallCount; ++i) {
      const std::string_view content = kSmallRecords[i].content;
      sums[i] = crc32(0, reinterpret_cast<const std::byte*>(content.data()), content.size());
    }
    return sums;
  }();
  return crcs;
}

inline std::uint64_t pickle_head_bytes(std::uint64_t pickle_bytes) {
  return sizeof(zip_wire::LocalHeader) + kPickleName.size() + pickle_bytes;
}

// A local header whose content, of known checksum, follows directly.
inline void append_small(std::vector<std::byte>& out, std::string_view name, std::uint32_t crc,
                         std::uint32_t nbytes) {
  zip_wire::LocalHeader header;
  header.crc = crc;
  header.stored_bytes = header.plain_bytes = nbytes;
  header.name_bytes = static_cast<std::uint16_t>(name.size());
  zip_wire::append(out, header);
  put_bytes(out, name);
}

// The same record's entry in the central directory.
inline void append_entry(std::vector<std::byte>& out, std::string_view name, std::uint32_t crc,
                         std::uint32_t nbytes, std::uint64_t local_offset) {
  zip_wire::CentralHeader header;
  header.crc = crc;
  header.stored_bytes = header.plain_bytes = nbytes;
  header.name_bytes = static_cast<std::uint16_t>(name.size());
  header.local_offset = static_cast<std::uint32_t>(local_offset);
  zip_wire::append(out, header);
  put_bytes(out, name);
}

// The records of an archive from its start up to the payload's, with their contents.
inline void append_records(std::vector<std::byte>& out, const std::byte* pickle,
                           std::uint32_t pickle_bytes, std::uint32_t pickle_crc) {
  append_small(out, kPickleName, pickle_crc, pickle_bytes);
  out.insert(out.end(), pickle, pickle + pickle_bytes);
  for (std::size_t i = 0; i < kSmallCount; ++i) {
    const SmallRecord& record = kSmallRecords[i];
    append_small(out, record.name, small_crcs()[i],
                 static_cast<std::uint32_t>(record.content.size()));
    put_bytes(out, record.content);
  }
}

// Their entries in the central directory. Returns where the record behind them begins.
inline std::uint64_t append_entries(std::vector<std::byte>& out, std::uint32_t pickle_bytes,
                                    std::uint32_t pickle_crc) {
  append_entry(out, kPickleName, pickle_crc, pickle_bytes, 0);
  std::uint64_t offset = pickle_head_bytes(pickle_bytes);
  for (std::size_t i = 0; i < kSmallCount; ++i) {
    const SmallRecord& record = kSmallRecords[i];
    append_entry(out, record.name, small_crcs()[i],
                 static_cast<std::uint32_t>(record.content.size()), offset);
    offset += sizeof(zip_wire::LocalHeader) + record.name.size() + record.content.size();
  }
  return offset;
}

}  // namespace dcpx::zip_records
