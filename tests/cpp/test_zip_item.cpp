#include <algorithm>
#include <numeric>
#include <utility>

#include "check.h"
#include "format/crc32.h"
#include "format/zip_item.h"
#include "format/zip_parse.h"

namespace {

using dcpx::ErrorCode;
using dcpx::ZipItem;

const dcpx::TensorFraming kFloat{"torch", "FloatStorage", ""};
const dcpx::TensorFraming kFloat8{"torch.storage", "UntypedStorage", "float8_e4m3fn"};

dcpx::ZipItemSpec spec_of(const dcpx::TensorFraming& framing, std::uint64_t elems,
                          std::uint64_t elem_bytes) {
  return {&framing, {static_cast<std::int64_t>(elems)}, {1}, elems * elem_bytes, elem_bytes};
}

struct NamedWidth {
  const char* name;
  std::uint64_t elem_bytes;
};
constexpr NamedWidth kTypedStorages[] = {
    {"FloatStorage", 4},  {"BFloat16Storage", 2},     {"HalfStorage", 2},
    {"DoubleStorage", 8}, {"LongStorage", 8},         {"IntStorage", 4},
    {"ShortStorage", 2},  {"CharStorage", 1},         {"ByteStorage", 1},
    {"BoolStorage", 1},   {"ComplexFloatStorage", 8}, {"ComplexDoubleStorage", 16},
};
constexpr NamedWidth kUntypedDtypes[] = {
    {"float8_e4m3fn", 1},  {"float8_e5m2", 1},      {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1}, {"float4_e2m1fn_x2", 1}, {"uint16", 2},          {"uint32", 4},
    {"uint64", 8},         {"complex32", 4},        {"bcomplex32", 4},      {"bits8", 1},
    {"bits16", 2},         {"bits1x8", 1},          {"bits2x4", 1},         {"bits4x2", 1},
};

std::uint32_t crc_of_zeros(std::uint64_t nbytes) {
  const std::byte zero{0};
  std::uint32_t crc = 0;
  std::uint32_t block = dcpx::crc32(0, &zero, 1);
  for (std::uint64_t block_bytes = 1; nbytes > 0; block_bytes *= 2, nbytes /= 2) {
    if (nbytes % 2 != 0) crc = dcpx::crc32_combine(crc, block, block_bytes);
    block = dcpx::crc32_combine(block, block, block_bytes);
  }
  return crc;
}

// An item in memory whose payload is all zeros, and possibly not there at all: reads beyond the
// head and before the tail give zeros.
class SparseItem : public dcpx::RangeReader {
 public:
  SparseItem(const ZipItem& item, std::uint64_t pad_bytes)
      : item_bytes(item.item_bytes(pad_bytes)),
        tail_offset_(item.head_bytes() + pad_bytes + item.payload_bytes()) {
    head_.resize(item.head_bytes() + pad_bytes);  // exactly: ASan sees a byte too many
    tail_.resize(item.tail_bytes(pad_bytes));
    item.write_head(pad_bytes, head_.data());
    item.write_tail(pad_bytes, item.payload_bytes() == 0 ? 0 : 0x12345678, tail_.data());
    CHECK_EQ(tail_offset_ + tail_.size(), item_bytes);
  }

  void read(std::uint64_t offset, std::size_t nbytes, std::byte* into) override {
    ++reads;
    CHECK(offset <= item_bytes && nbytes <= item_bytes - offset);
    for (std::size_t i = 0; i < nbytes; ++i) into[i] = at(offset + i);
  }

  std::uint64_t item_bytes;
  int reads = 0;

 private:
  std::byte at(std::uint64_t offset) const {
    if (offset < head_.size()) return head_[offset];
    return offset < tail_offset_ ? std::byte{0} : tail_[offset - tail_offset_];
  }

