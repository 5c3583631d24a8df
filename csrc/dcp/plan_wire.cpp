// A rank's save plan as the columns of a message.
#include <cstdint>
#include <vector>

#include "dcp/item_wire.h"

namespace dcpx {
namespace {

namespace py = pybind11;

// Flags of an item, beside those of its index.
constexpr std::uint8_t kTypes = 0x03;
constexpr std::uint8_t kOther = 0x03;  // not packed: the next of those beside
constexpr std::uint8_t kHasData = 0x04;
constexpr std::uint8_t kAtChunk = 0x08;  // the index has the chunk's offsets
constexpr std::uint8_t kKnown = kTypes | kHasData | kAtChunk | kHasOffset | kHasHint;

constexpr std::size_t kDataFields = 4;  // offsets, sizes, sizes of the tensor, properties

class PlanPacker {
 public:
  explicit PlanPacker(ItemMaker& maker) : out_(maker), maker_(maker) {}

  void add(const py::object& item) {
    if (!is_packed(item)) {
      put_flags(kOther);
      others_.append(item);
    }
  }

  py::tuple result(const py::object& paths, const py::list& names) {
    const bool has_paths = pack_paths(out_, paths);
    for (const py::handle& name : names) {
      if (PyUnicode_CheckExact(name.ptr()) == 0) throw py::type_error("a name is a str");
      out_.put_name(name.ptr());
    }
    return py::make_tuple(out_.message(), properties_, others_, has_paths);
  }

 private:
  void put_flags(std::uint8_t flags) {
    const char byte = static_cast<char>(flags);
    out_.column(kFlags).put_text({&byte, 1});
  }

  bool is_packed(const py::object& item) {
    const FieldNames& names = maker_.names;
    const py::object fields = fields_of(item, maker_.write_class(), 4);
    if (!fields) return false;
    PyObject* type = field_in(fields, names.type);
    PyObject* index = field_in(fields, names.index);
    PyObject* data = field_in(fields, names.tensor_data);
    const int code = maker_.write_type_code(type);
    if (code < 0 || index == nullptr || data == nullptr ||
        field_in(fields, names.bytes_io_data) != Py_None) {
      return false;
    }
    WireIndex own;
    if (!out_.read_index(index, &own)) return false;
    std::uint8_t flags = static_cast<std::uint8_t>(code);
    std::size_t row = 0;
    if (data != Py_None) {
      std::size_t offsets = 0;
      if (!add_data(data, &offsets, &row)) return false;
      flags |= kHasData;
      if (own.has_offset && own.offset == offsets) {
        flags |= kAtChunk;
        own.has_offset = false;
      }
    }
    flags |= out_.flags_of(own);
    put_flags(flags);
    out_.put_index(own);
    if ((flags & kHasData) != 0) out_.column(kRefs).put(row);
    return true;
  }

  bool add_data(PyObject* data, std::size_t* offsets, std::size_t* row) {
    const FieldNames& names = maker_.names;
    const py::object fields = fields_of(data, maker_.data_class(), 3);
    if (!fields) return false;
    PyObject* chunk = field_in(fields, names.chunk);
    PyObject* properties = field_in(fields, names.properties);
    if (chunk == nullptr || properties == nullptr) return false;
    const py::object chunk_fields = fields_of(chunk, maker_.chunk_class(), 2);
    std::size_t sizes = 0;
    std::size_t size = 0;
    if (!chunk_fields || !out_.add_size(field_in(chunk_fields, names.offsets), offsets) ||
        !out_.add_size(field_in(chunk_fields, names.sizes), &sizes) ||
        !out_.add_size(field_in(fields, names.size), &size)) {
      return false;
    }
    const std::size_t its_properties = add_properties(properties);
    const std::int64_t values[kDataFields] = {
        static_cast<std::int64_t>(*offsets), static_cast<std::int64_t>(sizes),
        static_cast<std::int64_t>(size), static_cast<std::int64_t>(its_properties)};
    bool is_new = false;
    *row = data_.add(values, kDataFields, &is_new);
    if (is_new) {
      for (const std::int64_t value : values) {
        out_.column(kData).put(static_cast<std::uint64_t>(value));
      }
    }
    return true;
  }

  // Python pickles them. Equal ones of torch's own class count as one, others by identity, as in a
  // pickle.
  std::size_t add_properties(PyObject* properties) {
    key_.clear();
    if (!has_plain_fields(properties)) {
      key_.assign(1, reinterpret_cast<std::intptr_t>(properties));
    }
    bool is_new = false;
    const std::size_t number = properties_table_.add(key_.data(), key_.size(), &is_new);
    if (is_new) properties_.append(py::handle(properties));
    return number;
  }

