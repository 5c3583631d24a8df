#include "format/zip_directory.h"

#include <algorithm>
#include <optional>

#include "format/zip_wire.h"

namespace dcpx {
namespace {

using namespace zip_wire;

constexpr std::uint64_t kMaxDirectoryBytes = 16 << 20;
constexpr std::uint64_t kMaxCommentSearch = 4096;

struct Directory {
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::uint64_t entries = 0;
};

// One central directory entry with its zip64 fields resolved.
struct Entry {
  std::string_view name;
  CentralHeader header;
  std::uint64_t stored_bytes = 0;
  std::uint64_t plain_bytes = 0;
  std::uint64_t local_offset = 0;
  bool is_zip64 = false;
};

struct Range {
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

std::string quoted(std::string_view name) { return "record '" + std::string(name) + "'"; }

std::uint64_t find_end(ItemReader& item) {
  const std::uint64_t nbytes = std::min(item.item_bytes(), kMaxCommentSearch);
  if (nbytes < sizeof(End)) throw item.corrupt(0, item.item_bytes(), "not a zip: too short");
  std::vector<std::byte> tail(static_cast<std::size_t>(nbytes));
  const std::uint64_t tail_offset = item.item_bytes() - nbytes;
  item.copy(tail_offset, tail.size(), tail.data());
  for (std::size_t at = tail.size() - sizeof(End) + 1; at-- > 0;) {
    const End end = load<End>(tail.data() + at);
    if (has_signature(end) && at + sizeof(End) + end.comment_bytes == tail.size()) {
      return tail_offset + at;
    }
  }
  throw item.corrupt(tail_offset, nbytes, "not a zip: no end record");
}

bool agrees(std::uint64_t narrow, std::uint64_t wide, std::uint64_t placeholder) {
  return narrow == wide || narrow == placeholder;
}

// Replaces the numbers of `directory` by those of the zip64 end record, if there is one, and
// returns where the end records begin.
std::uint64_t resolve_zip64_end(ItemReader& item, std::uint64_t end_offset, const End& end,
                                Directory* directory) {
  if (end_offset >= sizeof(Zip64Locator)) {
    const std::uint64_t locator_offset = end_offset - sizeof(Zip64Locator);
    std::byte raw[sizeof(Zip64End)];
    item.copy(locator_offset, sizeof(Zip64Locator), raw);
    const auto locator = load<Zip64Locator>(raw);
    if (has_signature(locator)) {
      const std::uint64_t end64_offset = locator.end_offset;
      if (locator_offset < sizeof(Zip64End) || end64_offset > locator_offset - sizeof(Zip64End)) {
        throw item.corrupt(locator_offset, sizeof(locator), "zip64 locator points out of the item");
      }
      item.copy(end64_offset, sizeof(raw), raw);
      const auto end64 = load<Zip64End>(raw);
      constexpr std::uint64_t kUncounted = sizeof(end64.signature) + sizeof(end64.rest_bytes);
      if (!has_signature(end64) || end64.rest_bytes != locator_offset - end64_offset - kUncounted ||
          end64.entries != end64.entries_on_disk || end64.disk != 0 || end64.directory_disk != 0 ||
          !agrees(end.entries, end64.entries, kEntriesIn64Bits) ||
          !agrees(end.directory_bytes, end64.directory_bytes, kIn64Bits) ||
          !agrees(end.directory_offset, end64.directory_offset, kIn64Bits)) {
        throw item.corrupt(end64_offset, sizeof(end64),
                           "zip64 end record contradicts the end record");
      }
      *directory = {end64.directory_offset, end64.directory_bytes, end64.entries};
      return end64_offset;
    }
  }
  if (end.entries == kEntriesIn64Bits || end.directory_bytes == kIn64Bits ||
      end.directory_offset == kIn64Bits) {
    throw item.corrupt(end_offset, sizeof(end), "zip64 end record is missing");
  }
  return end_offset;
}

Directory find_directory(ItemReader& item) {
  const std::uint64_t end_offset = find_end(item);
  std::byte raw[sizeof(End)];
  item.copy(end_offset, sizeof(raw), raw);
  const auto end = load<End>(raw);
  if (end.disk != 0 || end.directory_disk != 0 || end.entries != end.entries_on_disk) {
    throw item.corrupt(end_offset, sizeof(end), "zip spans several disks");
  }
  Directory directory{end.directory_offset, end.directory_bytes, end.entries};
  const std::uint64_t ends_at = resolve_zip64_end(item, end_offset, end, &directory);
  if (directory.offset > ends_at || directory.nbytes != ends_at - directory.offset) {
    throw item.corrupt(end_offset, sizeof(end),
                       "central directory does not end where the end record begins");
  }
  if (directory.nbytes > kMaxDirectoryBytes) {
    throw item.corrupt(directory.offset, directory.nbytes,
                       "central directory exceeds " + std::to_string(kMaxDirectoryBytes) + " B");
  }
  if (directory.entries == 0 || directory.entries > directory.nbytes / sizeof(CentralHeader)) {
    throw item.corrupt(end_offset, sizeof(end), "zip entry count does not fit its directory");
  }
  return directory;
}

// The content of the zip64 extra field, if there is one; nothing where the fields are malformed.
std::optional<std::string_view> zip64_extra(std::string_view extra) {
  std::string_view found;
  while (!extra.empty()) {
    if (extra.size() < sizeof(ExtraHeader)) return std::nullopt;
    const auto field = load<ExtraHeader>(reinterpret_cast<const std::byte*>(extra.data()));
    extra.remove_prefix(sizeof(ExtraHeader));
    if (field.nbytes > extra.size()) return std::nullopt;
    if (field.id == kZip64ExtraId) {
      if (!found.empty()) return std::nullopt;  // which of two would the next reader take?
      found = extra.substr(0, field.nbytes);
    }
    extra.remove_prefix(field.nbytes);
  }
  return found;
}

// Reads the next 64-bit value into `value` when the narrow field says that it is there.
bool widen(std::uint32_t narrow, std::string_view* extra, std::uint64_t* value) {
  *value = narrow;
  if (narrow != kIn64Bits) return true;
  if (extra->size() < sizeof(*value)) return false;
  std::memcpy(value, extra->data(), sizeof(*value));
  extra->remove_prefix(sizeof(*value));
  return true;
}

// Parses the entry at the front of `rest` and removes it; `rest` starts at item byte `offset`.
Entry take_entry(const ItemReader& item, std::uint64_t offset, std::string_view* rest) {
  Entry entry;
  if (rest->size() < sizeof(CentralHeader)) {
    throw item.corrupt(offset, rest->size(), "central directory ends inside an entry");
  }
  entry.header = load<CentralHeader>(reinterpret_cast<const std::byte*>(rest->data()));
  const CentralHeader& header = entry.header;
  const std::size_t nbytes = sizeof(CentralHeader) + header.name_bytes + header.extra_bytes +
                             std::size_t{header.comment_bytes};
  if (!has_signature(header) || nbytes > rest->size() || header.name_bytes == 0) {
    throw item.corrupt(offset, rest->size(), "central directory entry is malformed");
  }
  entry.name = rest->substr(sizeof(CentralHeader), header.name_bytes);
  const auto extra =
      zip64_extra(rest->substr(sizeof(CentralHeader) + header.name_bytes, header.extra_bytes));
  rest->remove_prefix(nbytes);
  std::string_view wide = extra.value_or(std::string_view{});
  if (!extra || !widen(header.plain_bytes, &wide, &entry.plain_bytes) ||
      !widen(header.stored_bytes, &wide, &entry.stored_bytes) ||
      !widen(header.local_offset, &wide, &entry.local_offset) || header.disk != 0) {
    throw item.corrupt(offset, nbytes, quoted(entry.name) + " has malformed zip64 fields");
  }
  entry.is_zip64 = !extra->empty();
  if ((header.flags & kEncryptedFlags) != 0) {
    throw item.corrupt(offset, nbytes, quoted(entry.name) + " is encrypted");
  }
  if (header.method == 0 && entry.stored_bytes != entry.plain_bytes) {
    throw item.corrupt(offset, nbytes, quoted(entry.name) + " is stored, yet of two sizes");
  }
  return entry;
}

// Where a data descriptor follows, the local header may leave sizes and CRC open.
bool local_agrees(const LocalHeader& local, const Entry& entry, std::uint64_t stored_bytes,
                  std::uint64_t plain_bytes) {
  if (local.method != entry.header.method || (local.flags & kEncryptedFlags) != 0 ||
      ((local.flags ^ entry.header.flags) & kHasDescriptorFlag) != 0) {
    return false;
  }
  const bool may_be_open = (local.flags & kHasDescriptorFlag) != 0;
  const auto same = [may_be_open](std::uint64_t here, std::uint64_t there) {
    return here == there || (may_be_open && (here == 0 || here == kIn64Bits));
  };
  return same(local.crc, entry.header.crc) && same(stored_bytes, entry.stored_bytes) &&
         same(plain_bytes, entry.plain_bytes);
}

// Checks the local header and returns the payload's offset. `limit` is the directory's offset.
std::uint64_t check_local_header(ItemReader& item, const Entry& entry, std::uint64_t limit) {
  if (limit < sizeof(LocalHeader) || entry.local_offset > limit - sizeof(LocalHeader)) {
    throw item.corrupt(0, limit, quoted(entry.name) + " starts out of the item");
  }
  std::byte raw[sizeof(LocalHeader)];
  item.copy(entry.local_offset, sizeof(raw), raw);
  const auto local = load<LocalHeader>(raw);
  const std::uint64_t name_offset = entry.local_offset + sizeof(LocalHeader);
  const std::uint64_t rest_bytes = std::uint64_t{local.name_bytes} + local.extra_bytes;
  const auto contradiction = [&] {
    return item.corrupt(entry.local_offset, sizeof(LocalHeader) + rest_bytes,
                        "local header of " + quoted(entry.name) + " contradicts the directory");
  };
  if (!has_signature(local) || local.name_bytes != entry.name.size() ||
      rest_bytes > limit - name_offset) {
    throw contradiction();
  }
  // The extra field may be 64 KiB of padding: it is read only where it says something.
  const bool is_open = (local.flags & kHasDescriptorFlag) != 0;
  const bool has_wide =
      !is_open && (local.stored_bytes == kIn64Bits || local.plain_bytes == kIn64Bits);
  std::string rest(has_wide ? static_cast<std::size_t>(rest_bytes) : entry.name.size(), '\0');
  item.copy(name_offset, rest.size(), reinterpret_cast<std::byte*>(rest.data()));
  std::uint64_t plain_bytes = local.plain_bytes;
  std::uint64_t stored_bytes = local.stored_bytes;
  if (has_wide) {
    const auto extra = zip64_extra(std::string_view(rest).substr(entry.name.size()));
    std::string_view wide = extra.value_or(std::string_view{});
    if (!extra || !widen(local.plain_bytes, &wide, &plain_bytes) ||
        !widen(local.stored_bytes, &wide, &stored_bytes)) {
      throw contradiction();
    }
  }
  if (rest.compare(0, entry.name.size(), entry.name) != 0 ||
      !local_agrees(local, entry, stored_bytes, plain_bytes)) {
    throw contradiction();
  }
  return name_offset + rest_bytes;
}

// Checks the data descriptor, if any, and returns where the record ends.
std::uint64_t check_descriptor(ItemReader& item, const Entry& entry, std::uint64_t offset,
                               std::uint64_t limit) {
  if (entry.stored_bytes > limit - offset) {
    throw item.corrupt(offset, entry.stored_bytes, quoted(entry.name) + " ends out of the item");
  }
  const std::uint64_t end = offset + entry.stored_bytes;
  if ((entry.header.flags & kHasDescriptorFlag) == 0) return end;
  const std::size_t nbytes = entry.is_zip64 ? sizeof(Zip64Descriptor) : sizeof(Descriptor);
  bool agrees = nbytes <= limit - end;
  if (agrees) {
    std::byte raw[sizeof(Zip64Descriptor)];
    item.copy(end, nbytes, raw);
    Zip64Descriptor found;
    if (entry.is_zip64) {
      found = load<Zip64Descriptor>(raw);
    } else {
      const auto narrow = load<Descriptor>(raw);
      found = {narrow.signature, narrow.crc, narrow.stored_bytes, narrow.plain_bytes};
    }
    agrees = has_signature(found) && found.crc == entry.header.crc &&
             found.stored_bytes == entry.stored_bytes && found.plain_bytes == entry.plain_bytes;
  }
  if (!agrees) {
    throw item.corrupt(end, nbytes,
                       "data descriptor of " + quoted(entry.name) + " contradicts the directory");
  }
  return end + nbytes;
}

void check_no_overlap(const ItemReader& item, std::vector<Range>& ranges) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].begin < ranges[i - 1].end) {
      throw item.corrupt(ranges[i].begin, ranges[i - 1].end - ranges[i].begin,
                         "two records of the zip overlap");
    }
  }
}

