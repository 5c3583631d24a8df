#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "common/worker_group.h"
#include "engine/tensor_values.h"

namespace {

using namespace dcpx::engine;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

// Exactly sized and at an odd address, so that ASan and UBSan see what reads beyond or aligned.
template <typename T>
class Odd {
 public:
  explicit Odd(const std::vector<T>& values) : bytes_(1) {
    const auto* const begin = reinterpret_cast<const std::byte*>(values.data());
    bytes_.insert(bytes_.end(), begin, begin + values.size() * sizeof(T));
    bytes_.shrink_to_fit();
  }
  const std::byte* data() const { return bytes_.data() + 1; }

 private:
  std::vector<std::byte> bytes_;
};

template <typename T>
Differences compared(NumberKind kind, const std::vector<T>& a, const std::vector<T>& b,
                     double rtol = 0, double atol = 0) {
  return compare_values(kind, Odd<T>(a).data(), kind, Odd<T>(b).data(), a.size(), rtol, atol);
}

TEST(values_of_every_kind_have_names_and_are_equal_to_themselves) {
  const std::vector<std::uint8_t> bits(3 * 16, 0x5a);
  for (const char* name :
       {"bool",        "uint8",           "uint16",         "uint32",        "uint64",
        "int8",        "int16",           "int32",          "int64",         "float64",
        "float32",     "float16",         "bfloat16",       "float8_e4m3fn", "float8_e4m3fnuz",
        "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",     "complex64",
        "complex128"}) {
    const auto kind = number_kind(name);
    CHECK(kind.has_value());
    const std::uint64_t count = bits.size() / elem_bytes_of(*kind);
    const Odd<std::uint8_t> data(bits);
    const Differences found = compare_values(*kind, data.data(), *kind, data.data(), count, 0, 0);
    CHECK(found.is_same_bits && found.different == 0 && found.max_abs == 0 && found.norm == 0);
    CHECK(statistics(*kind, data.data(), count).finite == count);
  }
  CHECK(!number_kind("qint8").has_value() && !number_kind("float4_e2m1fn_x2").has_value());
}

TEST(infinities_are_near_to_themselves_alone) {
  const Differences found =
      compared<double>(NumberKind::kFloat64, {kInf, 1, kInf}, {kInf, kInf, -kInf}, 1, 1);
  CHECK(found.different == 2 && found.beyond == 2 && found.max_abs == kInf && found.norm == 0);
}

TEST(integers_are_compared_exactly) {
  const std::int64_t large = std::int64_t{1} << 62;
  const Differences found = compared<std::int64_t>(NumberKind::kInt64, {large, 1}, {large + 1, 1});
  CHECK(found.different == 1 && found.max_abs == 1);
  const std::int64_t low = std::numeric_limits<std::int64_t>::min();
  const std::uint64_t high = std::numeric_limits<std::uint64_t>::max();
  const Odd<std::int64_t> a({low});
  const Odd<std::uint64_t> b({high});
  const Differences mixed =
      compare_values(NumberKind::kInt64, a.data(), NumberKind::kUint64, b.data(), 1, 0, 0);
  CHECK(mixed.different == 1 && mixed.max_abs == 0x1p63 + 0x1p64 && !mixed.is_same_bits);
  const Statistics of_b = statistics(NumberKind::kUint64, b.data(), 1);
  CHECK(of_b.is_integer && static_cast<std::uint64_t>(of_b.max_integer) == high);
}

TEST(norms_neither_overflow_nor_vanish) {
  const Differences large = compared<double>(NumberKind::kFloat64, {3e200, 0}, {0, 4e200});
  CHECK(std::abs(large.norm / 5e200 - 1) < 1e-12 && std::abs(large.norm_a / 3e200 - 1) < 1e-12);
  const Differences small = compared<double>(NumberKind::kFloat64, {3e-200, 0}, {0, 4e-200});
  CHECK(std::abs(small.norm / 5e-200 - 1) < 1e-12);
  const std::vector<double> most(5000, 1e308);
  const Statistics found = statistics(NumberKind::kFloat64, Odd<double>(most).data(), most.size());
  CHECK(std::abs(found.mean / 1e308 - 1) < 1e-12 && found.min == 1e308 && found.max == 1e308);
}

TEST(complex_elements_are_one_each_and_against_reals) {
  const Odd<float> a({3, 0, 1, 1});
  const Odd<float> b({0, 4, 1, 1});
  const Differences two =
      compare_values(NumberKind::kComplex64, a.data(), NumberKind::kComplex64, b.data(), 2, 0, 0);
  CHECK(two.different == 1 && two.max_abs == 5);
  const Odd<float> real({3, 1});
  const Differences mixed =
      compare_values(NumberKind::kComplex64, a.data(), NumberKind::kFloat32, real.data(), 2, 0, 0);
  CHECK(mixed.different == 1 && mixed.max_abs == 1);
}

// The tables of small floats are made by who needs them first.
TEST(threads_compare_at_once) {
  std::vector<std::byte> bits(256);
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = static_cast<std::byte>(i);
  std::vector<std::uint64_t> found(4);
  const auto work = [&](unsigned number, const dcpx::StopFlag&) {
    for (const NumberKind kind : {NumberKind::kFloat8E4m3fn, NumberKind::kFloat8E5m2}) {
      found[number] += statistics(kind, bits.data(), bits.size()).nan;
    }
    found[number] += statistics(NumberKind::kFloat16, bits.data(), bits.size() / 2).finite;
  };
  dcpx::run_workers(4, work, {});
  for (const std::uint64_t each : found) CHECK_EQ(each, found[0]);
}

}  // namespace
