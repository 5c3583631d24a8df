// Plan items as the columns of a message between ranks, and back.
//
// Names and sizes go into tables, each once, and so do a tensor's chunk and properties: an item is
// a few small numbers. What is not exactly of DCP's own classes, with their own fields and plain
// numbers in them, is not packed: such items are given back, for Python to pickle beside.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dcp/plan_items.h"
#include "format/wire.h"

namespace dcpx {

// The columns of a message.
enum WireColumn : std::size_t {
  kTextBytes,  // of each text
  kTexts,
  kSizes,  // of each torch.Size: how many, and they
  kData,   // of each chunk with its properties: offsets, sizes, tensor's sizes, properties
  kFlags,  // of each item, a byte
  kNames,  // mentions of texts
  kRefs,   // mentions of rows of kData or of files
  kRest,
  kPaths,
  kWireColumns
};

// A MetadataIndex.
struct WireIndex {
  pybind11::object fqn;
  bool has_offset = false;
  std::size_t offset = 0;  // number of a size
  bool has_hint = false;
  std::int64_t hint = 0;
};

// Bits of an item's flags that its index takes.
constexpr std::uint8_t kHasHint = 0x80;
constexpr std::uint8_t kHasOffset = 0x40;

// The instance's attributes where it is of exactly this class and has `count` of them; else null.
pybind11::object fields_of(const pybind11::handle& object, const pybind11::object& its_class,
                           Py_ssize_t count);
// An attribute of those; null where there is none. Borrowed.
PyObject* field_in(const pybind11::object& fields, const pybind11::object& name);
// False for what is no int, or not below 2^63. Never runs Python code.
bool to_plain_int(PyObject* value, std::int64_t* number);

class WireWriter {
 public:
  explicit WireWriter(const ItemMaker& maker) : columns_(kWireColumns), maker_(maker) {}

  wire::Writer& column(WireColumn which) { return columns_[which]; }
  // Mentions a text. REQUIRES: an exact str.
  void put_name(PyObject* text);
  // The number of a torch.Size; false for anything else.
  bool add_size(PyObject* size, std::size_t* number);
  bool read_index(const pybind11::handle& index, WireIndex* out);
  std::uint8_t flags_of(const WireIndex& index) const {
    return static_cast<std::uint8_t>((index.has_offset ? kHasOffset : 0) |
                                     (index.has_hint ? kHasHint : 0));
  }
  // All but the flags.
  void put_index(const WireIndex& index);
  pybind11::bytes message() const { return pybind11::bytes(wire::join(columns_)); }

 private:
  std::vector<wire::Writer> columns_;
  const ItemMaker& maker_;
  pybind11::dict numbers_;  // of texts
  std::uint64_t next_name_ = 0;
  wire::RowTable sizes_;
  std::vector<std::int64_t> values_;  // of one size
};

class WireReader {
 public:
  // `message` must outlive it. Throws Error(kPlan) for what is no message.
  WireReader(const ItemMaker& maker, std::string_view message);

  wire::Reader& column(WireColumn which) { return columns_[which]; }
  // The number of the text that is mentioned next.
  std::size_t get_name();
  const pybind11::object& name(std::size_t number);
  std::string_view text(std::size_t number) const { return texts_[number]; }
  const std::vector<pybind11::object>& sizes() const { return sizes_; }
  // The index that is next, its flags read already. `offset`: where they say that it has none.
  pybind11::object index(std::uint8_t flags, pybind11::object offset = {});
  void check_done() const;

 private:
  const ItemMaker& maker_;
  std::vector<wire::Reader> columns_;
  std::vector<std::string_view> texts_;
  std::vector<pybind11::object> names_;  // null until it is asked for
  std::vector<pybind11::object> sizes_;
  std::size_t new_names_ = 0;
  std::size_t next_name_ = 0;
};

// A str of UTF-8, lone surrogates included, interned: ranks send the same names. Throws
// Error(kPlan).
pybind11::object interned_text(std::string_view utf8);
// The UTF-8 of an exact str, in `storage` where the str does not hold it.
std::string_view utf8_of(PyObject* text, std::string* storage);

// Names and the paths that flattening gave them. False, and nothing is written, for anything else.
bool pack_paths(WireWriter& out, const pybind11::handle& paths);
pybind11::object unpack_paths(WireReader& in);  // None where there are none

// What each does: see `_C.pyi`.
pybind11::tuple pack_plan(ItemMaker& maker, const pybind11::list& items,
                          const pybind11::object& paths, const pybind11::list& names);
pybind11::tuple unpack_plan(ItemMaker& maker, const pybind11::bytes& message,
                            const pybind11::list& properties, const pybind11::list& others,
                            bool is_shared);
pybind11::tuple pack_results(ItemMaker& maker, const pybind11::list& results);
pybind11::list unpack_results(ItemMaker& maker, const pybind11::bytes& message,
                              const pybind11::list& others);

}  // namespace dcpx
