#include "format/metadata_unpickle.h"

#include <limits>

#include "format/pickle_bytes.h"
#include "format/pickle_opcodes.h"
#include "format/pickled_metadata.h"

namespace dcpx {
namespace {

using namespace pickle_op;

constexpr std::size_t kMaxBytes = std::size_t{4} << 30;  // as of the scan before Python's unpickler
constexpr std::size_t kMaxStack = std::size_t{1} << 20;  // a pickler writes a thousand at a time
// What one pickle may have at once: of a million tensors there is an eighth of a value in the memo
// for each byte, and of everything else far less.
constexpr std::size_t kFreeValues = 1 << 16;
constexpr std::size_t kBytesOfMemo = 6;
constexpr std::size_t kBytesOfValue = 16;
constexpr std::size_t kOpsUnweighed = 256;
constexpr std::size_t kMaxMarks = 64;     // a Metadata has no more inside each other than ten
constexpr std::size_t kMemoSlack = 1024;  // gaps that an optimizer may have left
constexpr std::uint64_t kMaxTexts = UINT32_MAX >> 1;

// The unpickler's stack and memo. Every step returns false at the first thing that the pickle of a
// Metadata does not have. Three rules keep what is shared right: a value is put into the memo once;
// a container is filled before anything holds it; what is taken apart may not have been asked for.
class Machine {  // Not thread-safe. Keeps views of `data`.
 public:
  using Value = PickledValue;
  using Kind = PickledValue::Kind;

  Machine(const std::byte* data, std::size_t nbytes, const SipHash::Key& key)
      : in_(data, nbytes), nbytes_(nbytes), metadata_(key) {}

  bool run(UnpickledColumns* columns) {
    std::uint8_t op = 0;
    std::uint8_t protocol = 0;
    if (!in_.take_number(&op) || op != kProto || !in_.take_number(&protocol)) return false;
    if (protocol < 2 || protocol > 5 || nbytes_ > kMaxBytes) return false;
    memo_.reserve(nbytes_ / sizeof(Value));  // about as many as a pickler puts there
    while (!is_stopped_) {
      if (!in_.take_number(&op) || !step(op) || !stays_in_frame()) return false;
      if (++ops_ % kOpsUnweighed == 0 && !is_light()) return false;
    }
    if (in_.size() != 0 || !marks_.empty() || stack_.size() != 1) return false;
    return stack_[0].is(Kind::kMetadata) && metadata_.emit(nbytes_, columns);
  }

 private:
  bool is_light() const {
    const std::size_t room = kFreeValues + nbytes_ / kBytesOfValue;
    return memo_.size() <= kFreeValues + nbytes_ / kBytesOfMemo && items_ <= room &&
           metadata_.is_light(room);
  }

  // CPython reads other bytes than these for an opcode beyond the end of its frame.
  bool enter_frame() {
    std::uint64_t nbytes = 0;
    if (is_framed_ || !in_.take_number(&nbytes) || nbytes > in_.size()) return false;
    is_framed_ = true;
    behind_frame_ = in_.size() - nbytes;
    return true;
  }

  bool stays_in_frame() {
    if (!is_framed_) return true;
    is_framed_ = in_.size() > behind_frame_;
    return in_.size() >= behind_frame_;
  }

  // The stack. Values below the last mark are out of reach.

  std::size_t above_mark() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }
  bool has_above_mark(std::size_t count) const { return above_mark() >= count; }

  bool push(const Value& value) {
    stack_.push_back(value);
    return stack_.size() <= kMaxStack;
  }

  bool push(Kind kind, std::int64_t number = 0) {
    Value value;
    value.kind = kind;
    value.number = number;
    return push(value);
  }

  template <typename T>
  bool push_int() {
    T number{};
    return in_.take_number(&number) && push(Kind::kInt, static_cast<std::int64_t>(number));
  }

  bool push_long() {
    std::int64_t number = 0;
    return in_.take_long(&number) && push(Kind::kInt, number);
  }

  template <typename Length>
  bool push_text() {
    std::string_view text;
    if (!in_.take_text<Length>(&text)) return false;
    if (metadata_.texts.count() >= kMaxTexts) return false;
    return push(Kind::kText, metadata_.texts.add(text));
  }

