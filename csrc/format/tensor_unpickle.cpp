// A pickle machine that knows only what the pickle of a plain tensor uses: strings, integers,
// booleans, tuples, names, the memo, one storage and one rebuild call.
#include <optional>

#include "format/pickle_bytes.h"
#include "format/pickle_opcodes.h"
#include "format/tensor_pickle.h"

namespace dcpx {
namespace {

using namespace pickle_op;

// A stock pickle needs about 40 values and 13 memo slots, and 4 values more a dimension; torch
// allows 64 dimensions. What needs more is no plain tensor.
constexpr std::size_t kMaxValues = 512;
constexpr std::size_t kMaxMemo = 256;

enum class Kind { kBool, kInt, kText, kGlobal, kTuple, kHooks, kStorage, kTensor };

struct Value {
  Kind kind = Kind::kInt;
  std::int64_t number = 0;           // kBool, kInt
  std::string_view text, module;     // kText; the name and module of kGlobal
  std::size_t first = 0, count = 0;  // kTuple: its elements in the pool

  bool is(Kind wanted) const { return kind == wanted; }
  bool is_global(std::string_view from, std::string_view name) const {
    return kind == Kind::kGlobal && module == from && text == name;
  }
};

// Every step returns false at the first thing that a plain tensor does not have.
class Machine {  // Not thread-safe. Keeps views of `data`.
 public:
  Machine(const std::byte* data, std::size_t nbytes) : in_(data, nbytes) {}

  bool run(PickledTensor* tensor) {
    tensor_ = tensor;
    stack_.reserve(64);
    pool_.reserve(64);
    memo_.reserve(16);
    while (!is_stopped_) {
      std::string_view op;
      if (!in_.take(1, &op) || !step(static_cast<std::uint8_t>(op[0]))) return false;
      if (stack_.size() > kMaxValues || pool_.size() > kMaxValues) return false;
    }
    return in_.size() == 0 && marks_.empty() && stack_.size() == 1 && stack_[0].is(Kind::kTensor);
  }

 private:
  bool push(const Value& value) {
    stack_.push_back(value);
    return true;
  }

  template <typename T>
  bool push_int() {
    T number{};
    if (!in_.take_number(&number)) return false;
    return push_number(Kind::kInt, static_cast<std::int64_t>(number));
  }

  bool push_number(Kind kind, std::int64_t number) {
    Value value;
    value.kind = kind;
    value.number = number;
    return push(value);
  }

  bool push_long() {
    std::int64_t number = 0;
    return in_.take_long(&number) && push_number(Kind::kInt, number);
  }

  template <typename Length>
  bool push_text() {
    Value value;
    value.kind = Kind::kText;
    return in_.take_text<Length>(&value.text) && push(value);
  }

  bool push_global() {
    Value value;
    value.kind = Kind::kGlobal;
    return in_.take_line(&value.module) && in_.take_line(&value.text) && push(value);
  }

  bool push_stack_global() {
    if (!has_above_mark(2)) return false;
    Value value = stack_.back();
    value.kind = Kind::kGlobal;
    const Value& module = stack_[stack_.size() - 2];
    if (!stack_.back().is(Kind::kText) || !module.is(Kind::kText)) return false;
    value.module = module.text;
    stack_.resize(stack_.size() - 2);
    return push(value);
  }

  bool has_above_mark(std::size_t count) const {
    return stack_.size() >= count + (marks_.empty() ? 0 : marks_.back());
  }

