// What a rank has written, as the columns of a message.
#include <cstdint>

#include "dcp/item_wire.h"

namespace dcpx {
namespace {

namespace py = pybind11;

constexpr std::uint8_t kOtherResult = 0x01;  // not packed: the next of those beside
constexpr std::uint8_t kPlain = 0x00;

class ResultPacker {
 public:
  explicit ResultPacker(ItemMaker& maker) : out_(maker), maker_(maker) {}

  void add(const py::object& result) {
    if (!is_packed(result)) {
      put_flags(kOtherResult);
      others_.append(result);
    }
  }

  py::tuple result() const { return py::make_tuple(out_.message(), others_); }

 private:
  void put_flags(std::uint8_t flags) {
    const char byte = static_cast<char>(flags);
    out_.column(kFlags).put_text({&byte, 1});
  }

  bool is_packed(const py::object& result) {
    const FieldNames& names = maker_.names;
    const py::object fields = fields_of(result, maker_.result_class(), 3);
    if (!fields) return false;
    PyObject* index = field_in(fields, names.index);
    PyObject* place = field_in(fields, names.storage_data);
    std::int64_t size = 0;
    if (index == nullptr || place == nullptr ||
        !to_plain_int(field_in(fields, names.size_in_bytes), &size)) {
      return false;
    }
    py::object place_fields = fields_of(place, maker_.place_class(), 4);
    if (!place_fields) place_fields = fields_of(place, maker_.place_class(), 3);  // from a pickle
    if (!place_fields) return false;
    PyObject* descriptors = field_in(place_fields, names.transform_descriptors);
    PyObject* path = field_in(place_fields, names.relative_path);
    std::int64_t offset = 0;
    std::int64_t length = 0;
    if (path == nullptr || PyUnicode_CheckExact(path) == 0 ||
        !to_plain_int(field_in(place_fields, names.offset), &offset) ||
        !to_plain_int(field_in(place_fields, names.length), &length) ||
        (descriptors != nullptr && descriptors != Py_None)) {
      return false;
    }
    WireIndex own;
    if (!out_.read_index(index, &own)) return false;
    put_flags(static_cast<std::uint8_t>(kPlain | out_.flags_of(own)));
    out_.put_index(own);
    out_.put_name(path);
    wire::Writer& rest = out_.column(kRefs);
    // Wrapping: what is far away takes ten bytes, and comes back as it was.
    rest.put_signed(wrapped_difference(offset, end_));
    rest.put_signed(length);
    rest.put_signed(wrapped_difference(size, length));
    end_ = static_cast<std::int64_t>(static_cast<std::uint64_t>(offset) +
                                     static_cast<std::uint64_t>(length));
    return true;
  }

  static std::int64_t wrapped_difference(std::int64_t a, std::int64_t b) {
    return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) - static_cast<std::uint64_t>(b));
  }

  WireWriter out_;
  ItemMaker& maker_;
  py::list others_;
  std::int64_t end_ = 0;  // of the result before, in its file
};

std::int64_t wrapped_sum(std::int64_t a, std::int64_t b) {
  return static_cast<std::int64_t>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
}

}  // namespace

py::tuple pack_results(ItemMaker& maker, const py::list& results) {
  ResultPacker packer(maker);
  for (std::size_t i = 0; i < results.size(); ++i) packer.add(results[i]);
  return packer.result();
}

py::list unpack_results(ItemMaker& maker, const py::bytes& message, const py::list& others) {
  WireReader in(maker, std::string_view(message));
  wire::Reader& flags = in.column(kFlags);
  wire::Reader& rest = in.column(kRefs);
  py::list results;
  std::size_t next = 0;
  std::int64_t end = 0;
  while (!flags.is_done()) {
    const auto bits = static_cast<std::uint8_t>(flags.get_text(1).front());
    if (bits == kOtherResult) {
      if (next >= others.size()) wire::refuse("a result is missing");
      results.append(others[next++]);
      continue;
    }
    if ((bits & ~(kHasOffset | kHasHint)) != 0) wire::refuse("a result of an unknown form");
    const py::object index = in.index(bits);
    const py::object& path = in.name(in.get_name());
    const std::int64_t offset = wrapped_sum(rest.get_signed(), end);
    const std::int64_t length = rest.get_signed();
    const std::int64_t size = wrapped_sum(rest.get_signed(), length);
    end = wrapped_sum(offset, length);
    results.append(maker.result(index, size, maker.place(path, offset, length)));
  }
  if (next != others.size()) wire::refuse("there are more results beside it than it names");
  in.check_done();
  return results;
}

}  // namespace dcpx
