#include <string>
#include <string_view>

#include "check.h"
#include "unpickled_invariants.h"

namespace {

using dcpx::UnpickledColumns;

bool unpickle(const std::string& pickle, UnpickledColumns* columns) {
  // A copy of the exact size, so that ASan sees a read beyond the end.
  static std::vector<std::byte> exact;
  exact.assign(reinterpret_cast<const std::byte*>(pickle.data()),
               reinterpret_cast<const std::byte*>(pickle.data() + pickle.size()));
  exact.shrink_to_fit();
  const bool is_known = dcpx::unpickle_metadata(exact.data(), exact.size(), {1, 2}, columns);
  CHECK(!is_known || check::are_whole(*columns, exact.data(), exact.size()));
  return is_known;
}

bool is_taken(const std::string& pickle) {
  UnpickledColumns columns;
  return unpickle(pickle, &columns);
}

std::string corpus(const std::string& name) {
  const std::vector<std::byte> bytes = check::corpus("metadata_unpickle/" + name);
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

TEST(metadata_unpickle_of_a_small_metadata_of_every_protocol_is_its_columns) {
  for (const char* name : {"p2.pkl", "p3.pkl", "p4.pkl", "p5.pkl", "p4_optimized.pkl"}) {
    UnpickledColumns c;
    CHECK(unpickle(corpus(name), &c));
    CHECK_EQ(c.entry_kind.size(), 3U);
    CHECK(c.entry_kind[2] == 1);
    CHECK(c.tensor_sizes == std::vector<std::int64_t>({4, 3}));
    CHECK(c.chunk_offsets == std::vector<std::int64_t>({0, 0, 2, 0}));
    CHECK(c.storage_ndim == std::vector<std::int64_t>({2, 2, 0, -1}));
    CHECK(c.storage_bytes == std::vector<std::int64_t>({1500, 1500, 1300, 500}));
    CHECK(c.strings[static_cast<std::size_t>(c.entry_fqn[0])] == "model.weight");
    CHECK(c.strings[static_cast<std::size_t>(c.tensor_layout[0])] == "torch.strided");
    CHECK_EQ(c.descriptors.size(), 1U);
    CHECK(c.has_planner && c.storage_meta.has_value());
  }
}

TEST(metadata_unpickle_of_every_truncation_and_of_more_is_declined) {
  for (const char* name : {"p2.pkl", "p4.pkl"}) {
    const std::string whole = corpus(name);
    CHECK(is_taken(whole));
    for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
      CHECK(!is_taken(whole.substr(0, nbytes)));
    }
    CHECK(!is_taken(whole + '.'));
  }
}

TEST(metadata_unpickle_of_every_changed_byte_is_whole_or_declined) {
  for (const char* name : {"p2.pkl", "p4.pkl"}) {
    const std::string whole = corpus(name);
    for (std::size_t at = 0; at < whole.size(); ++at) {
      for (const int change : {1, 0x80, 0xff}) {
        std::string changed = whole;
        changed[at] = static_cast<char>(changed[at] ^ change);
        is_taken(changed);
      }
    }
  }
}

TEST(metadata_unpickle_of_what_is_no_metadata_is_declined) {
  using std::operator""s;
  const std::string chunk = "ctorch.distributed.checkpoint.metadata\nChunkStorageMetadata\n)\x81}"s;
  CHECK(!is_taken("\x80\x02"s + "]q\x00h\x00."s));
  CHECK(!is_taken("\x80\x02"s + chunk + "q\x00h\x00."s));
  CHECK(!is_taken("\x80\x02"s + std::string(100000, '(') + '.'));
}

}  // namespace
