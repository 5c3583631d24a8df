#include "engine/stored_file.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/bytes.h"
#include "engine/file_check.h"
#include "engine/file_range.h"
#include "format/crc32.h"

namespace dcpx::engine {
namespace {

constexpr std::uint64_t kMaxFileBytes = std::uint64_t{1} << 62;

std::string hex(const FileId& id) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (const std::byte byte : id) {
    text += kDigits[std::to_integer<unsigned>(byte) >> 4];
    text += kDigits[std::to_integer<unsigned>(byte) & 15];
  }
  return text;
}

// A file that is shorter than its metadata says may be damage, or a node's late view of it.
Error shorter(const io::InputFile& file, std::uint64_t wanted, const char* least) {
  Error error(ErrorCode::kShortRead, "'" + file.path() + "' is shorter than its metadata says: " +
                                         std::to_string(file.size_bytes()) + " B of " + least +
                                         std::to_string(wanted) + " B");
  error.path = file.path();
  error.sys_errno = EIO;
  error.offset = static_cast<std::int64_t>(file.size_bytes());
  error.nbytes = static_cast<std::int64_t>(wanted - file.size_bytes());
  return error;
}

}  // namespace

void StoredFile::open(const InputFolder& folder) {
  file_ = folder.open(spec_.path);
  const std::uint64_t size = file_.size_bytes();
  if (was_opened_) {
    if (file_.inode() == inode_ && size == size_bytes_) return;
    throw corruption_error(file_.path(), 0, static_cast<std::int64_t>(size),
                           "the file was replaced while it was read");
  }
  if (spec_.is_ours) {
    if (size < spec_.file_bytes) throw shorter(file_, spec_.file_bytes, "");
    if (size > spec_.file_bytes) {
      throw corruption_error(file_.path(), 0, static_cast<std::int64_t>(size),
                             "the file is longer than its metadata says: of another save",
                             std::to_string(spec_.file_bytes) + " B", std::to_string(size) + " B");
    }
    if (size < kTailBytes) {
      throw corruption_error(file_.path(), 0, static_cast<std::int64_t>(size),
                             "no room for a footer");
    }
    std::byte raw[kTailBytes];
    file_.read_at(raw, kTailBytes, size - kTailBytes);
    tail_ = parse_tail(raw, size, file_.path());
    if (tail_.file_id != spec_.file_id || tail_.tail_crc != spec_.footer_crc) {
      throw corruption_error(file_.path(), static_cast<std::int64_t>(size - kTailBytes),
                             static_cast<std::int64_t>(kTailBytes),
                             "the file belongs to another save than the metadata",
                             "file id " + hex(spec_.file_id), "file id " + hex(tail_.file_id));
    }
    if (is_hollow_footer(file_, tail_)) {
      throw corruption_error(file_.path(), static_cast<std::int64_t>(tail_.index_offset),
                             static_cast<std::int64_t>(size - tail_.index_offset), kHollowFooter);
    }
    const bool has_both = spec_.save_id != SaveId{} && tail_.save_id != SaveId{};
    if (has_both && tail_.save_id != spec_.save_id) {
      throw corruption_error(file_.path(), static_cast<std::int64_t>(size - kTailBytes),
                             static_cast<std::int64_t>(kTailBytes),
                             "the file is of another save than the metadata that names it",
                             "save id " + hex(spec_.save_id), "save id " + hex(tail_.save_id));
    }
  }
  inode_ = file_.inode();
  size_bytes_ = size;
  was_opened_ = true;
}

