#include "format/pickle_scan.h"

#include <cstring>
#include <string>
#include <vector>

#include "common/bytes.h"
#include "format/pickle_opcodes.h"
#include "format/pickle_values.h"

namespace dcpx {
namespace {

using namespace pickle_op;
using namespace pickle_value;

// Mirrors the unpickler's stack and memo by one Slot a value.
class Scanner {  // Not thread-safe. Lives for one scan.
 public:
  Scanner(const std::byte* data, std::size_t nbytes, const PickleLimits& limits)
      : begin_(data), at_(data), end_(data + nbytes), limits_(limits) {}

  PickleScan run() {
    if (static_cast<std::uint64_t>(end_ - begin_) > limits_.max_bytes) {
      fail("is longer than " + std::to_string(limits_.max_bytes) + " B");
    }
    while (!is_stopped_) {
      op_at_ = at_;
      if (at_ == end_) fail("ends without STOP");
      if (++ops_ > limits_.max_ops) fail("has more than the allowed opcodes");
      step(std::to_integer<std::uint8_t>(*at_++));
    }
    return {static_cast<std::uint64_t>(at_ - begin_), ops_, memo_.size(), compound_keys_, cost_};
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw corruption_error("pickle", op_at_ - begin_, std::min<std::ptrdiff_t>(1, end_ - op_at_),
                           what);
  }

  void charge(std::uint64_t nbytes) {
    cost_ += nbytes;
    if (cost_ <= limits_.base_cost + static_cast<std::uint64_t>(end_ - begin_)) return;
    const auto walked = static_cast<std::uint64_t>(at_ - begin_);
    const std::uint64_t by_states =
        std::min(kEarnedByState * states_, limits_.states_earn_per_byte * walked);
    if (cost_ <= std::max(kEarnedPerByte * said_bytes_, by_states)) return;
    fail("takes more than " + std::to_string(cost_ / 1'000'000) + " MB of memory for its " +
         std::to_string(end_ - begin_) + " B");
  }

  // Arguments.

  void skip(std::uint64_t nbytes) {
    if (nbytes > static_cast<std::uint64_t>(end_ - at_)) fail("declares more bytes than follow");
    at_ += nbytes;
  }

  template <typename T>
  T number() {
    const std::byte* from = at_;
    skip(sizeof(T));
    return get<T>(from);
  }

  void text(std::uint64_t nbytes, bool is_unicode) {
    const std::byte* from = at_;
    skip(nbytes);
    const bool is_long = is_unicode && nbytes >= kWideText;
    said_bytes_ += std::min<std::uint64_t>(nbytes, kMostOfText);
    charge(kTextCost + nbytes * (is_long ? width_of(from, nbytes) : 1));
    push(kLeaf);
  }

  void number_of(std::uint64_t nbytes) {
    skip(nbytes);
    said_bytes_ += nbytes;
    if (nbytes > 1) charge(kNumberCost);  // smaller ones are there
    push(kLeaf);
  }

  std::size_t line() {  // returns its length without the newline
    const void* found = std::memchr(at_, '\n', static_cast<std::size_t>(end_ - at_));
    if (found == nullptr) fail("has a text argument without end");
    const std::byte* newline = static_cast<const std::byte*>(found);
    const auto nbytes = static_cast<std::size_t>(newline - at_);
    at_ = newline + 1;
    return nbytes;
  }

  void number_line() {
    const std::size_t nbytes = line();
    if (nbytes > kMaxNumberBytes) fail("holds a number of too many digits");
    said_bytes_ += std::min<std::uint64_t>(nbytes, kMostOfText);
    charge(kNumberCost + nbytes);
    push(nbytes > kSmallNumberDigits ? kLargeNumber : kLeaf);
  }

  void text_line() {
    const std::size_t nbytes = line();
    charge(kTextCost + 4 * nbytes);  // with escapes
    push(kLeaf);
  }

