#include "format/pickle_writer.h"

#include <algorithm>
#include <utility>

#include "common/bytes.h"

namespace dcpx {

using namespace pickle_op;

PickleTexts::PickleTexts(const Column<char>& text, const Column<std::int64_t>& ends) {
  pool_.reserve(ends.count);
  std::int64_t begin = 0;
  for (std::size_t at = 0; at < ends.count; ++at) {
    const std::int64_t end = ends[at];
    DCPX_CHECK(begin <= end && static_cast<std::uint64_t>(end) <= text.count,
               "the ends of a pool's strings do not ascend within its text");
    pool_.emplace_back(text.data + begin, static_cast<std::size_t>(end - begin));
    begin = end;
  }
}

std::size_t PickleTexts::add(std::string_view text) {
  const auto found = numbers_.find(text);
  if (found != numbers_.end()) return found->second;
  const std::size_t number = others_.size();
  numbers_.emplace(others_.emplace_back(text), number);
  return number;
}

void PickleTexts::number_pool() {
  pool_numbers_.reserve(pool_.size());
  for (const std::string_view text : pool_) {
    const auto found = numbers_.find(text);
    const std::size_t own = others_.size() + pool_numbers_.size();
    pool_numbers_.push_back(found == numbers_.end() ? own : found->second);
  }
}

std::string_view PickleTexts::operator[](std::size_t number) const {
  return number < others_.size() ? others_[number] : pool_.at(number - others_.size());
}

std::string_view PickleTexts::pool_text(std::int64_t at) const {
  DCPX_CHECK(at >= 0 && static_cast<std::uint64_t>(at) < pool_.size(),
             "a column of metadata names no string of the pool");
  return pool_[static_cast<std::size_t>(at)];
}

std::size_t PickleTexts::of_pool(std::int64_t at) const {
  DCPX_CHECK(at >= 0 && static_cast<std::uint64_t>(at) < pool_numbers_.size(),
             "a column of metadata names no string of the pool");
  return pool_numbers_[static_cast<std::size_t>(at)];
}

bool PickleWriter::Size::operator==(const Size& other) const {
  return count == other.count && std::equal(values, values + count, other.values);
}

std::size_t PickleWriter::SizeHash::operator()(const Size& size) const noexcept {
  std::uint64_t hash = size.count;
  for (std::size_t at = 0; at < size.count; ++at) {
    hash = (hash ^ static_cast<std::uint64_t>(size.values[at])) * 0x9E3779B97F4A7C15U;
    hash ^= hash >> 32;
  }
  return hash;
}

PickleWriter::PickleWriter(const PickleTexts& texts) : texts_(texts), text_memos_(texts.count()) {
  op(kProto);
  put(out_, std::uint8_t{4});
}

bool PickleWriter::get(Memo memo) {
  const std::uint32_t number = memo.number_;
  if (number == Memo::kNone) return false;
  if (number <= 0xFF) {
    op(kBinget);
    put(out_, static_cast<std::uint8_t>(number));
  } else {
    op(kLongBinget);
    put(out_, number);
  }
  return true;
}

void PickleWriter::memoize(Memo& memo) {
  DCPX_CHECK(memo_count_ < Memo::kNone, "a pickle's memo holds less than 2**32 objects");
  op(kMemoize);
  memo.number_ = memo_count_++;
}

void PickleWriter::text(std::size_t number) {
  Memo& memo = text_memos_.at(number);
  if (get(memo)) return;
  const std::string_view text = texts_[number];
  if (text.size() <= 0xFF) {
    op(kShortBinunicode);
    put(out_, static_cast<std::uint8_t>(text.size()));
  } else {
    op(kBinunicode8);
    put(out_, static_cast<std::uint64_t>(text.size()));
  }
  put_bytes(out_, text);
  memoize(memo);
}

void PickleWriter::integer(std::int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    op(kBinint1);
    put(out_, static_cast<std::uint8_t>(value));
  } else if (value >= 0 && value <= 0xFFFF) {
    op(kBinint2);
    put(out_, static_cast<std::uint16_t>(value));
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    op(kBinint);
    put(out_, static_cast<std::int32_t>(value));
  } else {
    // Room for every bit of the absolute value and one of the sign: -2**63 takes nine bytes.
    const std::uint64_t bits = static_cast<std::uint64_t>(value);
    const std::uint64_t magnitude = value < 0 ? ~bits + 1 : bits;
    const int nbytes = (64 - __builtin_clzll(magnitude)) / 8 + 1;
    op(kLong1);
    put(out_, static_cast<std::uint8_t>(nbytes));
    for (int at = 0; at < nbytes; ++at) {
      put(out_, static_cast<std::uint8_t>(at < 8 ? bits >> (8 * at) : 0xFF));
    }
  }
}

void PickleWriter::boolean(bool value) { op(value ? kNewtrue : kNewfalse); }

void PickleWriter::global(std::size_t module, std::size_t name, Memo& memo) {
  if (get(memo)) return;
  text(module);
  text(name);
  op(kStackGlobal);
  memoize(memo);
}

void PickleWriter::size(const Class& cls, const std::int64_t* values, std::size_t count) {
  Memo& memo = size_memos_[{values, count}];
  if (get(memo)) return;
  global(cls.module, cls.name, cls.memo);
  tuple(count, [&](std::size_t at) { integer(values[at]); });
  op(kTuple1);
  op(kReduce);
  memoize(memo);
}

std::vector<std::byte> PickleWriter::finish() {
  op(kStop);
  return std::move(out_);
}

}  // namespace dcpx
