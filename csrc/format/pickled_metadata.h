// What stands on the unpickler's stack of a `.metadata`: values, and records of stock's objects.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "format/metadata_unpickle.h"
#include "format/pickled_texts.h"

namespace dcpx {

struct PickledValue {  // a million tensors have a dozen each in the memo: 16 bytes
  enum class Kind : std::uint8_t {
    kUnset,  // of the memo; also what was taken apart, and must not be met again
    kNone,
    kBool,          // number
    kInt,           // number
    kText,          // number of a text
    kGlobal,        // number: a Global
    kDtype,         // number of a text
    kLayout,        // number of a text
    kMemoryFormat,  // number: its code
    kIntTuple,      // number: where its `count` elements begin in the ints
    kSize,          // the same
    kTuple,         // number: where its `count` elements begin in the values
    kPath,          // the same; its arguments
    kDict,          // number of a container of keys and values in turn; count 1: of a call
    kList,          // number of a container
    kNew,           // number: the Global of which it is an object without a state yet
    kBytes,
    kProperties,  // number of a record, as all of the following
    kChunk,
    kTensor,
    kIndex,
    kPlace,
    kStorageMeta,
    kMetadata,
  };
  static constexpr std::uint32_t kNoMemo = UINT32_MAX;

  Kind kind = Kind::kNone;
  bool was_got = false;  // in the memo: whether it was asked for
  std::uint16_t count = 0;
  std::uint32_t memo = kNoMemo;  // where it was put
  std::int64_t number = 0;

  bool is(Kind wanted) const { return kind == wanted; }
};
static_assert(sizeof(PickledValue) == 16);

// Builds stock's objects, as records, and the columns of them at the end. Every method returns
// false for what is not exactly as stock writes it.
class PickledMetadata {  // Not thread-safe.
 public:
  using Value = PickledValue;
  using Values = std::vector<PickledValue>;
  using Kind = PickledValue::Kind;

  explicit PickledMetadata(const SipHash::Key& key) : texts(key) {}

  PickledTexts texts;

  // A new dict or list.
  Value container(Kind kind);
  Values& items(const Value& container) {
    return containers_[static_cast<std::size_t>(container.number)];
  }
  // Forgets a container whose items were taken. REQUIRES: nothing else refers to it.
  void forget(const Value& container);
  // Whether there are few containers, and in tuples about as many values as `room` says.
  bool is_light(std::size_t room) const {
    return containers_.size() <= kMaxContainers && pool_.size() <= room && ints_.size() <= 2 * room;
  }
  // A tuple of the `count` values at `from`.
  bool make_tuple(const Value* from, std::size_t count, Value* made);
  // Forgets a tuple that was taken apart, where it is the last that was made. REQUIRES: as forget.
  void forget_tuple(const Value& tuple);
  // What a global returns for a tuple of arguments.
  bool call(Global callee, const Value& arguments, Value* made);
  // The object of a class with its state.
  bool build(Global its_class, const Value& state, Value* made);
  // The columns of the Metadata that was built. `max_cells` bounds what objects that are there
  // many times by reference may make of the pickle's bytes.
  bool emit(std::size_t max_cells, UnpickledColumns* columns);

 private:
  static constexpr std::size_t kMaxContainers = 1 << 16;  // those of a state go with it

  struct Range {  // in ints_
    std::size_t first = 0;
    std::size_t count = 0;
  };
  struct Properties {
    std::int64_t dtype = 0;  // texts
    std::int64_t layout = 0;
    std::int64_t stride_count = -1;
    std::size_t first_stride = 0;
    std::uint8_t flags = 0;
    std::uint8_t memory_format = 0;
  };
  struct Chunk {
    Range offsets, sizes;
  };
  struct Tensor {
    Range size;
    std::size_t properties = 0;
    std::size_t first_chunk = 0;  // in chunk_list_
    std::size_t chunk_count = 0;
  };
  struct Index {
    std::int64_t fqn = 0;  // a text
    std::int64_t ndim = -1;
    std::size_t first = 0;  // in ints_
    std::int64_t hint = -1;
  };
  struct Place {
    std::int64_t path = 0;  // a text
    std::int64_t offset = 0;
    std::int64_t nbytes = 0;
    std::int64_t descriptors = -1;
  };
  template <std::size_t N>
  using Fields = std::array<Value, N>;

  // The values of `names` in the state of an object, kUnset where there is none. False: it has
  // others too, or one twice.
  template <std::size_t N>
  bool fields(const Value& state, const std::array<Field, N>& names, Fields<N>* found);

  bool properties(const Value& state, Value* made);
  bool chunk(const Value& state, Value* made);
  bool tensor(const Value& state, Value* made);
  bool index(const Value& state, Value* made);
  bool place(const Value& state, Value* made);
  bool storage_meta(const Value& state, Value* made);
  bool metadata(const Value& state, Value* made);

  bool size(const Value& value, Range* into) const;
  // Numbers of the texts of a list or tuple.
  bool texts_of(const Value& value, std::vector<std::int64_t>* into);
  bool descriptors(const Value& value, std::int64_t* number);
  // Null for a tuple of ints.
  const Value* elements(const Value& tuple) const {
    const bool has_values = tuple.is(Kind::kTuple) || tuple.is(Kind::kPath);
    return has_values ? pool_.data() + static_cast<std::size_t>(tuple.number) : nullptr;
  }
  Value made(Kind kind, std::size_t number) const;

  bool emit_entries();
  bool emit_tensor(const Tensor& tensor);
  bool emit_properties(const Properties& properties);
  bool emit_places();
  bool emit_planner();
  bool emit_rest();
  bool charge(std::size_t rows, std::size_t cells);
  void append(const Range& range, std::vector<std::int64_t>* column) const;
  // The number of a text among the strings of the columns.
  std::int64_t string(std::int64_t text);
  void to_strings(std::vector<std::int64_t>* texts);

  std::vector<std::int64_t> ints_;  // the elements of all tuples of ints
  Values pool_;                     // those of other tuples
  std::vector<Values> containers_;
  std::vector<std::size_t> free_containers_;
  std::vector<Properties> properties_;
  std::vector<Chunk> chunks_;
  std::vector<std::size_t> chunk_list_;  // chunks of all tensors
  std::vector<Tensor> tensors_;
  std::vector<Index> indices_;
  std::vector<Place> places_;
  std::vector<std::vector<std::int64_t>> descriptors_;  // distinct
  UnpickledStorageMeta storage_meta_;
  bool has_storage_meta_ = false;
  Fields<5> root_;  // of the Metadata
  bool has_root_ = false;

  std::size_t cells_left_ = 0;
  std::vector<std::int64_t> string_of_;  // by text; -1: not in the columns
  UnpickledColumns* columns_ = nullptr;
};

}  // namespace dcpx
