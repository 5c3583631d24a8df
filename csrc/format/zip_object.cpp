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
  append_records(out, pickle, pickle_bytes, pickle_crc);

  End end;
  end.entries = end.entries_on_disk = kSmallCount + 1;
  end.directory_offset = static_cast<std::uint32_t>(out.size());
  append_entries(out, pickle_bytes, pickle_crc);
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