void StoredFile::locate(const std::vector<WantedItem>& wanted,
                        const std::vector<std::uint32_t>& indices, bool keeps_end,
                        std::vector<LocatedItem>& located) {
  refuse_overlaps(wanted, indices);
  if (!spec_.is_ours) {
    std::vector<std::uint32_t> ordered = indices;  // neighbours of an object are read together
    std::sort(ordered.begin(), ordered.end(), [&](std::uint32_t a, std::uint32_t b) {
      return wanted[a].offset < wanted[b].offset;
    });
    for (const std::uint32_t i : ordered) located[i] = locate_foreign(wanted[i]);
    file_.forget();
    return;
  }
  file_.keep(tail_.index_offset, tail_.index_bytes);
  std::vector<std::byte> raw(static_cast<std::size_t>(tail_.index_bytes));
  file_.read_at(raw.data(), raw.size(), tail_.index_offset);
  const std::uint32_t crc = crc32(0, raw.data(), raw.size());
  if (crc != tail_.index_crc) {
    throw corruption_error(file_.path(), static_cast<std::int64_t>(tail_.index_offset),
                           static_cast<std::int64_t>(tail_.index_bytes), "index checksum",
                           std::to_string(tail_.index_crc), std::to_string(crc));
  }
  keeps_end ? file_.forget_all_but_end() : file_.forget();
  std::vector<IndexRow> rows =
      parse_index(raw.data(), raw.size(), tail_.item_count, tail_.data_bytes, file_.path());
  std::sort(rows.begin(), rows.end(), [](const IndexRow& a, const IndexRow& b) {
    return a.item_offset != b.item_offset ? a.item_offset < b.item_offset
                                          : a.item_bytes < b.item_bytes;
  });
  for (const std::uint32_t i : indices) {
    const WantedItem& want = wanted[i];
    auto row = std::lower_bound(
        rows.begin(), rows.end(), want, [](const IndexRow& a, const WantedItem& b) {
          return a.item_offset != b.offset ? a.item_offset < b.offset : a.item_bytes < b.nbytes;
        });
    const bool is_found = row != rows.end() && row->item_offset == want.offset &&
                          row->item_bytes == want.nbytes &&
                          (row->kind == ItemKind::kBytes) == !want.is_tensor;
    if (!is_found) {
      throw corruption_error(file_.path(), static_cast<std::int64_t>(want.offset),
                             static_cast<std::int64_t>(want.nbytes),
                             "the metadata names an item that the file's index does not");
    }
    LocatedItem& out = located[i];
    out.kind = row->kind == ItemKind::kTensor  ? LocatedKind::kPlain
               : row->kind == ItemKind::kBytes ? LocatedKind::kBytes
                                               : LocatedKind::kTorch;
    out.payload_offset = row->payload_offset;
    out.payload_bytes = row->payload_bytes;
    out.sizes = row->sizes;
    out.strides = row->strides;
    out.dtype = row->dtype;
  }
}

// Two names may be one item, as of tied weights; two items share no byte.
void StoredFile::refuse_overlaps(const std::vector<WantedItem>& wanted,
                                 const std::vector<std::uint32_t>& indices) const {
  std::vector<std::pair<std::uint64_t, std::uint64_t>> ranges;  // offset, bytes
  ranges.reserve(indices.size());
  for (const std::uint32_t i : indices) {
    if (wanted[i].nbytes > 0) ranges.emplace_back(wanted[i].offset, wanted[i].nbytes);
  }
  if (!std::is_sorted(ranges.begin(), ranges.end())) std::sort(ranges.begin(), ranges.end());
  for (std::size_t r = 1; r < ranges.size(); ++r) {
    const auto& [offset, nbytes] = ranges[r];
    const auto& [before, before_nbytes] = ranges[r - 1];
    if (offset - before >= before_nbytes || ranges[r] == ranges[r - 1]) continue;
    throw corruption_error(
        file_.path(), static_cast<std::int64_t>(offset), static_cast<std::int64_t>(nbytes),
        "the metadata puts this item on bytes of the one at offset " + std::to_string(before) +
            ", which has " + std::to_string(before_nbytes) + " B");
  }
}