  std::vector<std::byte> head_, tail_;
  std::uint64_t tail_offset_;
};

TEST(zip_item_of_any_size_and_padding_parses_back) {
  for (const std::uint64_t pad_bytes : {0UL, 4UL, 5UL, 63UL, 4096UL, 65000UL}) {
    for (const std::uint64_t elems : {0UL, 1UL, 255UL, 256UL, 65535UL, 65536UL, 1UL << 31}) {
      const ZipItem item(spec_of(kFloat, elems, 4));
      SparseItem bytes(item, pad_bytes);
      dcpx::ParsedTensor tensor;
      CHECK(parse_zip_item(bytes, bytes.item_bytes, &tensor) == dcpx::ZipShape::kPlainTensor);
      CHECK_EQ(tensor.payload_offset, item.head_bytes() + pad_bytes);
      CHECK_EQ(tensor.payload_bytes, elems * 4);
      CHECK_EQ(tensor.payload_crc, elems == 0 ? 0U : 0x12345678U);
      CHECK_EQ(tensor.sizes.at(0), static_cast<std::int64_t>(elems));
      CHECK(bytes.reads <= 2);
    }
  }
}

// Every framing that this build knows, in every layout: what is framed is what is found.
TEST(zip_item_of_every_framing_and_layout_parses_back) {
  struct Known {
    dcpx::TensorFraming framing;
    std::uint64_t elem_bytes;
  };
  std::vector<Known> all;
  for (const auto& [name, elem_bytes] : kTypedStorages)
    all.push_back({{"torch", name, ""}, elem_bytes});
  for (const auto& [name, elem_bytes] : kUntypedDtypes) {
    all.push_back({{"torch.storage", "UntypedStorage", name}, elem_bytes});
  }
  using Numbers = std::vector<std::int64_t>;
  const std::vector<std::pair<Numbers, Numbers>> layouts{
      {{}, {}},
      {{0}, {1}},
      {{3, 0, 2}, {2, 2, 1}},
      {{1}, {1}},
      {{2, 3}, {3, 1}},
      {{2, 3}, {1, 2}},  // transposed
      {{2, 1, 2, 3, 1}, {6, 6, 3, 1, 1}},
      {{300}, {1}},
      {{2}, {70000}},
  };
  for (const Known& known : all) {
    for (const auto& [sizes, strides] : layouts) {
      std::uint64_t elems = 1;  // that the storage holds, gaps among them
      for (std::size_t d = 0; d < sizes.size(); ++d) {
        elems += static_cast<std::uint64_t>((sizes[d] - 1) * strides[d]);
      }
      if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) elems = 0;
      const std::uint64_t payload_bytes = elems * known.elem_bytes;
      const ZipItem item({&known.framing, sizes, strides, payload_bytes, known.elem_bytes});
      SparseItem bytes(item, 0);
      dcpx::ParsedTensor tensor;
      CHECK(parse_zip_item(bytes, bytes.item_bytes, &tensor) == dcpx::ZipShape::kPlainTensor);
      CHECK_EQ(tensor.storage_module, known.framing.storage_module);
      CHECK_EQ(tensor.storage_name, known.framing.storage_name);
      CHECK_EQ(tensor.dtype_name, known.framing.dtype_name);
      CHECK_EQ(tensor.elem_bytes, known.elem_bytes);
      CHECK(tensor.sizes == sizes && tensor.strides == strides);
      CHECK_EQ(tensor.storage_offset, 0);
      CHECK_EQ(static_cast<std::uint64_t>(tensor.storage_numel),
               known.framing.is_untyped() ? payload_bytes : elems);
      CHECK_EQ(tensor.payload_bytes, payload_bytes);
      CHECK_EQ(tensor.has_payload_crc, true);
      CHECK_EQ(tensor.is_big_endian, false);
    }
  }
}

// Files that tests/native/test_zip_item.py gives to torch and zipfile: with these paddings, and
// without their payload, which is all zeros, on both sides of 4 GiB.
TEST(zip_item_has_the_bytes_that_torch_reads) {
  const auto framed = [](const ZipItem& item, std::uint64_t pad_bytes,
                         const std::vector<std::byte>& payload, std::uint32_t crc) {
    std::vector<std::byte> head(item.head_bytes() + pad_bytes);
    std::vector<std::byte> tail(item.tail_bytes(pad_bytes));
    item.write_head(pad_bytes, head.data());
    item.write_tail(pad_bytes, crc, tail.data());
    head.insert(head.end(), payload.begin(), payload.end());
    head.insert(head.end(), tail.begin(), tail.end());
    return head;
  };
  std::vector<std::byte> payload(4 * 8 * 4);
  for (std::size_t i = 0; i < payload.size(); ++i) payload[i] = static_cast<std::byte>(i);
  const std::uint32_t crc = dcpx::crc32(0, payload.data(), payload.size());
  const ZipItem small({&kFloat, {4, 8}, {8, 1}, payload.size(), 4});
  for (const std::uint64_t pad_bytes : {0UL, 4UL, 5UL, 63UL, 64UL, 4096UL, 65000UL}) {
    CHECK(framed(small, pad_bytes, payload, crc) ==
          check::corpus("zip_item/pad_" + std::to_string(pad_bytes) + ".pt"));
  }
  const dcpx::TensorFraming byte{"torch", "ByteStorage", ""};
  for (const std::int64_t distance : {-1200, -1152, -64, -2, -1, 0, 1, 64}) {
    const auto nbytes = static_cast<std::uint64_t>((std::int64_t{1} << 32) + distance);
    CHECK(framed(ZipItem(spec_of(byte, nbytes, 1)), 0, {}, crc_of_zeros(nbytes)) ==
          check::corpus("zip_item/" + std::to_string(nbytes) + "_bytes"));
  }
}

TEST(zip_item_around_4_gib_parses_back) {
  for (std::uint64_t nbytes = (1ULL << 32) - 1600; nbytes <= (1ULL << 32) + 64; ++nbytes) {
    const ZipItem item(spec_of(kFloat8, nbytes, 1));
    SparseItem bytes(item, 8);
    dcpx::ParsedTensor tensor;
    CHECK(parse_zip_item(bytes, bytes.item_bytes, &tensor) == dcpx::ZipShape::kPlainTensor);
    CHECK_EQ(tensor.payload_bytes, nbytes);
    CHECK_EQ(tensor.storage_numel, static_cast<std::int64_t>(nbytes));
    CHECK_EQ(tensor.dtype_name, "float8_e4m3fn");
  }
}