  std::uint64_t index_line() {
    const std::byte* from = at_;
    const std::size_t nbytes = line();
    if (nbytes == 0 || nbytes > 10) fail("has a malformed memo index");
    std::uint64_t index = 0;
    for (std::size_t i = 0; i < nbytes; ++i) {
      const auto digit = std::to_integer<unsigned>(from[i]) - unsigned{'0'};
      if (digit > 9) fail("has a malformed memo index");
      index = index * 10 + digit;
    }
    return index;
  }

  void long1() {
    const std::size_t nbytes = number<std::uint8_t>();
    skip(nbytes);
    said_bytes_ += std::min<std::uint64_t>(nbytes, kMostOfText);
    charge(kNumberCost + nbytes);
    push(nbytes > kSmallNumberBytes ? kLargeNumber : kLeaf);
  }

  // Lengths that Python reads as int32.
  void signed_counted(std::size_t max_bytes, const Slot& made = kLeaf) {
    const auto nbytes = number<std::int32_t>();
    if (nbytes < 0) fail("declares a negative length");
    if (static_cast<std::size_t>(nbytes) > max_bytes) fail("holds a number of too many bytes");
    skip(static_cast<std::uint64_t>(nbytes));
    charge(kTextCost + static_cast<std::uint64_t>(nbytes));
    push(made);
  }

  // The stack. Values below the last mark are out of reach, as in the unpickler.

  std::size_t above_mark() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  void need(std::size_t count) const {
    if (above_mark() < count) fail("takes a value from an empty stack");
  }

  void push(const Slot& slot) {
    if (slot.depth > limits_.max_depth) fail("nests deeper than the limit");
    if (stack_.size() >= limits_.max_stack) fail("holds too many values on the stack");
    stack_.push_back(slot);
    if (stack_.size() <= most_stacked_) return;
    most_stacked_ = stack_.size();
    charge(kPlaceCost);
  }

  // Takes the last `count` values and adds them to `container`, which gets one deeper than they.
  void take_into(Slot* container, std::size_t count) {
    std::uint64_t nodes = container->nodes;
    container->width = std::min<std::size_t>(container->width + count, kMostHeld) & kMostHeld;
    for (; count > 0; --count) {
      container->depth = std::max(container->depth, stack_.back().depth + 1);
      nodes += stack_.back().nodes;
      stack_.pop_back();
    }
    container->nodes = static_cast<std::uint32_t>(std::min(nodes, kMostValues));
  }

  void make(std::uint64_t nbytes) {  // an empty container
    charge(nbytes);
    push(kEmptyContainer);
  }

  // Replaces the last `count` values by one that contains them.
  void wrap(std::size_t count, std::uint64_t nbytes = kTupleCost) {
    need(count);
    Slot container = kEmptyContainer;
    container.is_compound = true;
    take_into(&container, count);
    charge((nbytes == kTupleCost && is_plain(container) ? kPlainTupleCost : nbytes) +
           kPartCost * count);
    push(container);
  }

  // Puts the last `count` values into the container below them.
  void absorb(std::size_t count, std::uint64_t first_cost) {
    need(count + 1);
    Slot container = stack_[stack_.size() - count - 1];
    const bool was_empty = container.width == 0;
    const bool was_plain = is_plain(container);
    take_into(&container, count);
    std::uint64_t each = first_cost == kFirstPairCost ? 0 : kHeldCost;  // pairs: as keys
    if (container.is_compound) each = kCalledMemberCost;
    charge(count * each + (was_empty && count > 0 ? first_cost : 0) +
           (was_plain && !is_plain(container) ? kSettledCost : 0));
    stack_.pop_back();
    push(container);
    if (container.memo != kNoMemo) memo_[container.memo] = container;
  }

  // Replaces a callable and what it gets, `count` values in all, by what it returns.
  void call(std::size_t count) {
    need(count);
    for (std::size_t i = stack_.size() - count + 1; i < stack_.size(); ++i) {
      arguments_ += stack_[i].width;
    }
    const auto nbytes = static_cast<std::uint64_t>(end_ - begin_);
    if (arguments_ > kArgumentsBase + kArgumentsPerByte * nbytes) {
      fail("gives far more arguments to calls than it has bytes");
    }
    wrap(count, kCallCost);
  }

