#include "format/zip_parse.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "format/crc32.h"
#include "format/tensor_pickle.h"

namespace dcpx {
namespace {

constexpr std::uint64_t kMaxPickleBytes = 1 << 20;

// What torch.save wrote before 1.6, and still writes when asked to, is no zip: pickles, of which
// the first is this number, and the storages behind them. The second byte is the protocol.
constexpr unsigned char kLegacyHead[] = {0x80, 2,    0x8a, 10,   0x6c, 0xfc, 0x9c, 0x46,
                                         0xf9, 0x20, 0x6a, 0xa8, 0x50, 0x19, '.'};

bool is_legacy(ItemReader& item) {
  if (item.item_bytes() < sizeof(kLegacyHead)) return false;
  std::byte head[sizeof(kLegacyHead)];
  item.copy(0, sizeof(head), head);
  head[1] = std::byte{kLegacyHead[1]};
  return std::memcmp(head, kLegacyHead, sizeof(head)) == 0;
}

// The records of one archive, found by their name below the archive's folder.
// REQUIRES: none of them is compressed.
class Archive {
 public:
  Archive(ItemReader& item, std::vector<ZipRecord> records)
      : item_(item), records_(std::move(records)) {
    const std::string& first = records_.front().name;
    const std::size_t slash = first.find('/');
    if (slash == std::string::npos) {
      throw item_.corrupt(0, item_.item_bytes(), "zip has no archive folder, as torch.save makes");
    }
    folder_ = first.substr(0, slash + 1);
  }

  const ZipRecord* find(std::string_view name) const {
    for (const ZipRecord& record : records_) {
      if (record.name.size() == folder_.size() + name.size() &&
          record.name.compare(0, folder_.size(), folder_) == 0 &&
          record.name.compare(folder_.size(), name.size(), name) == 0) {
        return &record;
      }
    }
    return nullptr;
  }

  const ZipRecord& require(std::string_view name) const {
    const ZipRecord* record = find(name);
    if (record == nullptr) {
      throw item_.corrupt(0, item_.item_bytes(), "no record '" + std::string(name) + "'");
    }
    return *record;
  }

  // REQUIRES: the record is known to be small.
  std::vector<std::byte> read(const ZipRecord& record) const {
    std::vector<std::byte> bytes(static_cast<std::size_t>(record.nbytes));
    item_.copy(record.offset, bytes.size(), bytes.data());
    return bytes;
  }

  bool is_big_endian() const {
    const ZipRecord* record = find("byteorder");
    if (record == nullptr) return false;  // older writers; every one of them little-endian
    const std::vector<std::byte> bytes = read_up_to(*record, 8);
    const std::string_view order(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (order != "little" && order != "big") {
      throw item_.corrupt(record->offset, record->nbytes, "unknown byte order");
    }
    return order == "big";
  }

 private:
  std::vector<std::byte> read_up_to(ZipRecord record, std::uint64_t nbytes) const {
    record.nbytes = std::min(record.nbytes, nbytes);
    return read(record);
  }

  ItemReader& item_;
  std::vector<ZipRecord> records_;
  std::string folder_;  // with its slash
};

// Whether all of the view lies in the first `storage_elems` elements. False on overflow.
bool view_fits(const PickledTensor& tensor, std::uint64_t storage_elems) {
  if (tensor.storage_offset < 0) return false;
  const auto is_negative = [](std::int64_t value) { return value < 0; };
  if (std::any_of(tensor.sizes.begin(), tensor.sizes.end(), is_negative) ||
      std::any_of(tensor.strides.begin(), tensor.strides.end(), is_negative)) {
    return false;
  }
  if (std::find(tensor.sizes.begin(), tensor.sizes.end(), 0) != tensor.sizes.end()) return true;
  std::int64_t numel = 1;
  std::int64_t last = tensor.storage_offset;
  for (std::size_t dim = 0; dim < tensor.sizes.size(); ++dim) {
    std::int64_t step = 0;
    if (__builtin_mul_overflow(numel, tensor.sizes[dim], &numel) ||
        __builtin_mul_overflow(tensor.sizes[dim] - 1, tensor.strides[dim], &step) ||
        __builtin_add_overflow(last, step, &last)) {
      return false;
    }
  }
  return static_cast<std::uint64_t>(last) < storage_elems;
}

bool storage_fits(const PickledTensor& tensor, std::uint64_t elem_bytes, std::uint64_t nbytes) {
  const std::uint64_t unit_bytes = tensor.dtype_name.empty() ? elem_bytes : 1;
  return tensor.storage_numel >= 0 && nbytes % unit_bytes == 0 &&
         static_cast<std::uint64_t>(tensor.storage_numel) == nbytes / unit_bytes;
}

}  // namespace

ZipShape parse_zip_item(RangeReader& reader, std::uint64_t item_bytes, ParsedTensor* tensor) {
  ItemReader item(reader, item_bytes);
  std::vector<ZipRecord> records;
  try {
    records = list_zip_records(item);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kCorruption && is_legacy(item)) return ZipShape::kOther;
    throw;
  }
  const auto is_compressed = [](const ZipRecord& record) { return record.method != 0; };
  if (std::any_of(records.begin(), records.end(), is_compressed)) return ZipShape::kOther;
  const Archive archive(item, std::move(records));
  const ZipRecord& pickle_record = archive.require("data.pkl");
  if (pickle_record.nbytes > kMaxPickleBytes) return ZipShape::kOther;
  const std::vector<std::byte> pickle = archive.read(pickle_record);
  // torch.serialization.set_crc32_options(False) writes 0 for every CRC.
  const bool has_crc = pickle_record.crc != 0;
  if (has_crc && crc32(0, pickle.data(), pickle.size()) != pickle_record.crc) {
    throw item.corrupt(pickle_record.offset, pickle_record.nbytes, "data.pkl fails its CRC");
  }

  PickledTensor pickled;
  if (!parse_tensor_pickle(pickle.data(), pickle.size(), &pickled)) return ZipShape::kOther;
  const std::uint64_t elem_bytes =
      framing_elem_bytes(pickled.storage_module, pickled.storage_name, pickled.dtype_name);
  if (elem_bytes == 0) return ZipShape::kOther;
  const ZipRecord& payload = archive.require("data/" + std::string(pickled.storage_key));
  if (!storage_fits(pickled, elem_bytes, payload.nbytes)) {
    throw item.corrupt(payload.offset, payload.nbytes,
                       "record and storage of the tensor differ in size",
                       std::to_string(pickled.storage_numel), std::to_string(payload.nbytes));
  }
  if (!view_fits(pickled, payload.nbytes / elem_bytes)) {
    throw item.corrupt(pickle_record.offset, pickle_record.nbytes,
                       "sizes and strides of the tensor exceed its storage");
  }

  tensor->storage_module = std::string(pickled.storage_module);
  tensor->storage_name = std::string(pickled.storage_name);
  tensor->dtype_name = std::string(pickled.dtype_name);
  tensor->elem_bytes = elem_bytes;
  tensor->payload_offset = payload.offset;
  tensor->payload_bytes = payload.nbytes;
  tensor->payload_crc = payload.crc;
  tensor->has_payload_crc = has_crc;
  tensor->is_big_endian = archive.is_big_endian();
  tensor->storage_numel = pickled.storage_numel;
  tensor->storage_offset = pickled.storage_offset;
  tensor->sizes = std::move(pickled.sizes);
  tensor->strides = std::move(pickled.strides);
  return ZipShape::kPlainTensor;
}

}  // namespace dcpx
