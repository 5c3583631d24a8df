#include "engine/numbers.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

namespace dcpx::engine {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr std::pair<std::string_view, NumberKind> kNames[] = {
    {"bool", NumberKind::kBool},
    {"uint8", NumberKind::kUint8},
    {"uint16", NumberKind::kUint16},
    {"uint32", NumberKind::kUint32},
    {"uint64", NumberKind::kUint64},
    {"int8", NumberKind::kInt8},
    {"int16", NumberKind::kInt16},
    {"int32", NumberKind::kInt32},
    {"int64", NumberKind::kInt64},
    {"float64", NumberKind::kFloat64},
    {"float32", NumberKind::kFloat32},
    {"float16", NumberKind::kFloat16},
    {"bfloat16", NumberKind::kBfloat16},
    {"float8_e4m3fn", NumberKind::kFloat8E4m3fn},
    {"float8_e4m3fnuz", NumberKind::kFloat8E4m3fnuz},
    {"float8_e5m2", NumberKind::kFloat8E5m2},
    {"float8_e5m2fnuz", NumberKind::kFloat8E5m2fnuz},
    {"float8_e8m0fnu", NumberKind::kFloat8E8m0fnu},
    {"complex32", NumberKind::kComplex32},
    {"complex64", NumberKind::kComplex64},
    {"complex128", NumberKind::kComplex128},
};

// ---- One number --------------------------------------------------------------------------------

// The bits of a sign, an exponent and a fraction as they are in all small floats.
double small_float(unsigned bits, unsigned exponent_bits, unsigned fraction_bits, int bias) {
  const unsigned sign = bits >> (exponent_bits + fraction_bits);
  const unsigned exponent = bits >> fraction_bits & ((1U << exponent_bits) - 1);
  const unsigned fraction = bits & ((1U << fraction_bits) - 1);
  const unsigned hidden = exponent == 0 ? 0 : 1U << fraction_bits;
  const int power = std::max<int>(static_cast<int>(exponent), 1) - bias;
  const double value =
      std::ldexp(static_cast<double>(hidden | fraction), power - static_cast<int>(fraction_bits));
  return sign != 0 ? -value : value;
}

// Those of IEEE keep their last exponent for infinities and NaN.
double ieee_float(unsigned bits, unsigned exponent_bits, unsigned fraction_bits, int bias) {
  const unsigned last = ((1U << exponent_bits) - 1) << fraction_bits;
  const unsigned magnitude = bits & ((1U << (exponent_bits + fraction_bits)) - 1);
  if (magnitude > last) return kNan;
  if (magnitude == last) return magnitude == bits ? kInfinity : -kInfinity;
  return small_float(bits, exponent_bits, fraction_bits, bias);
}

double float8(NumberKind kind, unsigned bits) {
  switch (kind) {
    case NumberKind::kFloat8E4m3fn:
      return (bits & 0x7f) == 0x7f ? kNan : small_float(bits, 4, 3, 7);
    case NumberKind::kFloat8E4m3fnuz:
      return bits == 0x80 ? kNan : small_float(bits, 4, 3, 8);
    case NumberKind::kFloat8E5m2:
      return ieee_float(bits, 5, 2, 15);
    case NumberKind::kFloat8E5m2fnuz:
      return bits == 0x80 ? kNan : small_float(bits, 5, 2, 16);
    default:  // kFloat8E8m0fnu: an exponent alone
      return bits == 0xff ? kNan : std::ldexp(1.0, static_cast<int>(bits) - 127);
  }
}

std::array<double, 256> float8_table(NumberKind kind) {
  std::array<double, 256> table{};
  for (unsigned bits = 0; bits < 256; ++bits) table[bits] = float8(kind, bits);
  return table;
}

const std::array<double, 256>& float8_values(NumberKind kind) {
  static const std::array<double, 256> tables[] = {
      float8_table(NumberKind::kFloat8E4m3fn), float8_table(NumberKind::kFloat8E4m3fnuz),
      float8_table(NumberKind::kFloat8E5m2), float8_table(NumberKind::kFloat8E5m2fnuz),
      float8_table(NumberKind::kFloat8E8m0fnu)};
  return tables[static_cast<int>(kind) - static_cast<int>(NumberKind::kFloat8E4m3fn)];
}

// In doubles alone: a thread that flushes small floats to 0 (torch.set_flush_denormal) reads right.
double half_value(std::uint16_t bits) {
  static const std::array<double, 32> scales = [] {
    std::array<double, 32> made{};
    for (int i = 0; i < 32; ++i)
      made[static_cast<std::size_t>(i)] = std::ldexp(1, std::max(i, 1) - 25);
    return made;
  }();
  const unsigned exponent = bits >> 10 & 0x1f;
  const unsigned fraction = bits & 0x3ff;
  if (exponent == 0x1f) return ieee_float(bits, 5, 10, 15);
  const double value =
      scales[exponent] * static_cast<double>(fraction | (exponent == 0 ? 0 : 0x400));
  return (bits & 0x8000) != 0 ? -value : value;
}

double bfloat16_value(std::uint16_t bits) {
  const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
  float value = 0;
  std::memcpy(&value, &wide, sizeof value);
  return static_cast<double>(value);
}

// ---- A block of numbers ------------------------------------------------------------------------

std::size_t part_bytes(NumberKind kind) {
  switch (kind) {
    case NumberKind::kUint64:
    case NumberKind::kInt64:
    case NumberKind::kFloat64:
    case NumberKind::kComplex128:
      return 8;
    case NumberKind::kUint32:
    case NumberKind::kInt32:
    case NumberKind::kFloat32:
    case NumberKind::kComplex64:
      return 4;
    case NumberKind::kUint16:
    case NumberKind::kInt16:
    case NumberKind::kFloat16:
    case NumberKind::kBfloat16:
    case NumberKind::kComplex32:
      return 2;
    default:
      return 1;
  }
}

template <typename Stored, typename To, typename Convert>
void widen_each(const std::byte* from, std::size_t count, To* out, const Convert& convert) {
  for (std::size_t i = 0; i < count; ++i) {
    Stored value;
    std::memcpy(&value, from + i * sizeof value, sizeof value);
    out[i] = convert(value);
  }
}

template <typename Stored, typename To>
void widen_plain(const std::byte* from, std::size_t count, To* out) {
  widen_each<Stored>(from, count, out, [](Stored value) { return static_cast<To>(value); });
}

template <typename To>
void widen_integers(NumberKind kind, const std::byte* from, std::size_t count, To* out) {
  switch (kind) {
    case NumberKind::kBool:
      return widen_each<std::uint8_t>(
          from, count, out, [](std::uint8_t value) { return static_cast<To>(value != 0); });
    case NumberKind::kUint8:
      return widen_plain<std::uint8_t>(from, count, out);
    case NumberKind::kUint16:
      return widen_plain<std::uint16_t>(from, count, out);
    case NumberKind::kUint32:
      return widen_plain<std::uint32_t>(from, count, out);
    case NumberKind::kUint64:
      return widen_plain<std::uint64_t>(from, count, out);
    case NumberKind::kInt8:
      return widen_plain<std::int8_t>(from, count, out);
    case NumberKind::kInt16:
      return widen_plain<std::int16_t>(from, count, out);
    case NumberKind::kInt32:
      return widen_plain<std::int32_t>(from, count, out);
    default:
      return widen_plain<std::int64_t>(from, count, out);
  }
}

}  // namespace

