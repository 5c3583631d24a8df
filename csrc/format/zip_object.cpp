#include "format/zip_object.h"

#include <cstring>

#include "common/error.h"
#include "format/zip_records.h"

namespace dcpx {
namespace {

using namespace zip_records;
using namespace zip_wire;

constexpr std::uint64_t kMaxPickleBytes = 1 << 30;  // far below what would need zip64

}  // namespace

std::uint64_t object_zip_overhead() noexcept {
  std::uint64_t nbytes = sizeof(End);
  const auto add = [&](std::string_view name, std::uint64_t content_bytes) {
    nbytes += sizeof(LocalHeader) + sizeof(CentralHeader) + 2 * name.size() + content_bytes;
  };
  add(kPickleName, 0);
  for (const SmallRecord& record : kSmallRecords) add(record.name, record.content.size());
  return nbytes;
}

std::vector<std::byte> object_zip(const std::byte* pickle, std::uint64_t nbytes) {
  DCPX_CHECK(nbytes <= kMaxPickleBytes, "a pickle of " + std::to_string(nbytes) + " B");
  std::vector<std::byte> out;
  out.reserve(static_cast<std::size_t>(nbytes + object_zip_overhead()));
  const auto pickle_bytes = static_cast<std::uint32_t>(nbytes);
  const std::uint32_t pickle_crc = crc32(0, pickle, static_cast<std::size_t>(nbytes));
  append_small(out, kPickleName, pickle_crc, pickle_bytes);
  out.insert(out.end(), pickle, pickle + nbytes);
  for (std::size_t i = 0; i < kSmallCount; ++i) {
    const SmallRecord& record = kSmallRecords[i];
    append_small(out, record.name, small_crcs()[i],
                 static_cast<std::uint32_t>(record.content.size()));
    put_bytes(out, record.content);
  }

  End end;
  end.entries = end.entries_on_disk = kSmallCount + 1;
  end.directory_offset = static_cast<std::uint32_t>(out.size());
  append_entry(out, kPickleName, pickle_crc, pickle_bytes, 0);
  std::uint64_t offset = pickle_head_bytes(nbytes);
  for (std::size_t i = 0; i < kSmallCount; ++i) {
    const SmallRecord& record = kSmallRecords[i];
    const auto content_bytes = static_cast<std::uint32_t>(record.content.size());
    append_entry(out, record.name, small_crcs()[i], content_bytes, offset);
    offset += sizeof(LocalHeader) + record.name.size() + content_bytes;
  }
  end.directory_bytes = static_cast<std::uint32_t>(out.size()) - end.directory_offset;
  append(out, end);
  return out;
}

const std::byte* find_object_pickle(const std::byte* archive, std::uint64_t nbytes,
                                    std::uint64_t& pickle_bytes) {
  static const std::uint64_t overhead = object_zip_overhead();
  if (nbytes < overhead || nbytes - overhead > kMaxPickleBytes) return nullptr;
  pickle_bytes = nbytes - overhead;
  const std::byte* const pickle = archive + pickle_head_bytes(0);
  const std::vector<std::byte> expected = object_zip(pickle, pickle_bytes);
  return std::memcmp(archive, expected.data(), expected.size()) == 0 ? pickle : nullptr;
}

}  // namespace dcpx