TEST(cached_zip_items_have_the_bytes_of_their_own_spec) {
  dcpx::ZipItemCache cache;
  const auto bytes_of = [](const ZipItem& item) {
    std::vector<std::byte> bytes(item.item_bytes(8) - item.payload_bytes());
    item.write_head(8, bytes.data());
    item.write_tail(8, 77, bytes.data() + item.head_bytes() + 8);
    return bytes;
  };
  const std::vector<std::vector<std::int64_t>> dims{{}, {1}, {6}, {2, 3}, {3, 2}, {1, 6}, {6, 1}};
  std::size_t made = 0;
  for (int pass = 0; pass < 2; ++pass) {
    for (const dcpx::TensorFraming* framing : {&kFloat, &kFloat8}) {
      for (const auto& sizes : dims) {
        for (const auto& strides : dims) {
          for (const std::uint64_t payload_bytes : {1000UL, 2000UL}) {
            if (strides.size() != sizes.size()) continue;
            const ZipItem item = cache.make(*framing, sizes, strides, payload_bytes, 4);
            const ZipItem own({framing, sizes, strides, payload_bytes, 4});
            CHECK(bytes_of(item) == bytes_of(own));
            ++made;
          }
        }
      }
    }
  }
  CHECK_EQ(made, 168U);
  for (std::int64_t size = 0; size < 6000; ++size) {  // more shapes than the cache keeps
    CHECK(bytes_of(cache.make(kFloat, {size}, {1}, 24000, 4)) ==
          bytes_of(ZipItem({&kFloat, {size}, {1}, 24000, 4})));
  }
}

TEST(cache_refuses_sizes_and_strides_that_differ_in_number) {
  dcpx::ZipItemCache cache;
  cache.make(kFloat, {1, 2}, {3, 4}, 1000, 4);  // the same numbers in the same order
  CHECK_THROWS(cache.make(kFloat, {1}, {2, 3, 4}, 1000, 4), ErrorCode::kPlan);
  CHECK_THROWS(cache.make(kFloat, {1, 2, 3}, {4}, 1000, 4), ErrorCode::kPlan);
}

TEST(zip_item_refuses_padding_that_no_extra_field_can_hold) {
  const ZipItem item(spec_of(kFloat, 1, 4));
  std::vector<std::byte> out;
  for (const std::uint64_t pad_bytes : {1UL, 2UL, 3UL, 65001UL, 65536UL, UINT64_MAX}) {
    CHECK_THROWS(item.write_head(pad_bytes, out.data()), ErrorCode::kPlan);
    CHECK_THROWS(item.write_tail(pad_bytes, 0, out.data()), ErrorCode::kPlan);
    CHECK_THROWS(item.tail_bytes(pad_bytes), ErrorCode::kPlan);
  }
  CHECK(out.empty());
}

TEST(zip_item_refuses_tensors_that_exceed_their_payload) {
  const auto make = [](std::vector<std::int64_t> sizes, std::vector<std::int64_t> strides,
                       std::uint64_t payload_bytes) {
    return ZipItem({&kFloat, std::move(sizes), std::move(strides), payload_bytes, 4});
  };
  make({2, 3}, {3, 1}, 24);
  make({0, INT64_MAX}, {INT64_MAX, INT64_MAX}, 0);
  CHECK_THROWS(make({2, 3}, {3, 1}, 20), ErrorCode::kPlan);
  CHECK_THROWS(make({2, 3}, {3}, 24), ErrorCode::kPlan);
  CHECK_THROWS(make({-1}, {1}, 24), ErrorCode::kPlan);
  CHECK_THROWS(make({2}, {-1}, 24), ErrorCode::kPlan);
  CHECK_THROWS(make({6}, {1}, 25), ErrorCode::kPlan);
  CHECK_THROWS(make({INT64_MAX, INT64_MAX}, {INT64_MAX, 1}, 24), ErrorCode::kPlan);
}

TEST(zip_item_integers_of_every_width_survive_the_pickle) {
  for (const std::int64_t stride :
       {std::int64_t{0}, std::int64_t{255}, std::int64_t{256}, std::int64_t{65535},
        std::int64_t{65536}, std::int64_t{INT32_MAX}, std::int64_t{INT32_MAX} + 1,
        std::int64_t{1} << 40, std::int64_t{INT64_MAX}}) {
    std::vector<std::byte> out;
    dcpx::append_tensor_pickle(kFloat, 1, {1, 1, 1, 1}, {stride, 1, 1, 1}, out);
    dcpx::PickledTensor tensor;
    CHECK(dcpx::parse_tensor_pickle(out.data(), out.size(), &tensor));
    CHECK_EQ(tensor.strides.at(0), stride);
    CHECK_EQ(tensor.sizes.size(), 4U);
  }
}

}  // namespace
