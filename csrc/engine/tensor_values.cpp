#include "engine/tensor_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace dcpx::engine {
namespace {

constexpr std::size_t kBlockElems = 1024;  // widened at one time, on the stack
constexpr std::size_t kMaxParts = 2;       // of a complex number
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

// As `widen`, of elements with `parts` each: a real number gets an imaginary part of 0.
template <typename To>
void widen_elements(NumberKind kind, const std::byte* from, std::size_t count, std::size_t parts,
                    To* out) {
  const std::size_t own = is_complex(kind) ? 2 : 1;
  widen(kind, from, count * own, out);
  if (own == parts) return;
  for (std::size_t i = count; i-- > 0;) {
    out[2 * i] = out[i];
    out[2 * i + 1] = 0;
  }
}

// The norm of the finite ones; whatever their sizes, nothing overflows or vanishes.
double norm_of(const double* values, std::size_t count) {
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += std::isfinite(values[i]) ? values[i] * values[i] : 0;
  }
  if (std::isfinite(sum) && sum > 1e-280) return std::sqrt(sum);
  double most = 0;
  for (std::size_t i = 0; i < count; ++i) {
    if (std::isfinite(values[i])) most = std::max(most, std::abs(values[i]));
  }
  if (most == 0) return 0;
  sum = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double part = std::isfinite(values[i]) ? values[i] / most : 0;
    sum += part * part;
  }
  return most * std::sqrt(sum);
}

double norm_of(const Wide* values, std::size_t count) {
  double as_doubles[kBlockElems * kMaxParts];
  for (std::size_t i = 0; i < count; ++i) as_doubles[i] = static_cast<double>(values[i]);
  return norm_of(as_doubles, count);
}

// ---- Comparison --------------------------------------------------------------------------------

bool is_nan(double value) { return value != value; }
bool is_nan(Wide) { return false; }

template <typename Number>
double distance(const Number* a, const Number* b, std::size_t parts) {
  const auto first = static_cast<double>(a[0] - b[0]);
  return parts == 1 ? std::abs(first) : std::hypot(first, static_cast<double>(a[1] - b[1]));
}

template <typename Number>
double magnitude(const Number* value, std::size_t parts) {
  const auto first = static_cast<double>(value[0]);
  return parts == 1 ? std::abs(first) : std::hypot(first, static_cast<double>(value[1]));
}

template <typename Number>
bool has_nan(const Number* value, std::size_t parts) {
  return is_nan(value[0]) || (parts == 2 && is_nan(value[1]));
}

template <typename Number>
void compare_block(const Number* a, const Number* b, std::size_t count, std::size_t parts,
                   double rtol, double atol, Differences* found) {
  double distances[kBlockElems];
  std::size_t differing = 0;
  for (std::size_t i = 0; i < count; ++i, a += parts, b += parts) {
    if (a[0] == b[0] && (parts == 1 || a[1] == b[1])) continue;
    const bool is_nan_a = has_nan(a, parts);
    if (is_nan_a && has_nan(b, parts)) continue;
    const double apart = is_nan_a || has_nan(b, parts) ? kNan : distance(a, b, parts);
    distances[differing++] = apart;
    // Of an infinity nothing is near, though its distance is within what it allows.
    const bool is_within = std::isfinite(apart) && apart <= atol + rtol * magnitude(b, parts);
    if (!is_within) ++found->beyond;
    // std::max drops a NaN or keeps it by the order of its arguments.
    if (!is_nan(found->max_abs) && !(apart <= found->max_abs)) found->max_abs = apart;
  }
  found->different += differing;
  found->norm = std::hypot(found->norm, norm_of(distances, differing));
}

template <typename Number>
void compare_all(NumberKind kind_a, const std::byte* a, NumberKind kind_b, const std::byte* b,
                 std::uint64_t count, double rtol, double atol, Differences* found) {
  Number wide_a[kBlockElems * kMaxParts];
  Number wide_b[kBlockElems * kMaxParts];
  const std::size_t parts = is_complex(kind_a) || is_complex(kind_b) ? 2 : 1;
  const std::size_t bytes_a = elem_bytes_of(kind_a);
  const std::size_t bytes_b = elem_bytes_of(kind_b);
  for (std::uint64_t at = 0; at < count; at += kBlockElems) {
    const auto length = static_cast<std::size_t>(std::min<std::uint64_t>(kBlockElems, count - at));
    const std::byte* const from_a = a + at * bytes_a;
    const std::byte* const from_b = b + at * bytes_b;
    widen_elements(kind_a, from_a, length, parts, wide_a);
    found->norm_a = std::hypot(found->norm_a, norm_of(wide_a, length * parts));
    if (kind_a == kind_b) {
      if (std::memcmp(from_a, from_b, length * bytes_a) == 0) continue;
      found->is_same_bits = false;
    }
    widen_elements(kind_b, from_b, length, parts, wide_b);
    compare_block(wide_a, wide_b, length, parts, rtol, atol, found);
  }
}

