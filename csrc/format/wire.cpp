#include "format/wire.h"

#include <algorithm>

namespace dcpx::wire {
namespace {

constexpr char kMagic[2] = {'\xdc', 1};  // 1: the form of the message

std::uint64_t hash_of(const std::int64_t* values, std::size_t count) {
  std::uint64_t hash = 0x9e3779b97f4a7c15u + count;
  for (std::size_t i = 0; i < count; ++i) {
    hash = (hash ^ static_cast<std::uint64_t>(values[i])) * 0xff51afd7ed558ccdu;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace

void refuse(const char* what) {
  throw Error(ErrorCode::kPlan, std::string("a plan as a rank sent it is damaged: ") + what);
}

std::string join(const std::vector<Writer>& columns) {
  Writer head;
  head.put_text({kMagic, sizeof kMagic});
  std::size_t nbytes = 0;
  for (const Writer& column : columns) {
    head.put(column.bytes().size());
    nbytes += column.bytes().size();
  }
  std::string message = head.bytes();
  message.reserve(message.size() + nbytes);
  for (const Writer& column : columns) message += column.bytes();
  return message;
}

std::vector<Reader> split(std::string_view message, std::size_t count) {
  Reader rest(message);
  if (rest.get_text(sizeof kMagic) != std::string_view(kMagic, sizeof kMagic)) {
    refuse("it does not begin as one");
  }
  std::vector<std::uint64_t> lengths(count);
  for (std::uint64_t& length : lengths) length = rest.get();
  std::vector<Reader> columns;
  columns.reserve(count);
  for (const std::uint64_t length : lengths) columns.emplace_back(rest.get_text(length));
  if (!rest.is_done()) refuse("it does not end with its last column");
  return columns;
}

void check_done(const std::vector<Reader>& columns) {
  for (const Reader& column : columns) {
    if (!column.is_done()) refuse("a column is longer than what it belongs to");
  }
}

RowTable::RowTable() : slots_(64, 0) {}

bool RowTable::is_row(std::size_t number, const std::int64_t* values, std::size_t count) const {
  const std::size_t begin = number == 0 ? 0 : ends_[number - 1];
  return ends_[number] - begin == count &&
         std::equal(values, values + count, values_.data() + begin);
}

std::size_t RowTable::add(const std::int64_t* values, std::size_t count, bool* is_new) {
  const std::uint64_t hash = hash_of(values, count);
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = static_cast<std::size_t>(hash) & mask;
  for (; slots_[slot] != 0; slot = (slot + 1) & mask) {
    const std::size_t number = slots_[slot] - 1;
    if (hashes_[number] == hash && is_row(number, values, count)) {
      *is_new = false;
      return number;
    }
  }
  const std::size_t number = ends_.size();
  DCPX_CHECK(number < UINT32_MAX - 1, "more rows than a plan has");
  values_.insert(values_.end(), values, values + count);
  ends_.push_back(values_.size());
  hashes_.push_back(hash);
  slots_[slot] = static_cast<std::uint32_t>(number + 1);
  if (2 * ends_.size() > slots_.size()) grow();
  *is_new = true;
  return number;
}

void RowTable::grow() {
  std::vector<std::uint32_t> slots(2 * slots_.size(), 0);
  const std::size_t mask = slots.size() - 1;
  for (std::size_t number = 0; number < hashes_.size(); ++number) {
    std::size_t slot = static_cast<std::size_t>(hashes_[number]) & mask;
    while (slots[slot] != 0) slot = (slot + 1) & mask;
    slots[slot] = static_cast<std::uint32_t>(number + 1);
  }
  slots_.swap(slots);
}

}  // namespace dcpx::wire