std::optional<NumberKind> number_kind(std::string_view name) noexcept {
  for (const auto& [known, kind] : kNames) {
    if (known == name) return kind;
  }
  return std::nullopt;
}

bool is_complex(NumberKind kind) noexcept { return kind >= NumberKind::kComplex32; }

bool is_integer(NumberKind kind) noexcept { return kind <= NumberKind::kInt64; }

std::size_t elem_bytes_of(NumberKind kind) noexcept {
  return part_bytes(kind) * (is_complex(kind) ? 2 : 1);
}

void widen(NumberKind kind, const std::byte* from, std::size_t count, Wide* out) noexcept {
  widen_integers(kind, from, count, out);
}

void widen(NumberKind kind, const std::byte* from, std::size_t count, double* out) noexcept {
  switch (kind) {
    case NumberKind::kFloat64:
    case NumberKind::kComplex128:
      return widen_plain<double>(from, count, out);
    case NumberKind::kFloat32:
    case NumberKind::kComplex64:
      return widen_plain<float>(from, count, out);
    case NumberKind::kFloat16:
    case NumberKind::kComplex32:
      return widen_each<std::uint16_t>(from, count, out, half_value);
    case NumberKind::kBfloat16:
      return widen_each<std::uint16_t>(from, count, out, bfloat16_value);
    case NumberKind::kFloat8E4m3fn:
    case NumberKind::kFloat8E4m3fnuz:
    case NumberKind::kFloat8E5m2:
    case NumberKind::kFloat8E5m2fnuz:
    case NumberKind::kFloat8E8m0fnu: {
      const std::array<double, 256>& values = float8_values(kind);
      return widen_each<std::uint8_t>(from, count, out,
                                      [&](std::uint8_t bits) { return values[bits]; });
    }
    default:
      return widen_integers(kind, from, count, out);
  }
}

}  // namespace dcpx::engine