  bool push_tuple(std::size_t count) {
    if (!has_above_mark(count)) return false;
    Value value;
    value.kind = Kind::kTuple;
    value.first = pool_.size();
    value.count = count;
    pool_.insert(pool_.end(), stack_.end() - static_cast<std::ptrdiff_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    return push(value);
  }

  bool push_marked_tuple() {
    if (marks_.empty()) return false;
    const std::size_t count = stack_.size() - marks_.back();
    marks_.pop_back();
    return push_tuple(count);
  }

  bool put_memo(std::size_t index) {
    if (!has_above_mark(1) || index >= kMaxMemo) return false;
    if (memo_.size() <= index) memo_.resize(index + 1);
    if (!memo_[index]) ++memo_used_;
    memo_[index] = stack_.back();
    return true;
  }

  bool get_memo(std::size_t index) {
    return index < memo_.size() && memo_[index] && push(*memo_[index]);
  }

  template <typename Index>
  bool memo_op(bool (Machine::*action)(std::size_t)) {
    Index index{};
    return in_.take_number(&index) && (this->*action)(index);
  }

  const Value& element(const Value& tuple, std::size_t index) const {
    return pool_[tuple.first + index];
  }

  // ('storage', class, record, device, element count); the device is the reader's business.
  bool make_storage() {
    if (!has_above_mark(1) || has_storage_) return false;
    const Value id = stack_.back();
    stack_.pop_back();
    if (!id.is(Kind::kTuple) || id.count != 5) return false;
    const Value& kind = element(id, 0);
    const Value& storage = element(id, 1);
    const Value& key = element(id, 2);
    const Value& numel = element(id, 4);
    if (!kind.is(Kind::kText) || kind.text != "storage" || !storage.is(Kind::kGlobal) ||
        !key.is(Kind::kText) || !element(id, 3).is(Kind::kText) || !numel.is(Kind::kInt)) {
      return false;
    }
    tensor_->storage_module = storage.module;
    tensor_->storage_name = storage.text;
    tensor_->storage_key = key.text;
    tensor_->storage_numel = numel.number;
    has_storage_ = true;
    return push_number(Kind::kStorage, 0);
  }

  bool reduce() {
    if (!has_above_mark(2)) return false;
    const Value arguments = stack_.back();
    const Value callee = stack_[stack_.size() - 2];
    stack_.resize(stack_.size() - 2);
    if (!arguments.is(Kind::kTuple)) return false;
    if (callee.is_global("collections", "OrderedDict")) {
      return arguments.count == 0 && push_number(Kind::kHooks, 0);
    }
    if (callee.is_global("torch._utils", "_rebuild_tensor_v2")) {
      return arguments.count == 6 && rebuild(arguments);
    }
    if (callee.is_global("torch._utils", "_rebuild_tensor_v3")) {
      if (arguments.count != 7) return false;
      const Value& dtype = element(arguments, 6);
      if (!dtype.is(Kind::kGlobal) || dtype.module != "torch") return false;
      tensor_->dtype_name = dtype.text;
      return rebuild(arguments);
    }
    return false;
  }

  // (storage, storage_offset, size, stride, requires_grad, backward_hooks); requires_grad says
  // nothing about the bytes.
  bool rebuild(const Value& arguments) {
    const Value& offset = element(arguments, 1);
    if (!element(arguments, 0).is(Kind::kStorage) || !offset.is(Kind::kInt) ||
        !element(arguments, 4).is(Kind::kBool) || !element(arguments, 5).is(Kind::kHooks)) {
      return false;
    }
    tensor_->storage_offset = offset.number;
    if (!copy_ints(element(arguments, 2), &tensor_->sizes) ||
        !copy_ints(element(arguments, 3), &tensor_->strides)) {
      return false;
    }
    return tensor_->sizes.size() == tensor_->strides.size() && push_number(Kind::kTensor, 0);
  }

  bool copy_ints(const Value& tuple, std::vector<std::int64_t>* into) const {
    if (!tuple.is(Kind::kTuple)) return false;
    into->clear();
    for (std::size_t i = 0; i < tuple.count; ++i) {
      if (!element(tuple, i).is(Kind::kInt)) return false;
      into->push_back(element(tuple, i).number);
    }
    return true;
  }

  bool step(std::uint8_t op) {
    std::string_view skipped;
    // clang-format off: a table, one opcode a line
    switch (op) {
      case kProto: return in_.take(1, &skipped);
      case kFrame: return in_.take(8, &skipped);
      case kStop: return is_stopped_ = true;
      case kMark: marks_.push_back(stack_.size()); return marks_.size() < kMaxValues;
      case kNewtrue: return push_number(Kind::kBool, 1);
      case kNewfalse: return push_number(Kind::kBool, 0);
      case kBinint: return push_int<std::int32_t>();
      case kBinint1: return push_int<std::uint8_t>();
      case kBinint2: return push_int<std::uint16_t>();
      case kLong1: return push_long();
      case kBinunicode: return push_text<std::uint32_t>();
      case kShortBinunicode: return push_text<std::uint8_t>();
      case kGlobal: return push_global();
      case kStackGlobal: return push_stack_global();
      case kEmptyTuple: return push_tuple(0);
      case kTuple1: return push_tuple(1);
      case kTuple2: return push_tuple(2);
      case kTuple3: return push_tuple(3);
      case kTuple: return push_marked_tuple();
      case kMemoize: return put_memo(memo_used_);
      case kBinput: return memo_op<std::uint8_t>(&Machine::put_memo);
      case kLongBinput: return memo_op<std::uint32_t>(&Machine::put_memo);
      case kBinget: return memo_op<std::uint8_t>(&Machine::get_memo);
      case kLongBinget: return memo_op<std::uint32_t>(&Machine::get_memo);
      case kBinpersid: return make_storage();
      case kReduce: return reduce();
      default: return false;
    }
    // clang-format on
  }

  PickleBytes in_;
  PickledTensor* tensor_ = nullptr;
  std::vector<Value> stack_;
  std::vector<Value> pool_;  // the elements of all tuples
  std::vector<std::size_t> marks_;
  std::vector<std::optional<Value>> memo_;
  std::size_t memo_used_ = 0;
  bool has_storage_ = false;
  bool is_stopped_ = false;
};

}  // namespace

bool parse_tensor_pickle(const std::byte* data, std::size_t nbytes, PickledTensor* tensor) {
  *tensor = {};
  return Machine(data, nbytes).run(tensor);
}

}  // namespace dcpx
