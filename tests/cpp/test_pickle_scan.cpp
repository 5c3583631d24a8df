#include <string_view>

#include "check.h"
#include "format/pickle_scan.h"

namespace {

using dcpx::ErrorCode;

dcpx::PickleScan scan(std::string_view pickle, dcpx::PickleLimits limits = {}) {
  // A copy of the exact size, so that ASan sees a read beyond the end.
  const std::vector<char> exact(pickle.begin(), pickle.end());
  return dcpx::scan_pickle(reinterpret_cast<const std::byte*>(exact.data()), exact.size(), limits);
}

using std::operator""sv;

TEST(pickle_scan_stops_behind_stop) {
  const dcpx::PickleScan found = scan(
      "\x80\x02]q\x00(K\x01K\x02"
      "e.trailer"sv);
  CHECK_EQ(found.stop_bytes, 12U);
  CHECK_EQ(found.max_memo, 1U);
  CHECK_EQ(found.ops, 8U);
}

TEST(pickle_scan_weighs_objects) {
  dcpx::PickleLimits limits;
  limits.base_cost = 2000;
  CHECK_EQ(scan("(]]l."sv, limits).stop_bytes, 5U);
  for (const char* flood :
       {"]", "}", "\x8f", "N\x85", "(t", "(]l", "]K\x01a", "\x8c\x01z", "N\x94"}) {
    std::string pickle = "(";
    for (int i = 0; i < 1000; ++i) pickle += flood;
    CHECK_THROWS(scan(pickle + "l.", limits), ErrorCode::kCorruption);
    CHECK_EQ(scan(pickle + "l.").stop_bytes, pickle.size() + 2);
  }
  std::string numbers = "(";  // earn what they take
  for (int i = 0; i < 1000; ++i) numbers += "G12345678";
  CHECK_EQ(scan(numbers + "l.", limits).stop_bytes, numbers.size() + 2);
  // A text of ASCII and one wide letter takes four bytes for each of its own.
  const std::string text = std::string("X\x00\x20\x00\x00", 5) + std::string(8188, 'a');
  CHECK_EQ(scan(text + "abcd.", limits).stop_bytes, 8198U);
  CHECK_THROWS(scan(text + "\xf0\x9f\x98\x80.", limits), ErrorCode::kCorruption);
}

TEST(pickle_scan_of_every_truncation_throws) {
  const std::vector<std::byte> whole = check::corpus("pickle_scan/mixed_p2.pkl");
  for (std::size_t nbytes = 0; nbytes < whole.size(); ++nbytes) {
    CHECK_THROWS(dcpx::scan_pickle(whole.data(), nbytes, {}), ErrorCode::kCorruption);
  }
  CHECK_EQ(dcpx::scan_pickle(whole.data(), whole.size(), {}).stop_bytes, whole.size());
}

TEST(pickle_scan_of_every_single_opcode_stays_inside) {
  for (unsigned op = 0; op < 256; ++op) {
    for (std::size_t nbytes = 0; nbytes < 12; ++nbytes) {
      for (const char fill : {'\0', '\xFF', '\n', '1'}) {
        std::string pickle(1, static_cast<char>(op));
        pickle.append(nbytes, fill);
        try {
          scan(pickle);
        } catch (const dcpx::Error& error) {
          CHECK(error.code() == ErrorCode::kCorruption);
        }
      }
    }
  }
}

TEST(pickle_scan_limits_are_honoured_to_the_last_unit) {
  dcpx::PickleLimits limits;
  limits.max_ops = 3;
  scan("NN."sv, limits);
  CHECK_THROWS(scan("NNN."sv, limits), ErrorCode::kCorruption);
  limits = {};
  limits.max_bytes = 2;
  scan("N."sv, limits);
  CHECK_THROWS(scan("NN."sv, limits), ErrorCode::kCorruption);
  limits = {};
  limits.max_stack = 2;
  scan("NN."sv, limits);
  CHECK_THROWS(scan("NNN."sv, limits), ErrorCode::kCorruption);
  limits = {};
  limits.max_depth = 2;
  scan("((N."sv, limits);
  CHECK_THROWS(scan("(((N."sv, limits), ErrorCode::kCorruption);
  scan(")\x85."sv, limits);
  CHECK_THROWS(scan(")\x85\x85."sv, limits), ErrorCode::kCorruption);
}

}  // namespace