  // An object of a class with a state is hashed by identity, or not at all.
  void set_state() {
    need(2);
    stack_[stack_.size() - 2].is_compound = false;
    ++states_;
    absorb(1, 0);
  }

  // Charges every `stride`th of the last `count` values for being hashed and held.
  void hash_keys(std::size_t count, std::size_t stride) {
    need(count);
    const bool is_below = above_mark() > count;
    const std::uint64_t held = is_below ? stack_[stack_.size() - count - 1].width + count : count;
    charge(count / stride * (held < kManyMembers ? kMemberCost : kOfManyCost));
    for (std::size_t i = stack_.size() - count; i < stack_.size(); i += stride) {
      key_nodes_ += stack_[i].nodes;
      if (stack_[i].is_compound) ++compound_keys_;
    }
    const auto nbytes = static_cast<std::uint64_t>(end_ - begin_);
    if (key_nodes_ > kKeyNodesBase + kKeyNodesPerByte * nbytes) fail("has keys that explode");
  }

  std::size_t hash_pairs(std::size_t count) {
    if (count % 2 != 0) fail("gives a dict a key without value");
    hash_keys(count, 2);
    return count;
  }

  std::size_t hash_members(std::size_t count) {
    hash_keys(count, 1);
    return count;
  }

  void mark() {
    if (marks_.size() >= limits_.max_depth) fail("nests marks deeper than the limit");
    marks_.push_back(stack_.size());
  }

  std::size_t pop_mark() {  // returns how many values lay above it
    if (marks_.empty()) fail("asks for a mark that is not there");
    const std::size_t count = above_mark();
    marks_.pop_back();
    return count;
  }

  void pop() {
    if (!marks_.empty() && above_mark() == 0) {
      marks_.pop_back();  // the unpickler lets POP remove a mark
      return;
    }
    need(1);
    stack_.pop_back();
  }

  // The memo.

  void put_memo(std::uint64_t index) {
    need(1);
    if (index >= memo_used_ + kMemoSlack) fail("puts far beyond the end of the memo");
    charge(kMemoCost);
    if (index >= memo_.size()) memo_.resize(static_cast<std::size_t>(index) + 1);
    Slot& slot = memo_[static_cast<std::size_t>(index)];
    if (slot.memo == kNoMemo) ++memo_used_;
    stack_.back().memo = static_cast<std::uint32_t>(index);
    slot = stack_.back();
  }

  void get_memo(std::uint64_t index) {
    if (index >= memo_.size() || memo_[static_cast<std::size_t>(index)].memo == kNoMemo) {
      fail("asks the memo for what was never put");
    }
    push(memo_[static_cast<std::size_t>(index)]);
  }

  void check_protocol() {
    if (number<std::uint8_t>() > 5) fail("is of an unknown protocol");
  }

  void check_frame() {
    const auto nbytes = number<std::uint64_t>();
    if (nbytes > static_cast<std::uint64_t>(end_ - at_)) fail("declares a frame beyond its end");
  }

  void check_persid() const {
    if (!limits_.allow_persid) fail("holds a persistent id");
  }