// ---- Statistics --------------------------------------------------------------------------------

// Joins the mean of `count` more values, given by a block.
void join_mean(const double* values, std::size_t count, Statistics* found) {
  if (count == 0) return;
  double sum = 0;
  for (std::size_t i = 0; i < count; ++i) sum += values[i];
  const auto size = static_cast<double>(count);
  double mean = sum / size;
  if (!std::isfinite(mean)) {  // the sum is too large, the mean is not
    mean = 0;
    for (std::size_t i = 0; i < count; ++i) mean += values[i] / size;
  }
  found->finite += count;
  const double share = size / static_cast<double>(found->finite);
  found->mean = found->mean * (1 - share) + mean * share;
}

void add_reals(const double* values, std::size_t count, Statistics* found) {
  double finite[kBlockElems];
  std::size_t kept = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const double value = values[i];
    if (std::isfinite(value)) {
      finite[kept++] = value;
    } else {
      ++(is_nan(value) ? found->nan : found->infinite);
    }
  }
  if (kept == 0) return;
  const auto [low, high] = std::minmax_element(finite, finite + kept);
  found->min = found->finite == 0 ? *low : std::min(found->min, *low);
  found->max = found->finite == 0 ? *high : std::max(found->max, *high);
  found->norm = std::hypot(found->norm, norm_of(finite, kept));
  join_mean(finite, kept, found);
}

void add_complex(const double* values, std::size_t count, Statistics* found) {
  for (std::size_t i = 0; i < count; ++i) {
    const double* const value = values + 2 * i;
    if (std::isfinite(value[0]) && std::isfinite(value[1])) {
      ++found->finite;
      found->norm = std::hypot(found->norm, std::hypot(value[0], value[1]));
    } else {
      ++(has_nan(value, 2) ? found->nan : found->infinite);
    }
  }
}

void add_integers(const Wide* values, std::size_t count, Statistics* found) {
  const auto [low, high] = std::minmax_element(values, values + count);
  found->min_integer = found->finite == 0 ? *low : std::min(found->min_integer, *low);
  found->max_integer = found->finite == 0 ? *high : std::max(found->max_integer, *high);
  found->norm = std::hypot(found->norm, norm_of(values, count));
  double as_doubles[kBlockElems];
  for (std::size_t i = 0; i < count; ++i) as_doubles[i] = static_cast<double>(values[i]);
  join_mean(as_doubles, count, found);
}

}  // namespace

Differences compare_values(NumberKind kind_a, const std::byte* a, NumberKind kind_b,
                           const std::byte* b, std::uint64_t count, double rtol,
                           double atol) noexcept {
  Differences found;
  found.is_same_bits = kind_a == kind_b;
  if (is_integer(kind_a) && is_integer(kind_b)) {
    compare_all<Wide>(kind_a, a, kind_b, b, count, rtol, atol, &found);
  } else {
    compare_all<double>(kind_a, a, kind_b, b, count, rtol, atol, &found);
  }
  return found;
}

std::uint64_t unlike_elements(const std::byte* a, const std::byte* b, std::uint64_t count,
                              std::uint64_t elem_bytes) noexcept {
  std::uint64_t unlike = 0;
  for (std::uint64_t i = 0; i < count; ++i, a += elem_bytes, b += elem_bytes) {
    if (std::memcmp(a, b, elem_bytes) != 0) ++unlike;
  }
  return unlike;
}

Statistics statistics(NumberKind kind, const std::byte* data, std::uint64_t count) noexcept {
  Statistics found;
  found.is_integer = is_integer(kind);
  double reals[kBlockElems * kMaxParts];
  Wide integers[kBlockElems];
  for (std::uint64_t at = 0; at < count; at += kBlockElems) {
    const auto length = static_cast<std::size_t>(std::min<std::uint64_t>(kBlockElems, count - at));
    const std::byte* const from = data + at * elem_bytes_of(kind);
    if (found.is_integer) {
      widen(kind, from, length, integers);
      add_integers(integers, length, &found);
    } else if (is_complex(kind)) {
      widen(kind, from, 2 * length, reals);
      add_complex(reals, length, &found);
    } else {
      widen(kind, from, length, reals);
      add_reals(reals, length, &found);
    }
  }
  return found;
}

}  // namespace dcpx::engine
