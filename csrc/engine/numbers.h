// The dtypes of torch that are numbers, and their elements as numbers of C++.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace dcpx::engine {

__extension__ using Wide = __int128;  // each integer of 64 bits, and each difference of two

enum class NumberKind {
  kBool,
  kUint8,
  kUint16,
  kUint32,
  kUint64,
  kInt8,
  kInt16,
  kInt32,
  kInt64,
  kFloat64,
  kFloat32,
  kFloat16,
  kBfloat16,
  kFloat8E4m3fn,
  kFloat8E4m3fnuz,
  kFloat8E5m2,
  kFloat8E5m2fnuz,
  kFloat8E8m0fnu,
  kComplex32,
  kComplex64,
  kComplex128,
};

// By torch's name, such as "float8_e4m3fn"; empty for a dtype that is no number an element.
std::optional<NumberKind> number_kind(std::string_view name) noexcept;

bool is_complex(NumberKind kind) noexcept;
bool is_integer(NumberKind kind) noexcept;  // or a truth
std::size_t elem_bytes_of(NumberKind kind) noexcept;

// Converts `count` numbers that lie one behind the other; a complex one is two. What has more than
// 53 bits is rounded to a double, as of int64. REQUIRES: integers where they become Wide.
void widen(NumberKind kind, const std::byte* from, std::size_t count, Wide* out) noexcept;
void widen(NumberKind kind, const std::byte* from, std::size_t count, double* out) noexcept;

}  // namespace dcpx::engine
