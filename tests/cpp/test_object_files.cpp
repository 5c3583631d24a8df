// An InputFile over a store: what is kept of it, what is asked for, and that nothing is asked
// twice. Items of others, whose zips are found with few requests.
#include <algorithm>
#include <fstream>
#include <numeric>

#include "check.h"
#include "engine/stored_file.h"
#include "format/crc32.h"
#include "format/zip_item.h"
#include "io/file.h"
#include "memory_store.h"
#include "random_source.h"
#include "scratch_dir.h"

namespace {

using dcpx::ErrorCode;
using dcpx::engine::InputFolder;
using dcpx::engine::LocatedItem;
using dcpx::engine::LocatedKind;
using dcpx::engine::StoredFile;
using dcpx::engine::WantedItem;
using dcpx::io::InputFile;
using dcpx::io::kObjectEndBytes;

constexpr std::uint64_t kKiB = 1 << 10;

// An object "f" of random bytes, open, with what is asked for it.
struct Opened {
  explicit Opened(std::uint64_t nbytes, std::uint64_t salt = 1)
      : store(std::make_shared<MemoryStore>()) {
    RandomSource random(800 + salt);
    bytes = random.bytes(nbytes);
    store->put("f", bytes);
    file = InputFile::open(store, "s3://bucket/p", "f");
    CHECK_EQ(store->take_looks(), 1U);
    CHECK(store->take_reads().empty());
  }

  // Reads a range; returns the requests that it took.
  std::vector<Request> read(std::uint64_t offset, std::uint64_t nbytes) const {
    std::vector<std::byte> found(nbytes);
    file.read_at(found.data(), nbytes, offset);
    CHECK(std::equal(found.begin(), found.end(),
                     bytes.begin() + static_cast<std::ptrdiff_t>(offset)));
    CHECK_EQ(store->take_looks(), 0U);
    return store->take_reads();
  }

  std::shared_ptr<MemoryStore> store;
  std::vector<std::byte> bytes;
  InputFile file;
};

using Requests = std::vector<Request>;

TEST(read_behind_the_end_is_short_and_asks_for_nothing) {
  for (const std::uint64_t size : {10UL, 4 * kObjectEndBytes}) {
    Opened object(size);
    std::vector<std::byte> into(100);
    for (const std::uint64_t offset : {size, size - 9, size + 5, size + (1UL << 40)}) {
      try {
        object.file.read_at(into.data(), 10, offset);
        CHECK(false);
      } catch (const dcpx::Error& error) {
        CHECK(error.code() == ErrorCode::kShortRead);
        CHECK_EQ(error.path, "s3://bucket/p/f");
        CHECK_EQ(error.offset, static_cast<std::int64_t>(offset));
        CHECK_EQ(error.nbytes, 10);
      }
      CHECK_THROWS(object.file.keep(offset, 10), ErrorCode::kShortRead);
    }
    CHECK(object.store->take_reads().empty());
    CHECK_EQ(object.store->take_looks(), 0U);
  }
}

TEST(kept_range_serves_reads_until_two_others_came_and_the_end_until_it_is_forgotten) {
  Opened object(2000 * kKiB);
  const auto keep = [&](std::uint64_t offset, std::uint64_t nbytes, std::uint64_t ahead = 0) {
    object.file.keep(offset, nbytes, ahead);
    return object.store->take_reads();
  };
  const std::uint64_t end = 2000 * kKiB;
  CHECK(keep(1000, 0).empty());
  CHECK(keep(end - 100, 100).empty());  // which the end has
  CHECK(keep(1000, 50, 30) == Requests({{"f", 1000, 80}}));
  CHECK(keep(1000, 50, 30).empty());
  CHECK(keep(1010, 70).empty());
  CHECK(object.read(1000, 80).empty());
  CHECK(object.read(1079, 1).empty());
  CHECK(object.read(999, 2) == Requests({{"f", 999, 2}}));
  CHECK(object.read(1079, 2) == Requests({{"f", 1079, 2}}));
  CHECK(keep(5000, 10) == Requests({{"f", 5000, 10}}));
  CHECK(object.read(1000, 80).empty() && object.read(5000, 10).empty());
  CHECK(keep(7000, 10) == Requests({{"f", 7000, 10}}));
  CHECK(object.read(1000, 1) == Requests({{"f", 1000, 1}}));
  CHECK(object.read(5000, 10).empty() && object.read(7000, 10).empty());
  CHECK(object.read(end - kObjectEndBytes, kObjectEndBytes).empty());
  CHECK(keep(end - 400 * kKiB, 10, 1 << 30) ==
        Requests({{"f", end - 400 * kKiB, 400 * kKiB}}));  // ahead ends with the object
  object.file.forget_all_but_end();
  CHECK(object.read(end - kObjectEndBytes, kObjectEndBytes).empty());
  CHECK(object.read(7000, 10) == Requests({{"f", 7000, 10}}));
  object.file.forget();
  CHECK(object.read(end - 1, 1) == Requests({{"f", end - 1, 1}}));
  object.file.forget_all_but_end();  // of nothing
  CHECK(object.read(end - 1, 1) == Requests({{"f", end - 1, 1}}));
}

// A store that answers with fewer bytes than it says.
class ShortStore : public MemoryStore {
 public:
  Object look(const std::string& name, std::uint64_t nbytes) override {
    return MemoryStore::look(name, nbytes - 1);
  }
};

TEST(names_that_leave_the_prefix_and_answers_of_another_length_are_refused) {
  const auto store = std::make_shared<MemoryStore>();
  for (const char* name : {"", "/f", "../f", "a/../f", "a//f", "./f", "f/"}) {
    CHECK_THROWS(InputFile::open(store, "p", name), ErrorCode::kCorruption);
  }
  CHECK_EQ(store->take_looks(), 0U);
  CHECK_THROWS(InputFile::open(store, "p", "missing"), ErrorCode::kStorage);
  const auto liar = std::make_shared<ShortStore>();
  liar->put("f", std::vector<std::byte>(2 * kObjectEndBytes));
  CHECK_THROWS(InputFile::open(liar, "p", "f"), ErrorCode::kPlan);
}

TEST(file_that_changed_is_noticed_by_its_tag) {
  Opened object(2 * kObjectEndBytes);
  const std::uint64_t inode = object.file.inode();
  CHECK_EQ(InputFile::open(object.store, "p", "f").inode(), inode);
  object.store->put("f", object.bytes);
  std::byte byte{};
  CHECK_THROWS(object.file.read_at(&byte, 1, 0), ErrorCode::kStorage);
  CHECK_THROWS(object.file.keep(0, 10), ErrorCode::kStorage);
  CHECK(InputFile::open(object.store, "p", "f").inode() != inode);
  const InputFolder folder{{}, object.store, "p"};
  StoredFile stored({"f", false, 0, {}, 0});
  stored.open(folder);
  stored.close();
  stored.open(folder);
  stored.close();
  object.store->put("f", object.bytes);
  CHECK_THROWS(stored.open(folder), ErrorCode::kCorruption);
}

const dcpx::TensorFraming kFloats{"torch", "FloatStorage", ""};

// Items as stock DCP writes them, one behind the other, in an object "g" of others.
struct Foreign {
  explicit Foreign(const std::vector<std::uint64_t>& payloads) {
    RandomSource random(820);
    for (const std::uint64_t nbytes : payloads) {
      const auto count = static_cast<std::int64_t>(nbytes / 4);
      const dcpx::ZipItem item({&kFloats, {count}, {1}, nbytes, 4});
      const std::vector<std::byte> payload = random.bytes(nbytes);
      wanted.push_back({0, bytes.size(), item.item_bytes(0), true});
      payload_offsets.push_back(bytes.size() + item.head_bytes());
      bytes.resize(bytes.size() + item.head_bytes());
      item.write_head(0, &bytes[bytes.size() - item.head_bytes()]);
      bytes.insert(bytes.end(), payload.begin(), payload.end());
      bytes.resize(bytes.size() + item.tail_bytes(0));
      item.write_tail(0, dcpx::crc32(0, payload.data(), nbytes),
                      &bytes[bytes.size() - item.tail_bytes(0)]);
    }
  }

