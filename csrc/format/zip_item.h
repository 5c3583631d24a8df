// One tensor item of a data file: a zip archive as torch.save writes it, around a payload that the
// caller writes. The head (everything before the payload) and the tail (everything behind it) have
// sizes that follow from the spec, so that a whole file is laid out before a byte is read; only
// the tail's content waits for the payload's CRC.
//
//   data.pkl .format_version .storage_alignment byteorder version   small records, CRCs inside
//   data/0                                                           local header, FB padding
//   <payload>
//   data descriptor, central directory, end records                  the tail
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/tensor_pickle.h"

namespace dcpx {

struct ZipItemSpec {
  const TensorFraming* framing = nullptr;
  std::vector<std::int64_t> sizes;    // [D]
  std::vector<std::int64_t> strides;  // [D], elements
  std::uint64_t payload_bytes = 0;    // of the whole storage
  std::uint64_t elem_bytes = 0;
};

// The framing of one item. Immutable after construction: safe to share. Keeps nothing of the spec.
//
// `pad_bytes` moves the payload: 0, or kMinPadBytes to kMaxPadBytes of extra field before it. All
// methods throw Error(kPlan) on another value; the same value must go to head and tail.
class ZipItem {
 public:
  static constexpr std::uint64_t kMinPadBytes = 4;  // the padding field's own header
  static constexpr std::uint64_t kMaxPadBytes = 65000;

  // Throws Error(kPlan) when sizes and strides disagree or reach beyond the payload.
  explicit ZipItem(const ZipItemSpec& spec);

  std::uint64_t head_bytes() const noexcept;  // with no padding
  std::uint64_t payload_bytes() const noexcept { return payload_bytes_; }
  std::uint64_t tail_bytes(std::uint64_t pad_bytes) const;
  std::uint64_t item_bytes(std::uint64_t pad_bytes) const;  // head, padding, payload and tail

  // Appends head_bytes() + pad_bytes bytes; the payload follows directly.
  void append_head(std::uint64_t pad_bytes, std::vector<std::byte>& out) const;
  // Appends tail_bytes(pad_bytes) bytes, which follow the payload directly.
  void append_tail(std::uint64_t pad_bytes, std::uint32_t payload_crc,
                   std::vector<std::byte>& out) const;

 private:
  std::uint64_t descriptor_bytes() const noexcept;
  std::uint64_t directory_offset(std::uint64_t pad_bytes) const;

  std::vector<std::byte> pickle_;
  std::uint32_t pickle_crc_ = 0;
  std::uint64_t payload_bytes_ = 0;
};

}  // namespace dcpx
