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
#include <memory>
#include <unordered_map>
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

// The framing of one item. Immutable after construction, and copies share one template: equal
// specs cost their bytes once (ZipItemCache). Safe to share. Keeps nothing of the spec.
//
// `pad_bytes` moves the payload: 0, or kMinPadBytes to kMaxPadBytes of extra field before it. All
// methods throw Error(kPlan) on another value; the same value must go to head and tail.
class ZipItem {
 public:
  static constexpr std::uint64_t kMinPadBytes = 4;  // the padding field's own header
  static constexpr std::uint64_t kMaxPadBytes = 65000;

  // Throws Error(kPlan) when sizes and strides disagree or reach beyond the payload.
  explicit ZipItem(const ZipItemSpec& spec);

  std::uint64_t head_bytes() const noexcept { return template_->head.size(); }  // with no padding
  std::uint64_t payload_bytes() const noexcept { return template_->payload_bytes; }
  std::uint64_t tail_bytes(std::uint64_t pad_bytes) const;
  std::uint64_t item_bytes(std::uint64_t pad_bytes) const;  // head, padding, payload and tail

  // Writes head_bytes() + pad_bytes bytes; the payload follows directly.
  void write_head(std::uint64_t pad_bytes, std::byte* to) const;
  // Writes tail_bytes(pad_bytes) bytes, which follow the payload directly.
  void write_tail(std::uint64_t pad_bytes, std::uint32_t payload_crc, std::byte* to) const;

 private:
  // All bytes of head and tail but the few that padding and the payload's CRC decide.
  struct Template {
    std::vector<std::byte> head;
    std::vector<std::byte> tail;  // descriptor and central directory, without the end records
    std::uint64_t payload_bytes = 0;
    std::uint64_t descriptor_bytes = 0;
  };

  std::uint64_t directory_offset(std::uint64_t pad_bytes) const;

  std::shared_ptr<const Template> template_;
};

// Framings of the items of one call, one template for all that are framed alike: a model has
// thousands of tensors and a few dozen shapes. Not thread-safe.
class ZipItemCache {
 public:
  // As ZipItem(ZipItemSpec{...}). Framings are told apart by their addresses: REQUIRES that they
  // outlive the cache.
  ZipItem make(const TensorFraming& framing, const std::vector<std::int64_t>& sizes,
               const std::vector<std::int64_t>& strides, std::uint64_t payload_bytes,
               std::uint64_t elem_bytes);

 private:
  static constexpr std::size_t kMaxTemplates = 4096;  // all shapes different: nothing to share

  struct Key {
    const TensorFraming* framing = nullptr;
    std::uint64_t payload_bytes = 0;
    std::uint64_t elem_bytes = 0;
    std::vector<std::int64_t> dims;  // sizes, then strides

    bool operator==(const Key& other) const noexcept;
  };
  struct Hash {
    std::size_t operator()(const Key& key) const noexcept;
  };

  Key key_;  // of the spec at hand: its memory is used again
  std::unordered_map<Key, ZipItem, Hash> items_;
};

}  // namespace dcpx
