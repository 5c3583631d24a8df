#include "format/tensor_pickle.h"

#include "common/bytes.h"
#include "format/pickle_opcodes.h"

namespace dcpx {
namespace {

using namespace pickle_op;

struct NamedWidth {
  std::string_view name;
  std::uint64_t elem_bytes;
};

constexpr NamedWidth kTypedStorages[] = {
    {"FloatStorage", 4},  {"BFloat16Storage", 2},     {"HalfStorage", 2},
    {"DoubleStorage", 8}, {"LongStorage", 8},         {"IntStorage", 4},
    {"ShortStorage", 2},  {"CharStorage", 1},         {"ByteStorage", 1},
    {"BoolStorage", 1},   {"ComplexFloatStorage", 8}, {"ComplexDoubleStorage", 16},
};
constexpr NamedWidth kUntypedDtypes[] = {
    {"float8_e4m3fn", 1},  {"float8_e5m2", 1},      {"float8_e4m3fnuz", 1}, {"float8_e5m2fnuz", 1},
    {"float8_e8m0fnu", 1}, {"float4_e2m1fn_x2", 1}, {"uint16", 2},          {"uint32", 4},
    {"uint64", 8},         {"complex32", 4},        {"bcomplex32", 4},      {"bits8", 1},
    {"bits16", 2},         {"bits1x8", 1},          {"bits2x4", 1},         {"bits4x2", 1},
};

template <std::size_t count>
std::uint64_t find_width(const NamedWidth (&table)[count], std::string_view name) noexcept {
  for (const NamedWidth& row : table) {
    if (row.name == name) return row.elem_bytes;
  }
  return 0;
}

void put_op(std::vector<std::byte>& out, Opcode op) { out.push_back(std::byte{op}); }

void put_global(std::vector<std::byte>& out, std::string_view module, std::string_view name) {
  put_op(out, kGlobal);
  put_bytes(out, module);
  put_bytes(out, "\n");
  put_bytes(out, name);
  put_bytes(out, "\n");
}

void put_text(std::vector<std::byte>& out, std::string_view text) {
  put_op(out, kBinunicode);
  put(out, static_cast<std::uint32_t>(text.size()));
  put_bytes(out, text);
}

void put_int(std::vector<std::byte>& out, std::int64_t value) {
  if (value >= 0 && value <= 0xFF) {
    put_op(out, kBinint1);
    put(out, static_cast<std::uint8_t>(value));
  } else if (value >= 0 && value <= 0xFFFF) {
    put_op(out, kBinint2);
    put(out, static_cast<std::uint16_t>(value));
  } else if (value >= INT32_MIN && value <= INT32_MAX) {
    put_op(out, kBinint);
    put(out, static_cast<std::int32_t>(value));
  } else {
    put_op(out, kLong1);
    put(out, std::uint8_t{8});
    put(out, value);
  }
}

void put_ints(std::vector<std::byte>& out, const std::vector<std::int64_t>& values) {
  constexpr Opcode kTupleOfFew[] = {kEmptyTuple, kTuple1, kTuple2, kTuple3};
  const bool has_mark = values.size() > 3;
  if (has_mark) put_op(out, kMark);
  for (const std::int64_t value : values) put_int(out, value);
  put_op(out, has_mark ? kTuple : kTupleOfFew[values.size()]);
}

}  // namespace

std::uint64_t framing_elem_bytes(std::string_view storage_module, std::string_view storage_name,
                                 std::string_view dtype_name) noexcept {
  if (storage_module == "torch" && dtype_name.empty()) {
    return find_width(kTypedStorages, storage_name);
  }
  if (storage_module == "torch.storage" && storage_name == "UntypedStorage") {
    return find_width(kUntypedDtypes, dtype_name);
  }
  return 0;
}

void append_tensor_pickle(const TensorFraming& framing, std::uint64_t storage_numel,
                          const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& strides, std::vector<std::byte>& out) {
  put_op(out, kProto);
  put(out, std::uint8_t{2});
  put_global(out, "torch._utils",
             framing.is_untyped() ? "_rebuild_tensor_v3" : "_rebuild_tensor_v2");
  put_op(out, kMark);
  put_op(out, kMark);  // the persistent id: kind, class, record, device, element count
  put_text(out, "storage");
  put_global(out, framing.storage_module, framing.storage_name);
  put_text(out, "0");
  put_text(out, "cpu");
  put_int(out, static_cast<std::int64_t>(storage_numel));
  put_op(out, kTuple);
  put_op(out, kBinpersid);
  put_int(out, 0);  // storage offset
  put_ints(out, sizes);
  put_ints(out, strides);
  put_op(out, kNewfalse);                         // requires_grad
  put_global(out, "collections", "OrderedDict");  // backward hooks
  put_op(out, kEmptyTuple);
  put_op(out, kReduce);
  if (framing.is_untyped()) put_global(out, "torch", framing.dtype_name);
  put_op(out, kTuple);
  put_op(out, kReduce);
  put_op(out, kStop);
}

}  // namespace dcpx
