#include "format/pickle_scan.h"

#include <string>
#include <vector>

#include "format/pickle_arguments.h"
#include "format/pickle_opcodes.h"
#include "format/pickle_values.h"
#include "format/pickle_weight.h"

namespace dcpx {
namespace {

using namespace pickle_op;
using namespace pickle_value;

// Mirrors the unpickler's stack and memo by one Slot a value.
class Scanner : private PickleArguments {  // Not thread-safe. Lives for one scan.
 public:
  Scanner(const std::byte* data, std::size_t nbytes, const PickleLimits& limits)
      : PickleArguments(data, nbytes), nbytes_(nbytes), limits_(limits), weight_(nbytes, limits) {}

  PickleScan run() {
    if (nbytes_ > limits_.max_bytes) {
      fail("is longer than " + std::to_string(limits_.max_bytes) + " B");
    }
    while (!is_stopped_) {
      op_at_ = at_;
      if (at_ == end_) fail("ends without STOP");
      if (++ops_ > limits_.max_ops) fail("has more than the allowed opcodes");
      step(std::to_integer<std::uint8_t>(*at_++));
    }
    return {static_cast<std::uint64_t>(at_ - begin_), ops_, memo_.size(), compound_keys_};
  }

 private:
  // Counts what a value takes. `says`: it says something, or holds what does.
  void charge(std::uint64_t nbytes, bool says = false) {
    weight_.charge(nbytes, says);
    check_weight();
  }

  void say(std::uint64_t nbytes, std::uint64_t cost) {
    weight_.say(nbytes, cost);
    check_weight();
  }

  void check_weight() const {
    if (!weight_.is_too_heavy(static_cast<std::uint64_t>(at_ - begin_))) return;
    fail("takes more than " + weight_.text() + " of memory for its " + std::to_string(nbytes_) +
         " B");
  }

  void push_said(Slot slot) {
    slot.says = 1;
    push(slot);
  }

  void text(std::uint64_t nbytes, bool is_unicode) {
    const std::byte* from = at_;
    skip(nbytes);
    const std::uint64_t letters = is_unicode ? letters_cost(from, nbytes) : nbytes;
    say(nbytes, kTextCost + std::min(letters, nbytes));
    charge(letters - std::min(letters, nbytes));
    Slot slot = kLeaf;
    slot.role = role_of({reinterpret_cast<const char*>(from), nbytes}) & kRoles;
    push_said(slot);
  }

  void number_of(std::uint64_t nbytes) {
    skip(nbytes);
    say(nbytes, nbytes > 1 ? kNumberCost : 0);  // smaller ones are there
    push_said(kLeaf);
  }

  void say_number(std::uint64_t nbytes, bool is_large) {
    say(nbytes, kNumberCost + nbytes);
    push_said(is_large ? kLargeNumber : kLeaf);
  }

  void number_line() {
    const std::size_t nbytes = line();
    if (nbytes > kMaxNumberBytes) fail("holds a number of too many digits");
    say_number(nbytes, nbytes > kSmallNumberDigits);
  }

  void text_line() {
    const std::size_t nbytes = line();
    say(nbytes, kTextCost + nbytes);
    charge(3 * nbytes);  // with escapes
    push_said(kLeaf);
  }

  void long1() {
    const std::size_t nbytes = number<std::uint8_t>();
    skip(nbytes);
    say_number(nbytes, nbytes > kSmallNumberBytes);
  }

  // Lengths that Python reads as int32.
  void signed_counted(std::size_t max_bytes, const Slot& made = kLeaf) {
    const auto nbytes = number<std::int32_t>();
    if (nbytes < 0) fail("declares a negative length");
    if (static_cast<std::size_t>(nbytes) > max_bytes) fail("holds a number of too many bytes");
    skip(static_cast<std::uint64_t>(nbytes));
    say(static_cast<std::uint64_t>(nbytes), kTextCost + static_cast<std::uint64_t>(nbytes));
    push_said(made);
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
    charge(kPlaceCost, slot.says);
  }

