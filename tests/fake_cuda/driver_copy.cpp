// The asynchronous copies.
#include "copies.h"

using namespace fake;

namespace {

Address address_of(const void* data) { return reinterpret_cast<Address>(data); }

enum class Expected { kHost, kDevice, kAny };

bool is_as_expected(Address address, Expected expected) {
  const bool is_device = world().memory.device_of(address) >= 0;
  return expected == Expected::kAny || is_device == (expected == Expected::kDevice);
}

Result copy(Call& call, Address dst, Expected dst_kind, Address src, Expected src_kind,
            std::size_t nbytes, Handle handle) {
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  if (const Result bad = call.find(handle, stream)) return bad;
  if (!is_as_expected(dst, dst_kind)) return call.wrong(kInvalidValue, "the wrong kind of dst");
  if (!is_as_expected(src, src_kind)) return call.wrong(kInvalidValue, "the wrong kind of src");
  if (nbytes == 0) return kSuccess;
  std::size_t failed = 0;
  return queue_copies(call, stream, {{dst, src, nbytes}}, kOrderStream, failed);
}

}  // namespace

FAKE_EXPORT Result cuMemcpyDtoHAsync_v2(void* dst, Address src, std::size_t nbytes, Handle stream) {
  Call call("cuMemcpyDtoHAsync", kNeedsContext);
  return copy(call, address_of(dst), Expected::kHost, src, Expected::kDevice, nbytes, stream);
}

FAKE_EXPORT Result cuMemcpyHtoDAsync_v2(Address dst, const void* src, std::size_t nbytes,
                                        Handle stream) {
  Call call("cuMemcpyHtoDAsync", kNeedsContext);
  return copy(call, dst, Expected::kDevice, address_of(src), Expected::kHost, nbytes, stream);
}

FAKE_EXPORT Result cuMemcpyAsync(Address dst, Address src, std::size_t nbytes, Handle stream) {
  Call call("cuMemcpyAsync", kNeedsContext);
  return copy(call, dst, Expected::kAny, src, Expected::kAny, nbytes, stream);
}

namespace {

// One side of a 2-D copy: where its first byte is.
Result first_byte(const Call& call, int type, const void* host, Address device, std::size_t x,
                  std::size_t y, std::size_t pitch, const Memcpy2D& box, Address& first) {
  if (type != kHostMemory && type != kDeviceMemory && type != kUnifiedMemory)
    return call.wrong(kInvalidValue, "a memory type that the fake does not have");
  const Address base = type == kHostMemory ? address_of(host) : device;
  const bool is_device = world().memory.device_of(base) >= 0;
  if ((type == kHostMemory && is_device) || (type == kDeviceMemory && !is_device))
    return call.wrong(kInvalidValue, "memory of another type than it says");
  if (pitch > 0x7FFFFFFF) return call.wrong(kInvalidValue, "a pitch beyond the device's limit");
  if (box.height > 1 && pitch < x + box.width_bytes)
    return call.wrong(kInvalidValue, "a pitch below the width");
  first = base + y * pitch + x;
  return kSuccess;
}

}  // namespace

FAKE_EXPORT Result cuMemcpy2DAsync_v2(const Memcpy2D* box, Handle handle) {
  Call call("cuMemcpy2DAsync", kNeedsContext);
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  if (const Result bad = call.find(handle, stream)) return bad;
  CopyPiece piece;
  const Memcpy2D& b = *box;
  if (const Result bad = first_byte(call, b.src_type, b.src_host, b.src_device, b.src_x_bytes,
                                    b.src_y, b.src_pitch, b, piece.src))
    return bad;
  if (const Result bad = first_byte(call, b.dst_type, b.dst_host, b.dst_device, b.dst_x_bytes,
                                    b.dst_y, b.dst_pitch, b, piece.dst))
    return bad;
  if (b.width_bytes == 0 || b.height == 0) return kSuccess;
  piece.nbytes = b.width_bytes;
  piece.rows = b.height;
  piece.src_pitch = b.src_pitch;
  piece.dst_pitch = b.dst_pitch;
  std::size_t failed = 0;
  return queue_copies(call, stream, {piece}, kOrderStream, failed);
}