  bool push_global(std::string_view module, std::string_view name) {
    const Global found = find_global(module, name);
    if (found == Global::kUnknown) return false;
    if (found == Global::kDtype) return push(Kind::kDtype, metadata_.texts.add(name));
    return push(Kind::kGlobal, static_cast<std::int64_t>(found));
  }

  bool push_global_lines() {
    std::string_view module;
    std::string_view name;
    return in_.take_line(&module) && in_.take_line(&name) && push_global(module, name);
  }

  bool push_stack_global() {
    if (!has_above_mark(2)) return false;
    const Value name = pop();
    const Value module = pop();
    return name.is(Kind::kText) && module.is(Kind::kText) &&
           push_global(metadata_.texts.text(module.number), metadata_.texts.text(name.number));
  }

  Value pop() {  // REQUIRES: has_above_mark(1)
    const Value value = stack_.back();
    stack_.pop_back();
    return value;
  }

  bool mark() {
    marks_.push_back(stack_.size());
    return marks_.size() <= kMaxMarks;
  }

  bool pop_mark(std::size_t* count) {
    if (marks_.empty()) return false;
    *count = above_mark();
    marks_.pop_back();
    return true;
  }

  bool push_tuple(std::size_t count) {
    Value made;
    if (!has_above_mark(count) || !metadata_.make_tuple(last(count), count, &made)) return false;
    stack_.resize(stack_.size() - count);
    return push(made);
  }

  bool push_marked_tuple() {
    std::size_t count = 0;
    return pop_mark(&count) && push_tuple(count);
  }

  const Value* last(std::size_t count) const { return stack_.data() + stack_.size() - count; }

  // The memo.

  bool put_memo(std::size_t index) {
    if (!has_above_mark(1) || index >= memo_used_ + kMemoSlack) return false;
    if (memo_.size() == index) {
      memo_.push_back(kUnsetValue);
    } else if (memo_.size() < index) {
      memo_.resize(index + 1, kUnsetValue);
    }
    Value& value = stack_.back();
    if (!memo_[index].is(Kind::kUnset) || value.memo != Value::kNoMemo) return false;
    if (memo_[index].was_got) return false;  // was taken apart, see release
    value.memo = static_cast<std::uint32_t>(index);
    memo_[index] = value;
    ++memo_used_;
    return true;
  }

  bool get_memo(std::size_t index) {
    if (index >= memo_.size() || memo_[index].is(Kind::kUnset)) return false;
    memo_[index].was_got = true;
    return push(memo_[index]);
  }

  template <typename Index>
  bool memo_op(bool (Machine::*action)(std::size_t)) {
    Index index{};
    return in_.take_number(&index) && (this->*action)(index);
  }

  // Whether nobody but the one who holds it can meet `value`; from now on, nobody does.
  bool release(const Value& value) {
    if (value.memo == Value::kNoMemo) return true;
    Value& slot = memo_[value.memo];
    if (slot.was_got) return false;
    slot = kUnsetValue;
    slot.was_got = true;  // and nothing may be put there
    return true;
  }

  // Objects.

  bool append(std::size_t count, Kind kind) {
    if (!has_above_mark(count + 1)) return false;
    const Value target = stack_[stack_.size() - count - 1];
    if (!target.is(kind) || (kind == Kind::kDict && count % 2 != 0)) return false;
    PickledMetadata::Values& items = metadata_.items(target);
    items.insert(items.end(), last(count), last(0));
    items_ += count;
    stack_.resize(stack_.size() - count);
    return true;
  }

  bool append_marked(Kind kind) {
    std::size_t count = 0;
    return pop_mark(&count) && append(count, kind);
  }

  bool make_object() {
    if (!has_above_mark(2)) return false;
    const Value arguments = pop();
    const Value its_class = pop();
    if (!arguments.is(Kind::kIntTuple) || arguments.count != 0 || !its_class.is(Kind::kGlobal)) {
      return false;
    }
    const bool is_bytes = static_cast<Global>(its_class.number) == Global::kBytes;
    return push(is_bytes ? Kind::kBytes : Kind::kNew, its_class.number);
  }

