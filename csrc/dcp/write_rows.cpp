#include "dcp/write_rows.h"

#include <algorithm>
#include <string_view>

#include "common/bytes.h"
#include "common/error.h"
#include "dcp/fields.h"
#include "format/zip_object.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using engine::WriteItem;

// What many rows share: torch_dcpx.writer.rows.ItemType, in its order of fields.
struct ItemType {
  TensorFraming framing;
  std::uint64_t elem_bytes = 1;
  std::uint8_t flags = 0;
  std::uint8_t memory_format = 0;
  std::string dtype;
  std::string prop_dtype;
  std::string layout;
};

std::vector<ItemType> decode_types(const py::list& rows) {
  std::vector<ItemType> types;
  for (const py::handle& row : py::tuple(rows)) {
    check_tuple(row, 9, "an item type has 9 fields");
    types.push_back({{to_string(field(row, 0)), to_string(field(row, 1)), to_string(field(row, 2))},
                     to_u64(field(row, 3)),
                     to_u8(field(row, 4)),
                     to_u8(field(row, 5)),
                     to_string(field(row, 6)),
                     to_string(field(row, 7)),
                     to_string(field(row, 8))});
  }
  return types;
}

// Appends a JSON string as Python's json writes it with ensure_ascii=False.
void append_json(const std::string& text, std::string& out) {
  constexpr std::string_view kHex = "0123456789abcdef";
  out += '"';
  for (const char c : text) {
    const auto code = static_cast<unsigned char>(c);
    constexpr std::string_view kEscaped = "\"\\\b\f\n\r\t";
    constexpr std::string_view kLetters = "\"\\bfnrt";
    if (const std::size_t which = kEscaped.find(c); which != std::string_view::npos) {
      out += '\\';
      out += kLetters[which];
    } else if (code < 0x20) {
      out += "\\u00";
      out += kHex[code >> 4];
      out += kHex[code & 0xf];
    } else {
      out += c;
    }
  }
  out += '"';
}

// flatten's path of an item, a tuple of str and int, as a JSON list; empty for anything else.
std::string to_path(const py::handle& path) {
  if (PyTuple_CheckExact(path.ptr()) == 0) return {};
  std::string out = "[";
  const Py_ssize_t count = PyTuple_GET_SIZE(path.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    const py::handle key = field(path, i);
    if (i > 0) out += ", ";
    if (PyUnicode_CheckExact(key.ptr()) != 0) {
      append_json(to_string(key), out);
    } else if (PyLong_CheckExact(key.ptr()) != 0) {
      out += to_string(py::str(key));
    } else {
      return {};
    }
  }
  out += ']';
  return out;
}

// What is gathered is stored in C order; the row says what is stored, not where it came from.
void make_gather(WriteItem& item) {
  item.gather.elem_bytes = item.elem_bytes;
  std::uint64_t stride = 1;
  std::vector<std::int64_t> stored(item.row.sizes.size());
  for (std::size_t d = stored.size(); d-- > 0;) {
    stored[d] = static_cast<std::int64_t>(stride);
    stride = checked_mul(stride,
                         static_cast<std::uint64_t>(std::max<std::int64_t>(item.row.sizes[d], 1)));
  }
  for (std::size_t d = 0; d < stored.size(); ++d) {
    item.gather.lengths.push_back(static_cast<std::uint64_t>(item.row.sizes[d]));
    // That of a single element says nothing, and may be of any size.
    const auto source_stride =
        static_cast<std::uint64_t>(item.row.sizes[d] > 1 ? item.row.strides[d] : 0);
    item.gather.src_strides.push_back(checked_mul(source_stride, item.elem_bytes));
    item.gather.dst_strides.push_back(0);
  }
  item.row.strides = std::move(stored);
}

// In a row only: bytes that are the pickle of an item without tensors, still to be framed.
constexpr std::uint64_t kPickle = 3;

// The order of fields is that of torch_dcpx.writer.rows.WriteRow.
void decode_row(const py::handle& row, const std::vector<ItemType>& types, ZipItemCache& zips,
                WriteRows& out, WriteItem& item) {
  check_tuple(row, 13, "a write row has 13 fields");
  const std::uint64_t file = to_u64(field(row, 0));
  DCPX_CHECK(file <= UINT32_MAX, "a row of an unknown file");
  item.file = static_cast<std::uint32_t>(file);
  const std::uint64_t kind = to_u64(field(row, 1));
  DCPX_CHECK(kind <= kPickle, "an unknown kind of item");
  item.row.kind = kind == kPickle ? ItemKind::kBytes : static_cast<ItemKind>(kind);
  const std::uint64_t type_index = to_u64(field(row, 2));
  DCPX_CHECK(type_index < types.size(), "a row of an unknown type");
  const ItemType& type = types[type_index];
  item.row.payload_bytes = to_u64(field(row, 4));
  item.device = to_device(field(row, 12));
  DCPX_CHECK(item.device < 0 || (kind == static_cast<std::uint64_t>(ItemKind::kTensor) &&
                                 PyLong_Check(field(row, 3).ptr()) != 0),
             "what lies in device memory is a tensor, and has an address");
  item.source = out.buffers.add(field(row, 3), /*is_writable=*/false, item.row.payload_bytes);
  if (kind == kPickle) {
    out.archives.push_back(object_zip(item.source, item.row.payload_bytes));
    item.source = out.archives.back().data();
    item.row.payload_bytes = out.archives.back().size();
  }
  item.elem_bytes = type.elem_bytes;
  item.row.sizes = int_tuple(field(row, 5));
  item.row.strides = int_tuple(field(row, 6));
  DCPX_CHECK(item.row.sizes.size() == item.row.strides.size(),
             "sizes and strides differ in number");
  item.is_dense = to_bool(field(row, 7));
  DCPX_CHECK(item.is_dense || item.row.kind == ItemKind::kTensor, "bytes have no strides");
  item.row.fqn = to_string(field(row, 8));
  item.row.global_sizes = int_tuple(field(row, 9));
  item.row.offsets = int_tuple(field(row, 10));
  item.row.path = to_path(field(row, 11));
  item.row.flags = type.flags;
  item.row.memory_format = type.memory_format;
  item.row.dtype = type.dtype;
  item.row.prop_dtype = type.prop_dtype;
  item.row.layout = type.layout;
  if (item.row.kind != ItemKind::kTensor) return;
  if (!item.is_dense) make_gather(item);
  item.zip = zips.make(type.framing, item.row.sizes, item.row.strides, item.row.payload_bytes,
                       item.elem_bytes);
}

}  // namespace

void decode_write_rows(const py::list& row_list, const py::list& type_rows, WriteRows& out) {
  const std::vector<ItemType> types = decode_types(type_rows);
  const py::tuple rows(row_list);  // a number or buffer of a row may run Python code
  out.items.resize(rows.size());
  std::size_t i = 0;
  ZipItemCache zips;
  for (const py::handle& row : rows) decode_row(row, types, zips, out, out.items[i++]);
}

}  // namespace dcpx
