// A pickle of protocol 4 (Python's default up to 3.13) opcode by opcode, as Python's own pickler
// shapes it. What may come again is memoized; a memo's number is the count of MEMOIZE before it, so
// the same objects in the same order always give the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/error.h"
#include "format/pickle_opcodes.h"

namespace dcpx {

// Values that somebody else keeps alive.
template <typename T>
struct Column {
  const T* data = nullptr;
  std::size_t count = 0;

  // Throws Error(kPlan) beyond the end.
  const T& operator[](std::size_t at) const {
    DCPX_CHECK(at < count, "a column of metadata is too short");
    return data[at];
  }
};

// The strings of a pickle by numbers, equal ones by one number: others that are added one by one,
// and those of a pool of distinct strings, which is numbered when all others are known.
class PickleTexts {  // Not thread-safe.
 public:
  // `text` stays alive; `ends` says where each string of the pool ends in it.
  // Throws Error(kPlan) where the ends do not ascend within the text.
  PickleTexts(const Column<char>& text, const Column<std::int64_t>& ends);
  PickleTexts(const PickleTexts&) = delete;
  PickleTexts& operator=(const PickleTexts&) = delete;

  std::size_t add(std::string_view text);  // numbers ascend from 0. REQUIRES: before `number_pool`
  void number_pool();

  std::size_t count() const { return others_.size() + pool_.size(); }
  std::string_view operator[](std::size_t number) const;
  // The pool's own numbers. Throw Error(kPlan) for one that it does not have.
  std::string_view pool_text(std::int64_t at) const;
  std::size_t of_pool(std::int64_t at) const;

 private:
  std::deque<std::string> others_;
  std::unordered_map<std::string_view, std::size_t> numbers_;  // of others
  std::vector<std::string_view> pool_;
  std::vector<std::size_t> pool_numbers_;
};

// Not thread-safe. Texts and the numbers given to `size` outlive it.
class PickleWriter {
 public:
  // Where an object is in the memo.
  class Memo {
    friend class PickleWriter;
    static constexpr std::uint32_t kNone = UINT32_MAX;
    std::uint32_t number_ = kNone;
  };

  explicit PickleWriter(const PickleTexts& texts);

  void op(pickle_op::Opcode opcode) { out_.push_back(std::byte{opcode}); }
  void text(std::size_t number);
  void integer(std::int64_t value);  // in its shortest form
  void boolean(bool value);

  // Fetches the object from the memo, if it is there.
  bool get(Memo memo);
  // Puts the object just written into the memo.
  void memoize(Memo& memo);

  // A name of a module, by the numbers of both texts.
  void global(std::size_t module, std::size_t name, Memo& memo);

  struct Class {
    std::size_t module;
    std::size_t name;
    Memo& memo;
  };
  // `cls((*values,))`; equal ones are made once. REQUIRES: always the same `cls`.
  void size(const Class& cls, const std::int64_t* values, std::size_t count);

  // `count` objects for the list (`end` is APPENDS) or dict (SETITEMS) on the stack; `put_one`
  // writes the object of this index, or key and value.
  template <typename PutOne>
  void batches(std::size_t count, pickle_op::Opcode end, PutOne put_one) {
    constexpr std::size_t kBatch = 1000;  // between two marks: bounds the unpickler's stack
    for (std::size_t at = 0; at < count; ++at) {
      if (at % kBatch == 0) op(pickle_op::kMark);
      put_one(at);
      if (at + 1 == count || (at + 1) % kBatch == 0) op(end);
    }
  }

  // A tuple of `count` objects.
  template <typename PutOne>
  void tuple(std::size_t count, PutOne put_one) {
    using namespace pickle_op;
    constexpr Opcode kTupleOfFew[] = {kEmptyTuple, kTuple1, kTuple2, kTuple3};
    if (count > 3) op(kMark);
    for (std::size_t at = 0; at < count; ++at) put_one(at);
    op(count > 3 ? kTuple : kTupleOfFew[count]);
  }

  std::vector<std::byte> finish();  // STOP; the writer is used up

 private:
  struct Size {  // what `size` was given
    const std::int64_t* values;
    std::size_t count;
    bool operator==(const Size& other) const;
  };
  struct SizeHash {
    std::size_t operator()(const Size& size) const noexcept;
  };

  const PickleTexts& texts_;
  std::vector<std::byte> out_;
  std::uint32_t memo_count_ = 0;
  std::vector<Memo> text_memos_;  // by the text's number
  std::unordered_map<Size, Memo, SizeHash> size_memos_;
};

}  // namespace dcpx