LocatedItem StoredFile::locate_foreign(const WantedItem& wanted) {
  if (wanted.offset > size_bytes_ || wanted.nbytes > size_bytes_ - wanted.offset) {
    const std::uint64_t end = wanted.offset + wanted.nbytes;
    if (end >= wanted.offset && end <= kMaxFileBytes) throw shorter(file_, end, "at least ");
    throw corruption_error(file_.path(), static_cast<std::int64_t>(wanted.offset),
                           static_cast<std::int64_t>(wanted.nbytes),
                           "the metadata names bytes that no file has");
  }
  LocatedItem out;
  out.payload_offset = wanted.offset;
  out.payload_bytes = wanted.nbytes;
  if (!wanted.is_tensor) return out;
  out.kind = LocatedKind::kTorch;
  keep_zip_ends(file_, wanted.offset, wanted.nbytes);
  FileRange reader(file_, wanted.offset);
  ParsedTensor parsed;
  if (parse_zip_item(reader, wanted.nbytes, &parsed) == ZipShape::kOther) return out;
  out.kind = LocatedKind::kPlain;
  out.payload_offset = wanted.offset + parsed.payload_offset;
  out.payload_bytes = parsed.payload_bytes;
  out.storage_offset = static_cast<std::uint64_t>(parsed.storage_offset);
  out.sizes = std::move(parsed.sizes);
  out.strides = std::move(parsed.strides);
  out.storage_name = std::move(parsed.storage_name);
  out.dtype_name = std::move(parsed.dtype_name);
  out.is_big_endian = parsed.is_big_endian;
  return out;
}

void StoredFile::load_blocks(std::uint64_t first, std::uint64_t last) {
  DCPX_CHECK(first <= last && last < tail_.block_count, "blocks outside of the file's data");
  const std::uint64_t first_page = first / kPageEntries;
  const std::uint64_t last_page = last / kPageEntries;
  const std::uint64_t checks_bytes = 4 * tail_.page_count();
  file_.keep(tail_.table_offset + 4 * first_page * kPageEntries,
             tail_.page_checks_offset() + checks_bytes - tail_.table_offset -
                 4 * first_page * kPageEntries);
  std::vector<std::byte> checks(static_cast<std::size_t>(checks_bytes));
  file_.read_at(checks.data(), checks_bytes, tail_.page_checks_offset());
  if (crc32(0, checks.data(), checks.size()) != tail_.page_checks_crc) {
    throw corruption_error(file_.path(), static_cast<std::int64_t>(tail_.page_checks_offset()),
                           static_cast<std::int64_t>(checks_bytes), "checksum of the page checks");
  }
  const std::uint64_t begin = first_page * kPageEntries;
  const std::uint64_t end = std::min((last_page + 1) * kPageEntries, tail_.block_count);
  std::vector<std::byte> raw(static_cast<std::size_t>(4 * (end - begin)));
  file_.read_at(raw.data(), raw.size(), tail_.table_offset + 4 * begin);
  for (std::uint64_t page = first_page; page <= last_page; ++page) {
    const std::uint64_t at = 4 * (page * kPageEntries - begin);
    const std::uint64_t nbytes = std::min<std::uint64_t>(4 * kPageEntries, raw.size() - at);
    const std::uint32_t found = crc32(0, raw.data() + at, static_cast<std::size_t>(nbytes));
    const auto expected = get<std::uint32_t>(checks.data() + 4 * page);
    if (found != expected) {
      throw corruption_error(file_.path(),
                             static_cast<std::int64_t>(tail_.table_offset + 4 * begin + at),
                             static_cast<std::int64_t>(nbytes), "checksum of the block table",
                             std::to_string(expected), std::to_string(found));
    }
  }
  file_.forget();
  first_block_ = begin;
  blocks_.resize(static_cast<std::size_t>(end - begin));
  for (std::size_t b = 0; b < blocks_.size(); ++b)
    blocks_[b] = get<std::uint32_t>(raw.data() + 4 * b);
}

}  // namespace dcpx::engine