  // Locates the items in this order; returns how many requests that took.
  std::size_t requests(const std::vector<std::uint32_t>& order) const {
    const auto store = std::make_shared<MemoryStore>();
    store->put("g", bytes);
    StoredFile stored({"g", false, 0, {}, 0});
    stored.open({{}, store, "p"});
    std::vector<LocatedItem> located(wanted.size());
    stored.locate(wanted, order, true, located);
    for (const std::uint32_t i : order) {
      CHECK(located[i].kind == LocatedKind::kPlain);
      CHECK_EQ(located[i].payload_offset, payload_offsets[i]);
      CHECK_EQ(located[i].storage_name, "FloatStorage");
    }
    CHECK_EQ(store->take_looks(), 1U);
    const std::size_t reads = store->take_reads().size();
    std::byte byte{};
    stored.file().read_at(&byte, 1, bytes.size() - 1);
    CHECK_EQ(store->take_reads().size(), 1U);  // nothing is kept
    return reads;
  }
  std::size_t requests_in_any_order() const {
    std::vector<std::uint32_t> order(wanted.size());
    std::iota(order.begin(), order.end(), 0U);
    const std::size_t reads = requests(order);
    std::reverse(order.begin(), order.end());
    CHECK_EQ(requests(order), reads);
    RandomSource random(821);
    std::shuffle(order.begin(), order.end(), random.engine());
    CHECK_EQ(requests(order), reads);
    return reads;
  }

  std::vector<std::byte> bytes;
  std::vector<WantedItem> wanted;
  std::vector<std::uint64_t> payload_offsets;
};

TEST(small_items_of_others_are_located_many_at_a_request) {
  const Foreign foreign(std::vector<std::uint64_t>(400, 4000));
  const std::uint64_t ahead = 256 * kKiB;
  CHECK(foreign.bytes.size() > 6 * ahead);
  CHECK_EQ(foreign.requests_in_any_order(), foreign.bytes.size() / ahead);  // and the end
}

// One for the first begin, one for each end with the begin of the next; the last end is there.
TEST(large_items_of_others_take_a_request_each) {
  const Foreign foreign({1 << 20, 800'000, 1 << 20, 2 << 20, 600'000});
  CHECK_EQ(foreign.requests_in_any_order(), 5U);
  CHECK_EQ(foreign.requests({3}), 2U);
}

TEST(items_of_others_behind_the_end_are_refused_without_a_request) {
  const Foreign foreign({4000});
  const auto store = std::make_shared<MemoryStore>();
  store->put("g", foreign.bytes);
  StoredFile stored({"g", false, 0, {}, 0});
  stored.open({{}, store, "p"});
  std::vector<LocatedItem> located(1);
  for (const WantedItem& wanted : {WantedItem{0, 0, foreign.bytes.size() + 1, true},
                                   WantedItem{0, foreign.bytes.size() + 1, 0, true}}) {
    CHECK_THROWS(stored.locate({wanted}, {0}, true, located), ErrorCode::kShortRead);
  }
  CHECK_THROWS(stored.locate({WantedItem{0, 1, ~0UL - 1, true}}, {0}, true, located),
               ErrorCode::kCorruption);
  CHECK(store->take_reads().empty());
}

}  // namespace