  void step(std::uint8_t op) {
    // clang-format off: a table, one opcode a line
    switch (op) {
      case kProto: return check_protocol();
      case kFrame: return check_frame();
      case kStop: need(1); is_stopped_ = true; return;

      case kNone: case kNewtrue: case kNewfalse: return push(kLeaf);
      case kBinint1: return number_of(1);
      case kBinint2: return number_of(2);
      case kBinint: return number_of(4);
      case kBinfloat: return number_of(8);
      case kLong1: return long1();
      case kLong4: return signed_counted(kMaxNumberBytes, kLargeNumber);
      case kInt: case kLong: case kFloat: return number_line();

      case kShortBinstring: case kShortBinbytes: return text(number<std::uint8_t>(), false);
      case kShortBinunicode: return text(number<std::uint8_t>(), true);
      case kBinunicode: return text(number<std::uint32_t>(), true);
      case kBinbytes: return text(number<std::uint32_t>(), false);
      case kBinunicode8: return text(number<std::uint64_t>(), true);
      case kBinbytes8: case kBytearray8: return text(number<std::uint64_t>(), false);
      case kBinstring: return signed_counted(INT32_MAX);
      case kString: case kUnicode: return text_line();

      case kEmptyTuple: return push(kEmptyContainer);
      case kEmptyList: case kEmptyDict: return make(kEmptyCost);
      case kEmptySet: return make(kSetCost);
      case kTuple1: return wrap(1);
      case kTuple2: return wrap(2);
      case kTuple3: return wrap(3);
      case kTuple: case kList: return wrap(pop_mark());
      case kFrozenset: return wrap(hash_members(pop_mark()), kSetCost);
      case kDict: return wrap(hash_pairs(pop_mark()));
      case kAppend: return absorb(1, kFirstMemberCost);
      case kAppends: return absorb(pop_mark(), kFirstMemberCost);
      case kAdditems: return absorb(hash_members(pop_mark()), 0);
      case kSetitem: return absorb(hash_pairs(2), kFirstPairCost);
      case kSetitems: return absorb(hash_pairs(pop_mark()), kFirstPairCost);

      case kGlobal: line(); line(); return push(kEmptyContainer);
      case kStackGlobal: return wrap(2);
      case kReduce: case kNewobj: return call(2);
      case kNewobjEx: return call(3);
      case kBuild: return set_state();
      case kInst: line(); line(); return wrap(pop_mark(), kCallCost);
      case kObj: return make_object();
      case kPersid: check_persid(); line(); return push(kEmptyContainer);
      case kBinpersid: check_persid(); return wrap(1);

      case kMark: return mark();
      case kPop: return pop();
      case kPopMark: stack_.resize(stack_.size() - pop_mark()); return;
      case kDup: need(1); return push(stack_.back());

      case kPut: return put_memo(index_line());
      case kBinput: return put_memo(number<std::uint8_t>());
      case kLongBinput: return put_memo(number<std::uint32_t>());
      case kMemoize: return put_memo(memo_used_);
      case kGet: return get_memo(index_line());
      case kBinget: return get_memo(number<std::uint8_t>());
      case kLongBinget: return get_memo(number<std::uint32_t>());

      case kExt1: case kExt2: case kExt4: fail("asks for an extension code");
      case kNextBuffer: case kReadonlyBuffer: fail("asks for an out-of-band buffer");
      default: fail("holds the unknown opcode " + std::to_string(op));
    }
    // clang-format on
  }

  void make_object() {
    const std::size_t count = pop_mark();
    if (count == 0) fail("makes an object without a class");
    wrap(count, kCallCost);
  }

  const std::byte* begin_;
  const std::byte* at_;
  const std::byte* end_;
  const std::byte* op_at_ = nullptr;  // start of the current opcode, for messages
  const PickleLimits& limits_;
  std::vector<Slot> stack_;
  std::vector<std::size_t> marks_;  // sizes of the stack
  std::vector<Slot> memo_;          // a slot whose own `memo` is kNoMemo was never put
  std::uint64_t key_nodes_ = 0;
  std::uint64_t arguments_ = 0;  // that calls have got
  std::uint64_t compound_keys_ = 0;
  std::uint64_t memo_used_ = 0;
  std::uint64_t ops_ = 0;
  std::uint64_t cost_ = 0;        // bytes of memory
  std::uint64_t said_bytes_ = 0;  // of numbers and texts
  std::uint64_t states_ = 0;      // that objects have got
  std::size_t most_stacked_ = 0;
  bool is_stopped_ = false;
};

}  // namespace

PickleScan scan_pickle(const std::byte* data, std::size_t nbytes, const PickleLimits& limits) {
  return Scanner(data, nbytes, limits).run();
}

}  // namespace dcpx