  // Takes the last `count` values and adds them to `container`, which gets one deeper than they.
  // Returns how many of them say something.
  std::size_t take_into(Slot* container, std::size_t count) {
    std::uint64_t nodes = container->nodes;
    std::size_t saying = 0;
    container->width = std::min<std::size_t>(container->width + count, kMostHeld) & kMostHeld;
    for (; count > 0; --count) {
      container->depth = std::max(container->depth, stack_.back().depth + 1);
      nodes += stack_.back().nodes;
      saying += stack_.back().says;
      stack_.pop_back();
    }
    container->nodes = static_cast<std::uint32_t>(std::min(nodes, kMostValues));
    if (saying > 0) container->says = 1;
    return saying;
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
    const std::size_t saying = take_into(&container, count);
    charge(nbytes == kTupleCost && is_plain(container) ? kPlainTupleCost : nbytes, saying > 0);
    charge(kPartCost * saying, true);
    charge(kPartCost * (count - saying));
    push(container);
  }

  // Puts the last `count` values into the container below them.
  void absorb(std::size_t count, std::uint64_t first_cost) {
    need(count + 1);
    Slot container = stack_[stack_.size() - count - 1];
    const bool was_empty = container.width == 0;
    const bool was_plain = is_plain(container);
    const std::size_t saying = take_into(&container, count);
    std::uint64_t each = first_cost == kFirstPairCost ? 0 : kHeldCost;  // pairs: as keys
    if (container.is_compound) each = kCalledMemberCost;
    if (was_empty && saying > 0 && first_cost > 0) weight_.draw(kEmptyCost);
    charge((was_empty && count > 0 ? first_cost : 0) +
               (was_plain && !is_plain(container) ? kSettledCost : 0),
           saying > 0);
    charge(saying * each, true);
    charge((count - saying) * each);
    stack_.pop_back();
    push(container);
    memo_.update(container);
  }

  // Replaces a callable and what it gets, `count` values in all, by what it returns.
  void call(std::size_t count) {
    need(count);
    for (std::size_t i = stack_.size() - count + 1; i < stack_.size(); ++i) {
      arguments_ += stack_[i].width;
    }
    if (arguments_ > kArgumentsBase + kArgumentsPerByte * nbytes_) {
      fail("gives far more arguments to calls than it has bytes");
    }
    const auto role = static_cast<Role>(stack_[stack_.size() - count].role);
    if (role == kNoRole || count != 2) return wrap(count, kCallCost);
    make_known(role, stack_.back());
  }

  // Makes a part of metadata. The tuples of a Size go, so what they were charged is enough.
  void make_known(Role role, const Slot& arguments) {
    Slot made{arguments.depth + 1, arguments.nodes, true};
    made.says = role == kSizeRole ? 1 : 0;
    if (role == kStateRole) {
      charge(kInstanceCost);
      made.role = arguments.width == 0 ? kNewRole : kNoRole;
    } else if (!is_plain(arguments) && arguments.says != 0) {
      weight_.give_back(kTupleCost - kPlainTupleCost);
    }
    stack_.resize(stack_.size() - 2);
    push(made);
  }

  // An object of a class with a state is hashed by identity, or not at all.
  void set_state() {
    need(2);
    Slot& made = stack_[stack_.size() - 2];
    const Slot& state = stack_.back();
    if (is_of_metadata(made, state)) weight_.add_state(state.says != 0);
    made.is_compound = 0;
    made.role = kNoRole;
    absorb(1, 0);
  }