  // What they say, as numbers: constants of torch by their addresses.
  bool has_plain_fields(PyObject* properties) {
    const FieldNames& names = maker_.names;
    const Py_ssize_t count = maker_.has_strides() ? 6 : 5;
    const py::object fields = fields_of(properties, maker_.properties_class(), count);
    if (!fields) return false;
    for (const py::object* name : {&names.dtype, &names.layout, &names.requires_grad,
                                   &names.memory_format, &names.pin_memory}) {
      PyObject* value = field_in(fields, *name);
      if (value == nullptr) return false;
      key_.push_back(reinterpret_cast<std::intptr_t>(value));
    }
    if (!maker_.has_strides()) return true;
    PyObject* strides = field_in(fields, names.strides);
    if (strides == Py_None) return true;
    if (strides == nullptr || PyTuple_CheckExact(strides) == 0) return false;
    key_.push_back(PyTuple_GET_SIZE(strides));
    for (Py_ssize_t d = 0; d < PyTuple_GET_SIZE(strides); ++d) {
      std::int64_t stride = 0;
      if (!to_plain_int(PyTuple_GET_ITEM(strides, d), &stride)) return false;
      key_.push_back(stride);
    }
    return true;
  }

  WireWriter out_;
  ItemMaker& maker_;
  wire::RowTable data_;
  wire::RowTable properties_table_;
  std::vector<std::int64_t> key_;
  py::list properties_;
  py::list others_;
};

class PlanUnpacker {
 public:
  PlanUnpacker(ItemMaker& maker, std::string_view message, const py::list& properties,
               const py::list& others, bool is_shared)
      : in_(maker, message),
        maker_(maker),
        properties_(properties),
        others_(others),
        is_shared_(is_shared) {
    wire::Reader& column = in_.column(kData);
    while (!column.is_done()) {
      const std::size_t end = in_.sizes().size();
      Data row{};
      row.offsets = column.get_below(end);
      row.sizes = column.get_below(end);
      row.size = column.get_below(end);
      row.properties = column.get_below(properties.size());
      data_.push_back(row);
    }
  }

  py::tuple result() {
    py::list items;
    wire::Reader& flags = in_.column(kFlags);
    std::size_t others = 0;
    while (!flags.is_done()) {
      const auto bits = static_cast<std::uint8_t>(flags.get_text(1).front());
      if (bits == kOther) {
        if (others >= others_.size()) wire::refuse("an item is missing");
        items.append(others_[others++]);
      } else {
        items.append(item(bits));
      }
    }
    if (others != others_.size()) wire::refuse("there are more items beside it than it names");
    const py::object paths = unpack_paths(in_);
    py::list names;
    while (!in_.column(kNames).is_done()) names.append(in_.name(in_.get_name()));
    in_.check_done();
    return py::make_tuple(items, paths, names);
  }

 private:
  struct Data {
    std::size_t offsets, sizes, size, properties;
    py::object shared;  // null until an item has it
  };

  py::object item(std::uint8_t bits) {
    const bool is_at_chunk = (bits & kAtChunk) != 0;
    if ((bits & kTypes) == kOther || (bits & ~kKnown) != 0 ||
        (is_at_chunk && ((bits & kHasData) == 0 || (bits & kHasOffset) != 0))) {
      wire::refuse("an item of an unknown form");
    }
    py::object offset;
    py::object data = py::none();
    if ((bits & kHasData) != 0) {
      Data& row = data_[in_.column(kRefs).get_below(data_.size())];
      data = data_of(row);
      if (is_at_chunk) offset = in_.sizes()[row.offsets];
    }
    return maker_.write_item(in_.index(bits, offset), bits & kTypes, data);
  }

  py::object data_of(Data& row) {
    if (row.shared) return row.shared;
    const std::vector<py::object>& sizes = in_.sizes();
    py::object properties = properties_[row.properties];
    if (!is_shared_) properties = maker_.copied(properties);
    const py::object made = maker_.write_data(maker_.chunk(sizes[row.offsets], sizes[row.sizes]),
                                              properties, sizes[row.size]);
    if (is_shared_) row.shared = made;
    return made;
  }

  WireReader in_;
  ItemMaker& maker_;
  const py::list& properties_;
  const py::list& others_;
  bool is_shared_;
  std::vector<Data> data_;
};

}  // namespace

py::tuple pack_plan(ItemMaker& maker, const py::list& items, const py::object& paths,
                    const py::list& names) {
  PlanPacker packer(maker);
  for (std::size_t i = 0; i < items.size(); ++i) packer.add(items[i]);
  return packer.result(paths, names);
}

py::tuple unpack_plan(ItemMaker& maker, const py::bytes& message, const py::list& properties,
                      const py::list& others, bool is_shared) {
  return PlanUnpacker(maker, std::string_view(message), properties, others, is_shared).result();
}

}  // namespace dcpx
