#include "format/zip_item.h"

#include <array>
#include <string_view>

#include "common/bytes.h"
#include "format/crc32.h"
#include "format/zip_wire.h"

namespace dcpx {
namespace {

using namespace zip_wire;

constexpr std::string_view kPickleName = "archive/data.pkl";
constexpr std::string_view kPayloadName = "archive/data/0";

struct SmallRecord {
  std::string_view name;
  std::string_view content;
};
constexpr SmallRecord kSmallRecords[] = {
    {"archive/.format_version", "1"},
    {"archive/.storage_alignment", "64"},
    {"archive/byteorder", "little"},
    {"archive/version", "3\n"},
};
constexpr std::size_t kSmallCount = std::size(kSmallRecords);
constexpr std::uint16_t kEntries = kSmallCount + 2;

constexpr std::uint64_t kSmallHeadBytes = [] {
  std::uint64_t sum = 0;
  for (const SmallRecord& record : kSmallRecords) {
    sum += sizeof(LocalHeader) + record.name.size() + record.content.size();
  }
  return sum;
}();
constexpr std::uint64_t kDirectoryBytes = [] {  // without zip64 fields
  std::uint64_t sum = 2 * sizeof(CentralHeader) + kPickleName.size() + kPayloadName.size();
  for (const SmallRecord& record : kSmallRecords) sum += sizeof(CentralHeader) + record.name.size();
  return sum;
}();

const std::array<std::uint32_t, kSmallCount>& small_crcs() noexcept {
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

std::uint64_t pickle_head_bytes(std::uint64_t pickle_bytes) {
  return sizeof(LocalHeader) + kPickleName.size() + pickle_bytes;
}

bool needs_zip64(std::uint64_t value) { return value >= kIn64Bits; }

void append_small(std::vector<std::byte>& out, std::string_view name, std::uint32_t crc,
                  std::uint32_t nbytes) {
  LocalHeader header;
  header.crc = crc;
  header.stored_bytes = header.plain_bytes = nbytes;
  header.name_bytes = static_cast<std::uint16_t>(name.size());
  append(out, header);
  put_bytes(out, name);
}

void append_entry(std::vector<std::byte>& out, std::string_view name, std::uint32_t crc,
                  std::uint32_t nbytes, std::uint64_t local_offset) {
  CentralHeader header;
  header.crc = crc;
  header.stored_bytes = header.plain_bytes = nbytes;
  header.name_bytes = static_cast<std::uint16_t>(name.size());
  header.local_offset = static_cast<std::uint32_t>(local_offset);
  append(out, header);
  put_bytes(out, name);
}

void append_descriptor(std::vector<std::byte>& out, std::uint32_t crc, std::uint64_t nbytes) {
  if (needs_zip64(nbytes)) {
    append(out, Zip64Descriptor{Zip64Descriptor{}.signature, crc, nbytes, nbytes});
  } else if (nbytes > 0) {
    const auto narrow = static_cast<std::uint32_t>(nbytes);
    append(out, Descriptor{Descriptor{}.signature, crc, narrow, narrow});
  }
}

void append_payload_entry(std::vector<std::byte>& out, std::uint32_t crc, std::uint64_t nbytes,
                          std::uint64_t local_offset) {
  CentralHeader header;
  header.flags = nbytes > 0 ? kHasDescriptorFlag : std::uint16_t{0};
  header.crc = crc;
  header.stored_bytes = header.plain_bytes = static_cast<std::uint32_t>(nbytes);
  header.name_bytes = static_cast<std::uint16_t>(kPayloadName.size());
  header.local_offset = static_cast<std::uint32_t>(local_offset);
  if (needs_zip64(nbytes)) {
    header.version_made = header.version_needed = kVersionZip64;
    header.stored_bytes = header.plain_bytes = kIn64Bits;
    header.extra_bytes = sizeof(Zip64Extra);
  }
  append(out, header);
  put_bytes(out, kPayloadName);
  if (needs_zip64(nbytes)) {
    Zip64Extra extra;
    extra.plain_bytes = extra.stored_bytes = nbytes;
    append(out, extra);
  }
}

void append_ends(std::vector<std::byte>& out, std::uint64_t directory_offset,
                 std::uint64_t directory_bytes) {
  End end;
  end.entries = end.entries_on_disk = kEntries;
  end.directory_bytes = static_cast<std::uint32_t>(directory_bytes);
  end.directory_offset = static_cast<std::uint32_t>(directory_offset);
  if (needs_zip64(directory_offset)) {
    Zip64End end64;
    end64.entries = end64.entries_on_disk = kEntries;
    end64.directory_bytes = directory_bytes;
    end64.directory_offset = directory_offset;
    append(out, end64);
    Zip64Locator locator;
    locator.end_offset = directory_offset + directory_bytes;
    append(out, locator);
    end.directory_offset = kIn64Bits;
  }
  append(out, end);
}

void check_pad(std::uint64_t pad_bytes) {
  DCPX_CHECK(
      pad_bytes == 0 || (pad_bytes >= ZipItem::kMinPadBytes && pad_bytes <= ZipItem::kMaxPadBytes),
      "zip padding of " + std::to_string(pad_bytes) + " B does not fit an extra field");
}

// Elements from the first to one behind the last that the view touches.
std::uint64_t reach_elems(const ZipItemSpec& spec) {
  std::uint64_t last = 0;
  for (std::size_t dim = 0; dim < spec.sizes.size(); ++dim) {
    DCPX_CHECK(spec.sizes[dim] >= 0 && spec.strides[dim] >= 0, "negative size or stride");
    if (spec.sizes[dim] == 0) return 0;
    last = checked_add(last, checked_mul(static_cast<std::uint64_t>(spec.sizes[dim] - 1),
                                         static_cast<std::uint64_t>(spec.strides[dim])));
  }
  return checked_add(last, 1);
}

}  // namespace

ZipItem::ZipItem(const ZipItemSpec& spec) : payload_bytes_(spec.payload_bytes) {
  DCPX_CHECK(spec.framing != nullptr && spec.elem_bytes > 0, "a tensor item without a dtype");
  DCPX_CHECK(spec.sizes.size() == spec.strides.size(), "a tensor needs one stride for every size");
  DCPX_CHECK(spec.payload_bytes % spec.elem_bytes == 0,
             "the payload is no whole number of elements");
  DCPX_CHECK(spec.payload_bytes <= INT64_MAX, "the payload exceeds what torch can address");
  DCPX_CHECK(
      checked_mul(reach_elems(spec), spec.elem_bytes) <= spec.payload_bytes,
      "sizes and strides reach beyond a payload of " + std::to_string(spec.payload_bytes) + " B");
  const std::uint64_t storage_numel =
      spec.framing->is_untyped() ? spec.payload_bytes : spec.payload_bytes / spec.elem_bytes;
  pickle_.reserve(256);
  append_tensor_pickle(*spec.framing, storage_numel, spec.sizes, spec.strides, pickle_);
  pickle_crc_ = crc32(0, pickle_.data(), pickle_.size());
}

std::uint64_t ZipItem::head_bytes() const noexcept {
  const std::uint64_t zip64_bytes = needs_zip64(payload_bytes_) ? sizeof(Zip64Extra) : 0;
  return pickle_head_bytes(pickle_.size()) + kSmallHeadBytes + sizeof(LocalHeader) +
         kPayloadName.size() + zip64_bytes;
}

std::uint64_t ZipItem::descriptor_bytes() const noexcept {
  if (payload_bytes_ == 0) return 0;  // torch writes none either
  return needs_zip64(payload_bytes_) ? sizeof(Zip64Descriptor) : sizeof(Descriptor);
}

std::uint64_t ZipItem::directory_offset(std::uint64_t pad_bytes) const {
  check_pad(pad_bytes);
  return checked_add(head_bytes() + pad_bytes + descriptor_bytes(), payload_bytes_);
}

std::uint64_t ZipItem::tail_bytes(std::uint64_t pad_bytes) const {
  std::uint64_t nbytes = descriptor_bytes() + kDirectoryBytes + sizeof(End);
  if (needs_zip64(payload_bytes_)) nbytes += sizeof(Zip64Extra);
  if (needs_zip64(directory_offset(pad_bytes))) nbytes += sizeof(Zip64End) + sizeof(Zip64Locator);
  return nbytes;
}

std::uint64_t ZipItem::item_bytes(std::uint64_t pad_bytes) const {
  return directory_offset(pad_bytes) - descriptor_bytes() + tail_bytes(pad_bytes);
}

void ZipItem::append_head(std::uint64_t pad_bytes, std::vector<std::byte>& out) const {
  check_pad(pad_bytes);
  append_small(out, kPickleName, pickle_crc_, static_cast<std::uint32_t>(pickle_.size()));
  out.insert(out.end(), pickle_.begin(), pickle_.end());
  for (std::size_t i = 0; i < kSmallCount; ++i) {
    const SmallRecord& record = kSmallRecords[i];
    append_small(out, record.name, small_crcs()[i],
                 static_cast<std::uint32_t>(record.content.size()));
    put_bytes(out, record.content);
  }

  // The CRC is unknown until the payload has been read, so APPNOTE 4.4.4 asks for zeros here.
  LocalHeader header;
  const bool is_zip64 = needs_zip64(payload_bytes_);
  header.flags = payload_bytes_ > 0 ? kHasDescriptorFlag : std::uint16_t{0};
  header.name_bytes = static_cast<std::uint16_t>(kPayloadName.size());
  header.extra_bytes = static_cast<std::uint16_t>(pad_bytes + (is_zip64 ? sizeof(Zip64Extra) : 0));
  if (is_zip64) {
    header.version_needed = kVersionZip64;
    header.stored_bytes = header.plain_bytes = kIn64Bits;
  }
  append(out, header);
  put_bytes(out, kPayloadName);
  if (is_zip64) append(out, Zip64Extra{});
  if (pad_bytes > 0) {
    const std::uint64_t fill_bytes = pad_bytes - sizeof(ExtraHeader);
    append(out, ExtraHeader{kPaddingExtraId, static_cast<std::uint16_t>(fill_bytes)});
    out.insert(out.end(), fill_bytes, std::byte{'Z'});
  }
}

void ZipItem::append_tail(std::uint64_t pad_bytes, std::uint32_t payload_crc,
                          std::vector<std::byte>& out) const {
  const std::uint64_t directory_at = directory_offset(pad_bytes);
  append_descriptor(out, payload_crc, payload_bytes_);

  const std::size_t directory_start = out.size();
  append_entry(out, kPickleName, pickle_crc_, static_cast<std::uint32_t>(pickle_.size()), 0);
  std::uint64_t offset = pickle_head_bytes(pickle_.size());
  for (std::size_t i = 0; i < kSmallCount; ++i) {
    const SmallRecord& record = kSmallRecords[i];
    append_entry(out, record.name, small_crcs()[i],
                 static_cast<std::uint32_t>(record.content.size()), offset);
    offset += sizeof(LocalHeader) + record.name.size() + record.content.size();
  }
  append_payload_entry(out, payload_crc, payload_bytes_, offset);
  append_ends(out, directory_at, out.size() - directory_start);
}

}  // namespace dcpx