  bool reduce() {
    if (!has_above_mark(2)) return false;
    const Value arguments = pop();
    const Value callee = pop();
    const bool is_tuple = arguments.is(Kind::kTuple) || arguments.is(Kind::kIntTuple);
    Value made;
    if (!is_tuple || !callee.is(Kind::kGlobal) ||
        !metadata_.call(static_cast<Global>(callee.number), arguments, &made)) {
      return false;
    }
    made.memo = Value::kNoMemo;
    made.was_got = false;
    if (!made.is(Kind::kPath) && release(arguments)) metadata_.forget_tuple(arguments);
    return push(made);
  }

  bool build() {
    if (!has_above_mark(2)) return false;
    const Value state = pop();
    Value& object = stack_.back();
    Value made;
    if (!object.is(Kind::kNew) ||
        !metadata_.build(static_cast<Global>(object.number), state, &made)) {
      return false;
    }
    const bool is_mine = release(state);
    if (state.is(Kind::kDict)) {
      if (!is_mine || !forget(state)) return false;
    } else if (is_mine) {
      metadata_.forget_tuple(state);
    }
    made.memo = object.memo;
    object = made;
    if (made.memo == Value::kNoMemo) return true;
    if (memo_[made.memo].was_got) return false;  // somebody has it without its state
    memo_[made.memo] = made;
    return true;
  }

  // The dict of a state, and the lists in it, whose elements the object has. A Metadata's own dicts
  // stay: its columns are made of them at the end.
  bool forget(const Value& state) {
    for (const Value& value : metadata_.items(state)) {
      if (!value.is(Kind::kList)) continue;
      if (!release(value)) return false;
      items_ -= metadata_.items(value).size();
      metadata_.forget(value);
    }
    items_ -= metadata_.items(state).size();
    metadata_.forget(state);
    return true;
  }

  bool step(std::uint8_t op) {
    // clang-format off: a table, one opcode a line
    switch (op) {
      case kFrame: return enter_frame();
      case kStop: return is_stopped_ = true;
      case kMark: return mark();
      case kNone: return push(Kind::kNone);
      case kNewtrue: return push(Kind::kBool, 1);
      case kNewfalse: return push(Kind::kBool, 0);
      case kBinint: return push_int<std::int32_t>();
      case kBinint1: return push_int<std::uint8_t>();
      case kBinint2: return push_int<std::uint16_t>();
      case kLong1: return push_long();
      case kBinunicode: return push_text<std::uint32_t>();
      case kShortBinunicode: return push_text<std::uint8_t>();
      case kGlobal: return push_global_lines();
      case kStackGlobal: return push_stack_global();
      case kEmptyTuple: return push_tuple(0);
      case kTuple1: return push_tuple(1);
      case kTuple2: return push_tuple(2);
      case kTuple3: return push_tuple(3);
      case kTuple: return push_marked_tuple();
      case kEmptyDict: return push(metadata_.container(Kind::kDict));
      case kEmptyList: return push(metadata_.container(Kind::kList));
      case kAppend: return append(1, Kind::kList);
      case kAppends: return append_marked(Kind::kList);
      case kSetitem: return append(2, Kind::kDict);
      case kSetitems: return append_marked(Kind::kDict);
      case kMemoize: return put_memo(memo_used_);
      case kBinput: return memo_op<std::uint8_t>(&Machine::put_memo);
      case kLongBinput: return memo_op<std::uint32_t>(&Machine::put_memo);
      case kBinget: return memo_op<std::uint8_t>(&Machine::get_memo);
      case kLongBinget: return memo_op<std::uint32_t>(&Machine::get_memo);
      case kNewobj: return make_object();
      case kReduce: return reduce();
      case kBuild: return build();
      default: return false;
    }
    // clang-format on
  }

  static constexpr Value kUnsetValue{Kind::kUnset, false, 0, Value::kNoMemo, 0};

  PickleBytes in_;
  std::size_t nbytes_;
  PickledMetadata metadata_;
  std::vector<Value> stack_;
  std::vector<std::size_t> marks_;
  std::vector<Value> memo_;
  std::size_t memo_used_ = 0;
  std::size_t items_ = 0;  // of all containers
  std::size_t ops_ = 0;
  std::size_t behind_frame_ = 0;  // bytes, where is_framed_
  bool is_framed_ = false;
  bool is_stopped_ = false;
};

}  // namespace

bool unpickle_metadata(const std::byte* data, std::size_t nbytes, const SipHash::Key& key,
                       UnpickledColumns* columns) {
  *columns = {};
  return Machine(data, nbytes, key).run(columns);
}

}  // namespace dcpx
