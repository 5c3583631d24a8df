#include "format/zip_item.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <string_view>

#include "common/bytes.h"
#include "format/crc32.h"
#include "format/zip_records.h"
#include "format/zip_wire.h"

namespace dcpx {
namespace {

using namespace zip_records;
using namespace zip_wire;

constexpr std::string_view kPayloadName = "archive/data/0";
constexpr std::uint16_t kEntries = kSmallCount + 2;

bool needs_zip64(std::uint64_t value) { return value >= kIn64Bits; }

// The CRC stays zero here and below: write_tail() puts it in.
void append_descriptor(std::vector<std::byte>& out, std::uint64_t nbytes) {
  if (needs_zip64(nbytes)) {
    append(out, Zip64Descriptor{Zip64Descriptor{}.signature, 0, nbytes, nbytes});
  } else if (nbytes > 0) {  // torch writes none for an empty payload either
    const auto narrow = static_cast<std::uint32_t>(nbytes);
    append(out, Descriptor{Descriptor{}.signature, 0, narrow, narrow});
  }
}

void append_payload_entry(std::vector<std::byte>& out, std::uint64_t nbytes,
                          std::uint64_t local_offset) {
  CentralHeader header;
  header.flags = nbytes > 0 ? kHasDescriptorFlag : std::uint16_t{0};
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

// Writes the end records and returns what is behind them.
std::byte* write_ends(std::byte* to, std::uint64_t directory_offset,
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
    to = store(to, end64);
    Zip64Locator locator;
    locator.end_offset = directory_offset + directory_bytes;
    to = store(to, locator);
    end.directory_offset = kIn64Bits;
  }
  return store(to, end);
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

// The local header of data/0, without padding. The payload's CRC is unknown until the payload has
// been read, so APPNOTE 4.4.4 asks for zeros.
void append_payload_header(std::vector<std::byte>& out, std::uint64_t payload_bytes) {
  LocalHeader header;
  const bool is_zip64 = needs_zip64(payload_bytes);
  header.flags = payload_bytes > 0 ? kHasDescriptorFlag : std::uint16_t{0};
  header.name_bytes = static_cast<std::uint16_t>(kPayloadName.size());
  if (is_zip64) {
    header.version_needed = kVersionZip64;
    header.stored_bytes = header.plain_bytes = kIn64Bits;
    header.extra_bytes = sizeof(Zip64Extra);
  }
  append(out, header);
  put_bytes(out, kPayloadName);
  if (is_zip64) append(out, Zip64Extra{});
}

}  // namespace

ZipItem::ZipItem(const ZipItemSpec& spec) {
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
  std::vector<std::byte> pickle;
  append_tensor_pickle(*spec.framing, storage_numel, spec.sizes, spec.strides, pickle);

  auto made = std::make_shared<Template>();
  made->payload_bytes = spec.payload_bytes;
  const auto pickle_bytes = static_cast<std::uint32_t>(pickle.size());
  const std::uint32_t pickle_crc = crc32(0, pickle.data(), pickle.size());
  append_records(made->head, pickle.data(), pickle_bytes, pickle_crc);
  append_payload_header(made->head, spec.payload_bytes);
  append_descriptor(made->tail, spec.payload_bytes);
  made->descriptor_bytes = made->tail.size();
  append_payload_entry(made->tail, spec.payload_bytes,
                       append_entries(made->tail, pickle_bytes, pickle_crc));
  made->head.shrink_to_fit();
  made->tail.shrink_to_fit();
  template_ = std::move(made);
}

std::uint64_t ZipItem::directory_offset(std::uint64_t pad_bytes) const {
  check_pad(pad_bytes);
  return checked_add(head_bytes() + pad_bytes + template_->descriptor_bytes, payload_bytes());
}

std::uint64_t ZipItem::tail_bytes(std::uint64_t pad_bytes) const {
  const std::uint64_t nbytes = template_->tail.size() + sizeof(End);
  if (!needs_zip64(directory_offset(pad_bytes))) return nbytes;
  return nbytes + sizeof(Zip64End) + sizeof(Zip64Locator);
}

std::uint64_t ZipItem::item_bytes(std::uint64_t pad_bytes) const {
  return directory_offset(pad_bytes) - template_->descriptor_bytes + tail_bytes(pad_bytes);
}

void ZipItem::write_head(std::uint64_t pad_bytes, std::byte* to) const {
  check_pad(pad_bytes);
  const std::vector<std::byte>& head = template_->head;
  std::memcpy(to, head.data(), head.size());
  if (pad_bytes == 0) return;
  const std::uint64_t zip64_bytes = needs_zip64(payload_bytes()) ? sizeof(Zip64Extra) : 0;
  std::byte* header = to + head.size() - zip64_bytes - kPayloadName.size() - sizeof(LocalHeader);
  const auto extra_bytes = static_cast<std::uint16_t>(pad_bytes + zip64_bytes);
  store(header + offsetof(LocalHeader, extra_bytes), extra_bytes);
  const std::uint64_t fill_bytes = pad_bytes - sizeof(ExtraHeader);
  to =
      store(to + head.size(), ExtraHeader{kPaddingExtraId, static_cast<std::uint16_t>(fill_bytes)});
  std::memset(to, 'Z', fill_bytes);
}

void ZipItem::write_tail(std::uint64_t pad_bytes, std::uint32_t payload_crc, std::byte* to) const {
  const std::uint64_t directory_at = directory_offset(pad_bytes);
  const std::vector<std::byte>& tail = template_->tail;
  std::memcpy(to, tail.data(), tail.size());
  if (template_->descriptor_bytes > 0) store(to + offsetof(Descriptor, crc), payload_crc);
  const std::uint64_t zip64_bytes = needs_zip64(payload_bytes()) ? sizeof(Zip64Extra) : 0;
  std::byte* entry = to + tail.size() - zip64_bytes - kPayloadName.size() - sizeof(CentralHeader);
  store(entry + offsetof(CentralHeader, crc), payload_crc);
  write_ends(to + tail.size(), directory_at, tail.size() - template_->descriptor_bytes);
}

ZipItem ZipItemCache::make(const TensorFraming& framing, const std::vector<std::int64_t>& sizes,
                           const std::vector<std::int64_t>& strides, std::uint64_t payload_bytes,
                           std::uint64_t elem_bytes) {
  // Before the look-up: no two specs may share a key.
  DCPX_CHECK(sizes.size() == strides.size(), "a tensor needs one stride for every size");
  key_.framing = &framing;
  key_.payload_bytes = payload_bytes;
  key_.elem_bytes = elem_bytes;
  key_.dims.assign(sizes.begin(), sizes.end());
  key_.dims.insert(key_.dims.end(), strides.begin(), strides.end());
  const auto found = items_.find(key_);
  if (found != items_.end()) return found->second;
  const ZipItem item(ZipItemSpec{&framing, sizes, strides, payload_bytes, elem_bytes});
  if (items_.size() < kMaxTemplates) items_.emplace(key_, item);
  return item;
}

bool ZipItemCache::Key::operator==(const Key& other) const noexcept {
  return framing == other.framing && payload_bytes == other.payload_bytes &&
         elem_bytes == other.elem_bytes && dims == other.dims;
}

std::size_t ZipItemCache::Hash::operator()(const Key& key) const noexcept {
  std::uint64_t hash = reinterpret_cast<std::uintptr_t>(key.framing) ^ key.elem_bytes;
  const auto mix = [&hash](std::uint64_t value) {  // Fibonacci hashing, one value after the other
    hash = (hash ^ value) * 0x9E3779B97F4A7C15;
    hash ^= hash >> 32;
  };
  mix(key.payload_bytes);
  for (const std::int64_t dim : key.dims) mix(static_cast<std::uint64_t>(dim));
  return static_cast<std::size_t>(hash);
}

}  // namespace dcpx