// By sorting: names chosen to collide in a hash table cost no more than others.
void check_no_duplicate(const ItemReader& item, const Directory& directory,
                        const std::vector<ZipRecord>& records) {
  std::vector<std::string_view> names;
  for (const ZipRecord& record : records) names.push_back(record.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) {
    throw item.corrupt(directory.offset, directory.nbytes, quoted(*twin) + " comes twice");
  }
}

}  // namespace

std::vector<ZipRecord> list_zip_records(ItemReader& item) {
  const Directory directory = find_directory(item);
  std::string raw(static_cast<std::size_t>(directory.nbytes), '\0');
  item.copy(directory.offset, raw.size(), reinterpret_cast<std::byte*>(raw.data()));

  std::vector<ZipRecord> records;
  std::vector<Range> ranges;
  std::string_view rest = raw;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    const std::uint64_t entry_offset = directory.offset + directory.nbytes - rest.size();
    const Entry entry = take_entry(item, entry_offset, &rest);
    const std::uint64_t offset = check_local_header(item, entry, directory.offset);
    ranges.push_back({entry.local_offset, check_descriptor(item, entry, offset, directory.offset)});
    records.push_back({std::string(entry.name), entry.header.method, offset, entry.stored_bytes,
                       entry.header.crc});
  }
  if (!rest.empty()) {
    throw item.corrupt(directory.offset, directory.nbytes,
                       "central directory holds more than its entries");
  }
  check_no_overlap(item, ranges);
  check_no_duplicate(item, directory, records);
  return records;
}

std::vector<ZipRecord> list_zip_records(RangeReader& reader, std::uint64_t item_bytes) {
  ItemReader item(reader, item_bytes);
  return list_zip_records(item);
}

}  // namespace dcpx