namespace {

struct BatchArguments {
  Address* dsts;
  Address* srcs;
  std::size_t* sizes;
  std::size_t count;
  MemcpyAttributes* attributes;
  std::size_t* indexes;
  std::size_t attribute_count;
};

Result check_attributes(const Call& call, const BatchArguments& a) {
  if (a.count == 0 || a.attribute_count == 0 || a.attribute_count > a.count)
    return call.wrong(kInvalidValue, "no copies, or not the right number of attributes");
  for (std::size_t i = 0; i < a.attribute_count; ++i) {
    const bool is_in_order = i == 0 ? a.indexes[0] == 0 : a.indexes[i] > a.indexes[i - 1];
    if (!is_in_order || a.indexes[i] >= a.count)
      return call.wrong(kInvalidValue, "indexes of attributes out of order");
    const int order = a.attributes[i].source_order;
    if (order < kOrderStream || order > kOrderAny)
      return call.wrong(kInvalidValue, "no order of access to the source");
  }
  return kSuccess;
}

Result copy_batch(Call& call, const BatchArguments& a, Handle handle, std::size_t* failed) {
  constexpr std::size_t kNoneInParticular = ~std::size_t{0};
  if (failed != nullptr) *failed = kNoneInParticular;
  if (call.is_refused()) return call.result();
  StreamPtr stream;
  if (const Result bad = call.find(handle, stream)) return bad;
  if (stream->is_legacy) return call.wrong(kInvalidValue, "a batch on the default stream");
  if (const Result bad = check_attributes(call, a)) return bad;
  std::size_t culprit = kNoneInParticular;
  Result result = kSuccess;
  for (std::size_t i = 0; i < a.attribute_count && result == kSuccess; ++i) {
    const std::size_t end = i + 1 < a.attribute_count ? a.indexes[i + 1] : a.count;
    std::vector<CopyPiece> pieces;
    for (std::size_t j = a.indexes[i]; j < end; ++j) {
      if (a.sizes[j] == 0) result = call.wrong(kInvalidValue, "an empty copy in a batch");
      pieces.push_back({a.dsts[j], a.srcs[j], a.sizes[j]});
    }
    std::size_t at = 0;
    if (result == kSuccess)
      result = queue_copies(call, stream, pieces, a.attributes[i].source_order, at);
    if (result != kSuccess) culprit = a.indexes[i] + at;
  }
  if (result == kSuccess) world().totals["batch_pieces"] += std::int64_t(a.count);
  if (failed != nullptr) *failed = culprit;
  return result;
}

}  // namespace

// The form of 12.8.
FAKE_EXPORT Result cuMemcpyBatchAsync(Address* dsts, Address* srcs, std::size_t* sizes,
                                      std::size_t count, MemcpyAttributes* attributes,
                                      std::size_t* indexes, std::size_t attribute_count,
                                      std::size_t* failed, Handle stream) {
  Call call("cuMemcpyBatchAsync", kNeedsContext);
  return copy_batch(call, {dsts, srcs, sizes, count, attributes, indexes, attribute_count}, stream,
                    failed);
}

// The form of 13.0.
FAKE_EXPORT Result cuMemcpyBatchAsync_v2(Address* dsts, Address* srcs, std::size_t* sizes,
                                         std::size_t count, MemcpyAttributes* attributes,
                                         std::size_t* indexes, std::size_t attribute_count,
                                         Handle stream) {
  Call call("cuMemcpyBatchAsync_v2", kNeedsContext);
  return copy_batch(call, {dsts, srcs, sizes, count, attributes, indexes, attribute_count}, stream,
                    nullptr);
}
