// The records of a zip file as they lie on disk (PKWARE's APPNOTE.TXT, sections 4.3 and 4.5), one
// packed struct each, for the writer and the parser alike. Little-endian, as all of our files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

namespace dcpx::zip_wire {

constexpr std::uint32_t kIn64Bits = 0xFFFFFFFF;  // this field's value stands in a zip64 record
constexpr std::uint16_t kEntriesIn64Bits = 0xFFFF;
constexpr std::uint16_t kEncryptedFlags = 0x2041;  // classic, strong, masked local headers
constexpr std::uint16_t kHasDescriptorFlag = 0x8;  // CRC and sizes follow the payload
constexpr std::uint16_t kVersionPlain = 20;        // "version needed to extract": 2.0
constexpr std::uint16_t kVersionZip64 = 45;        // 4.5
constexpr std::uint16_t kFirstDay = (1 << 5) | 1;  // 1980-01-01, the oldest date zip can say
constexpr std::uint16_t kZip64ExtraId = 1;
constexpr std::uint16_t kPaddingExtraId = 'F' | ('B' << 8);  // torch.save's padding

#pragma pack(push, 1)

struct LocalHeader {  // followed by name and extra fields, then the payload
  std::uint32_t signature = 0x04034b50;
  std::uint16_t version_needed = kVersionPlain;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint16_t time = 0;
  std::uint16_t date = kFirstDay;
  std::uint32_t crc = 0;
  std::uint32_t stored_bytes = 0;
  std::uint32_t plain_bytes = 0;
  std::uint16_t name_bytes = 0;
  std::uint16_t extra_bytes = 0;
};

struct CentralHeader {  // followed by name, extra fields and comment
  std::uint32_t signature = 0x02014b50;
  std::uint16_t version_made = kVersionPlain;
  std::uint16_t version_needed = kVersionPlain;
  std::uint16_t flags = 0;
  std::uint16_t method = 0;
  std::uint16_t time = 0;
  std::uint16_t date = kFirstDay;
  std::uint32_t crc = 0;
  std::uint32_t stored_bytes = 0;
  std::uint32_t plain_bytes = 0;
  std::uint16_t name_bytes = 0;
  std::uint16_t extra_bytes = 0;
  std::uint16_t comment_bytes = 0;
  std::uint16_t disk = 0;
  std::uint16_t internal_attributes = 0;
  std::uint32_t external_attributes = 0;
  std::uint32_t local_offset = 0;
};

struct ExtraHeader {  // followed by `nbytes` bytes
  std::uint16_t id = 0;
  std::uint16_t nbytes = 0;
};

struct Zip64Extra {  // holds only the fields that are kIn64Bits, in this order
  ExtraHeader header{kZip64ExtraId, 16};
  std::uint64_t plain_bytes = 0;
  std::uint64_t stored_bytes = 0;
};

struct Descriptor {  // behind the payload where kHasDescriptorFlag is set
  std::uint32_t signature = 0x08074b50;
  std::uint32_t crc = 0;
  std::uint32_t stored_bytes = 0;
  std::uint32_t plain_bytes = 0;
};

struct Zip64Descriptor {
  std::uint32_t signature = 0x08074b50;
  std::uint32_t crc = 0;
  std::uint64_t stored_bytes = 0;
  std::uint64_t plain_bytes = 0;
};

struct Zip64End {
  std::uint32_t signature = 0x06064b50;
  std::uint64_t rest_bytes = 44;  // of this record, behind this field
  std::uint16_t version_made = kVersionZip64;
  std::uint16_t version_needed = kVersionZip64;
  std::uint32_t disk = 0;
  std::uint32_t directory_disk = 0;
  std::uint64_t entries_on_disk = 0;
  std::uint64_t entries = 0;
  std::uint64_t directory_bytes = 0;
  std::uint64_t directory_offset = 0;
};

struct Zip64Locator {  // directly before End
  std::uint32_t signature = 0x07064b50;
  std::uint32_t end_disk = 0;
  std::uint64_t end_offset = 0;
  std::uint32_t disks = 1;
};

struct End {  // followed by a comment, then nothing
  std::uint32_t signature = 0x06054b50;
  std::uint16_t disk = 0;
  std::uint16_t directory_disk = 0;
  std::uint16_t entries_on_disk = 0;
  std::uint16_t entries = 0;
  std::uint32_t directory_bytes = 0;
  std::uint32_t directory_offset = 0;
  std::uint16_t comment_bytes = 0;
};

#pragma pack(pop)

static_assert(sizeof(LocalHeader) == 30 && sizeof(CentralHeader) == 46 && sizeof(End) == 22);
static_assert(sizeof(Zip64Extra) == 20 && sizeof(Zip64End) == 56 && sizeof(Zip64Locator) == 20);
static_assert(sizeof(Descriptor) == 16 && sizeof(Zip64Descriptor) == 24);

template <typename Record>
void append(std::vector<std::byte>& out, const Record& record) {
  const auto* raw = reinterpret_cast<const std::byte*>(&record);
  out.insert(out.end(), raw, raw + sizeof(Record));
}

// Returns what is behind the record. REQUIRES: sizeof(Record) writable bytes at `to`.
template <typename Record>
std::byte* store(std::byte* to, const Record& record) {
  std::memcpy(to, &record, sizeof(Record));
  return to + sizeof(Record);
}

// REQUIRES: sizeof(Record) readable bytes at `from`.
template <typename Record>
Record load(const std::byte* from) {
  Record record;
  std::memcpy(&record, from, sizeof(Record));
  return record;
}

template <typename Record>
bool has_signature(const Record& record) {
  return record.signature == Record{}.signature;
}

}  // namespace dcpx::zip_wire
