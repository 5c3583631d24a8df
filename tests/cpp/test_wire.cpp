// Messages between ranks: what was put comes back, what is damaged is refused.
#include <cstdint>
#include <string>
#include <vector>

#include "check.h"
#include "common/error.h"
#include "format/wire.h"

namespace {

using dcpx::ErrorCode;
using dcpx::wire::Reader;
using dcpx::wire::Writer;

constexpr std::uint64_t kNumbers[] = {0,      1,          0x7f,      0x80,           0x3fff,
                                      0x4000, 0xffffffff, INT64_MAX, UINT64_MAX - 1, UINT64_MAX};

}  // namespace

TEST(wire_numbers_come_back_and_none_is_read_past_its_end) {
  for (const std::uint64_t number : kNumbers) {
    Writer writer;
    writer.put(number);
    writer.put_signed(static_cast<std::int64_t>(number));
    Reader reader(writer.bytes());
    CHECK_EQ(reader.get(), number);
    CHECK_EQ(reader.get_signed(), static_cast<std::int64_t>(number));
    CHECK(reader.is_done());
    CHECK_THROWS(reader.get(), ErrorCode::kPlan);
    Writer alone;
    alone.put(number);
    for (std::size_t nbytes = 0; nbytes < alone.bytes().size(); ++nbytes) {
      Reader cut(std::string_view(alone.bytes()).substr(0, nbytes));
      CHECK_THROWS(cut.get(), ErrorCode::kPlan);
    }
  }
}

TEST(wire_number_of_more_than_64_bits_is_refused) {
  const std::string ten(9, '\xff');
  CHECK_EQ(Reader(ten + '\x01').get(), UINT64_MAX);
  for (const std::string& last :
       {std::string("\x02"), std::string("\x7f"), std::string("\xff\x01")}) {
    const std::string bytes = ten + last;
    Reader reader(bytes);
    CHECK_THROWS(reader.get(), ErrorCode::kPlan);
  }
}

TEST(wire_texts_and_rows_lie_inside) {
  Reader reader("abc");
  CHECK_EQ(reader.get_text(2), std::string_view("ab"));
  CHECK_THROWS(reader.get_text(2), ErrorCode::kPlan);
  CHECK_THROWS(reader.get_text(UINT64_MAX), ErrorCode::kPlan);
  const std::string five("\x05");
  CHECK_EQ(Reader(five).get_below(6), std::size_t{5});
  Reader below(five);
  CHECK_THROWS(below.get_below(5), ErrorCode::kPlan);
}

TEST(wire_columns_are_split_where_they_were_joined_and_nowhere_else) {
  std::vector<Writer> columns(3);
  columns[0].put_text("first");
  columns[2].put(1U << 20);
  const std::string message = dcpx::wire::join(columns);
  std::vector<Reader> found = dcpx::wire::split(message, 3);
  CHECK_EQ(found[0].get_text(5), std::string_view("first"));
  CHECK(found[1].is_done());
  CHECK_THROWS(dcpx::wire::check_done(found), ErrorCode::kPlan);
  CHECK_EQ(found[2].get(), std::uint64_t{1U << 20});
  dcpx::wire::check_done(found);
  CHECK_THROWS(dcpx::wire::split(message, 2), ErrorCode::kPlan);
  CHECK_THROWS(dcpx::wire::split(message, 4), ErrorCode::kPlan);
  CHECK_THROWS(dcpx::wire::split(message + "x", 3), ErrorCode::kPlan);
  for (std::size_t nbytes = 0; nbytes < message.size(); ++nbytes) {
    CHECK_THROWS(dcpx::wire::split(message.substr(0, nbytes), 3), ErrorCode::kPlan);
  }
}

TEST(wire_rows_have_one_number_each) {
  dcpx::wire::RowTable rows;
  for (int round = 0; round < 2; ++round) {
    for (std::int64_t i = 0; i < 1000; ++i) {
      const std::int64_t row[] = {i, -i, i * i};
      bool is_new = false;
      CHECK_EQ(rows.add(row, static_cast<std::size_t>(i % 4), &is_new) <= 1000U, true);
      CHECK(!is_new || round == 0);
    }
  }
}
