#include <memory>

#include "check.h"
#include "zip_invariants.h"

namespace {

using dcpx::ErrorCode;
using dcpx::ParsedTensor;
using dcpx::ZipShape;

// Written by torch.save of torch 2.13: corpus/zip_parse is also the fuzzer's seed.
constexpr const char* kPlainItems[] = {"zip_parse/float32_2x3.pt", "zip_parse/float8_2x3.pt",
                                       "zip_parse/empty.pt", "zip_parse/dcpx_float32.pt"};

ZipShape parse(const std::vector<std::byte>& bytes, ParsedTensor* tensor) {
  MemoryReader reader(bytes);
  return dcpx::parse_zip_item(reader, bytes.size(), tensor);
}

TEST(zip_parse_reads_what_torch_wrote) {
  ParsedTensor tensor;
  const std::vector<std::byte> bytes = check::corpus("zip_parse/float32_2x3.pt");
  CHECK(parse(bytes, &tensor) == ZipShape::kPlainTensor);
  CHECK_EQ(tensor.storage_module, "torch");
  CHECK_EQ(tensor.storage_name, "FloatStorage");
  CHECK_EQ(tensor.payload_bytes, 24U);
  CHECK(tensor.sizes == (std::vector<std::int64_t>{2, 3}));
  CHECK(tensor.strides == (std::vector<std::int64_t>{3, 1}));
  CHECK(tensor.has_payload_crc);
  CHECK_EQ(list_zip_records(*std::make_unique<MemoryReader>(bytes), bytes.size()).size(), 7U);
}

TEST(zip_parse_finds_a_view_in_a_larger_storage) {
  ParsedTensor tensor;
  CHECK(parse(check::corpus("zip_parse/view_2x2.pt"), &tensor) == ZipShape::kPlainTensor);
  CHECK_EQ(tensor.storage_offset, 8);
  CHECK_EQ(tensor.storage_numel, 24);
  CHECK(tensor.sizes == (std::vector<std::int64_t>{2, 2}));
  CHECK(tensor.strides == (std::vector<std::int64_t>{6, 1}));
}

TEST(zip_parse_says_where_torch_was_told_to_sum_nothing) {
  ParsedTensor tensor;
  CHECK(parse(check::corpus("zip_parse/without_crcs.pt"), &tensor) == ZipShape::kPlainTensor);
  CHECK(!tensor.has_payload_crc);
}

TEST(zip_parse_leaves_other_objects_to_torch) {
  ParsedTensor tensor;
  CHECK(parse(check::corpus("zip_parse/parameter.pt"), &tensor) == ZipShape::kOther);
  CHECK(parse(check::corpus("zip_parse/conj.pt"), &tensor) == ZipShape::kOther);
  CHECK(parse(check::corpus("zip_parse/deflated.pt"), &tensor) == ZipShape::kOther);
  CHECK(parse(check::corpus("zip_parse/before_zips.pt"), &tensor) == ZipShape::kOther);
}

// Either refused, or within bounds: never a crash, never a range outside.
void check_mutant(const std::vector<std::byte>& bytes) {
  ParsedTensor tensor;
  try {
    if (parse(bytes, &tensor) == ZipShape::kPlainTensor) CHECK(lies_inside(tensor, bytes.size()));
  } catch (const dcpx::Error& error) {
    CHECK(error.code() == ErrorCode::kCorruption);
    CHECK(error.offset >= 0 && error.nbytes >= 0);
    CHECK(static_cast<std::uint64_t>(error.offset + error.nbytes) <= bytes.size());
  }
}

TEST(zip_parse_survives_every_changed_byte) {
  for (const char* name : kPlainItems) {
    const std::vector<std::byte> whole = check::corpus(name);
    for (std::size_t at = 0; at < whole.size(); ++at) {
      for (const unsigned change : {0x01U, 0x80U, 0xFFU}) {
        std::vector<std::byte> bytes = whole;
        bytes[at] ^= std::byte{static_cast<unsigned char>(change)};
        check_mutant(bytes);
      }
    }
  }
}

TEST(zip_parse_refuses_every_truncation) {
  for (const char* name : kPlainItems) {
    std::vector<std::byte> bytes = check::corpus(name);
    while (!bytes.empty()) {
      bytes.pop_back();
      bytes.shrink_to_fit();
      ParsedTensor tensor;
      CHECK_THROWS(parse(bytes, &tensor), ErrorCode::kCorruption);
    }
  }
}

// A flipped bit in the pickle must be noticed: it could be a dimension.
TEST(zip_parse_refuses_every_changed_byte_of_the_pickle) {
  for (const char* name : kPlainItems) {
    const std::vector<std::byte> whole = check::corpus(name);
    MemoryReader reader(whole);
    for (const dcpx::ZipRecord& record : list_zip_records(reader, whole.size())) {
      if (record.name.find("data.pkl") == std::string::npos) continue;
      for (std::uint64_t i = 0; i < record.nbytes; ++i) {
        std::vector<std::byte> bytes = whole;
        bytes[record.offset + i] ^= std::byte{1};
        ParsedTensor tensor;
        CHECK_THROWS(parse(bytes, &tensor), ErrorCode::kCorruption);
      }
    }
  }
}

TEST(zip_parse_names_the_file_and_the_place_in_it) {
  class Elsewhere : public MemoryReader {
   public:
    using MemoryReader::MemoryReader;
    std::string_view path() const override { return "__0_0.distcp"; }
    std::uint64_t origin() const override { return 1000; }
  };
  const std::vector<std::byte> bytes(100);
  Elsewhere reader(bytes);
  ParsedTensor tensor;
  try {
    parse_zip_item(reader, bytes.size(), &tensor);
  } catch (const dcpx::Error& error) {
    CHECK_EQ(error.path, "__0_0.distcp");
    CHECK_EQ(error.offset, 1000);
    CHECK_EQ(error.nbytes, 100);
    return;
  }
  CHECK(false);
}

}  // namespace