  // Charges every `stride`th of the last `count` values for being hashed and held.
  std::size_t hash_keys(std::size_t count, std::size_t stride) {
    need(count);
    const bool is_below = above_mark() > count;
    const std::uint64_t held = is_below ? stack_[stack_.size() - count - 1].width + count : count;
    std::size_t saying = 0;
    for (std::size_t i = stack_.size() - count; i < stack_.size(); i += stride) {
      key_nodes_ += stack_[i].nodes;
      if (stack_[i].is_compound) ++compound_keys_;
      if (stack_[i].says || stack_[i + stride - 1].says) ++saying;
    }
    const std::uint64_t each = held < kManyMembers ? kMemberCost : kOfManyCost;
    charge(saying * each, true);
    charge((count / stride - saying) * each);
    if (key_nodes_ > kKeyNodesBase + kKeyNodesPerByte * nbytes_) fail("has keys that explode");
    return count;
  }

  std::size_t hash_pairs(std::size_t count) {
    if (count % 2 != 0) fail("gives a dict a key without value");
    return hash_keys(count, 2);
  }

  std::size_t hash_members(std::size_t count) { return hash_keys(count, 1); }

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

  void put_memo(std::uint64_t index) {
    need(1);
    charge(kMemoCost, stack_.back().says);
    if (!memo_.put(index, &stack_.back())) fail("puts far beyond the end of the memo");
  }

  void get_memo(std::uint64_t index) {
    const Slot* found = memo_.get(index);
    if (found == nullptr) fail("asks the memo for what was never put");
    push_again(*found);
  }

  void push_again(Slot slot) {
    slot.says = slot.is_new = 0;
    if (slot.role == kNewRole) slot.role = kNoRole;
    push(slot);
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

      case kGlobal: line(); return global_line();
      case kStackGlobal: return stack_global();
      case kReduce: case kNewobj: return call(2);
      case kNewobjEx: return call(3);
      case kBuild: return set_state();
      case kInst: line(); line(); return wrap(pop_mark(), kCallCost);
      case kObj: return make_object();
      case kPersid: check_persid(); line(); return push(kEmptyContainer);
      case kBinpersid: check_persid(); weight_.add_storage(); return wrap(1);

      case kMark: return mark();
      case kPop: return pop();
      case kPopMark: stack_.resize(stack_.size() - pop_mark()); return;
      case kDup: need(1); return push_again(stack_.back());

      case kPut: return put_memo(index_line());
      case kBinput: return put_memo(number<std::uint8_t>());
      case kLongBinput: return put_memo(number<std::uint32_t>());
      case kMemoize: return put_memo(memo_.used());
      case kGet: return get_memo(index_line());
      case kBinget: return get_memo(number<std::uint8_t>());
      case kLongBinget: return get_memo(number<std::uint32_t>());

      case kExt1: case kExt2: case kExt4: fail("asks for an extension code");
      case kNextBuffer: case kReadonlyBuffer: fail("asks for an out-of-band buffer");
      default: fail("holds the unknown opcode " + std::to_string(op));
    }
    // clang-format on
  }

  void global_line() {
    const char* name = reinterpret_cast<const char*>(at_);
    Slot slot = kEmptyContainer;
    slot.role = role_of({name, line()}) & kRoles;
    push(slot);
  }

  void stack_global() {
    need(2);
    const std::uint32_t role = stack_.back().role;
    wrap(2);
    stack_.back().role = role & kRoles;
  }

  void make_object() {
    const std::size_t count = pop_mark();
    if (count == 0) fail("makes an object without a class");
    wrap(count, kCallCost);
  }

  const std::uint64_t nbytes_;
  const PickleLimits& limits_;
  std::vector<Slot> stack_;
  std::vector<std::size_t> marks_;  // sizes of the stack
  PickleMemo memo_;
  std::uint64_t key_nodes_ = 0;
  std::uint64_t arguments_ = 0;  // that calls have got
  std::uint64_t compound_keys_ = 0;
  std::uint64_t ops_ = 0;
  PickleWeight weight_;
  std::size_t most_stacked_ = 0;
  bool is_stopped_ = false;
};

}  // namespace

PickleScan scan_pickle(const std::byte* data, std::size_t nbytes, const PickleLimits& limits) {
  return Scanner(data, nbytes, limits).run();
}

}  // namespace dcpx
