// CRC-32 by carry-less multiplication: 128-bit lanes of the message are folded forward over the
// distance between accumulators until one lane is left, which the table finishes.
#include "format/crc32_kernels.h"

#if defined(__x86_64__)

#include <cpuid.h>
#include <immintrin.h>

namespace dcpx::crc32_kernels {
namespace {

#define DCPX_TARGET_PCLMUL __attribute__((target("pclmul,sse4.1")))
#define DCPX_TARGET_VPCLMUL __attribute__((target("vpclmulqdq,avx512f,pclmul,sse4.1")))

// The factors that carry a lane `bits` further: its low half holds the higher powers and needs
// x^(bits + 32), its high half x^(bits - 32); one more bit makes up for reflection.
struct FoldKey {
  long long low, high;
};
constexpr FoldKey fold_key(std::uint64_t bits) {
  return {static_cast<long long>(std::uint64_t{crc32_poly::x_to_the(bits + 32)} << 1),
          static_cast<long long>(std::uint64_t{crc32_poly::x_to_the(bits - 32)} << 1)};
}

DCPX_TARGET_PCLMUL inline __m128i load128(const std::byte* from) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
}

template <std::uint64_t bits>
DCPX_TARGET_PCLMUL inline __m128i fold128(__m128i lane, __m128i next) {
  constexpr FoldKey key = fold_key(bits);
  const __m128i factors = _mm_set_epi64x(key.high, key.low);
  return _mm_xor_si128(next, _mm_xor_si128(_mm_clmulepi64_si128(lane, factors, 0x00),
                                           _mm_clmulepi64_si128(lane, factors, 0x11)));
}

// Folds whole 16-byte blocks into `lane`, then lets the table reduce the lane and the rest.
DCPX_TARGET_PCLMUL inline std::uint32_t finish(__m128i lane, const std::byte* data,
                                               std::size_t nbytes) {
  for (; nbytes >= 16; data += 16, nbytes -= 16) lane = fold128<128>(lane, load128(data));
  alignas(16) std::byte last[16];
  _mm_store_si128(reinterpret_cast<__m128i*>(last), lane);
  return table(table(0, last, sizeof(last)), data, nbytes);
}

DCPX_TARGET_PCLMUL std::uint32_t pclmul(std::uint32_t raw, const std::byte* data,
                                        std::size_t nbytes) noexcept {
  if (nbytes < 64) return table(raw, data, nbytes);
  __m128i a = _mm_xor_si128(load128(data), _mm_cvtsi32_si128(static_cast<int>(raw)));
  __m128i b = load128(data + 16);
  __m128i c = load128(data + 32);
  __m128i d = load128(data + 48);
  for (data += 64, nbytes -= 64; nbytes >= 64; data += 64, nbytes -= 64) {
    a = fold128<512>(a, load128(data));
    b = fold128<512>(b, load128(data + 16));
    c = fold128<512>(c, load128(data + 32));
    d = fold128<512>(d, load128(data + 48));
  }
  b = fold128<128>(a, b);
  c = fold128<128>(b, c);
  return finish(fold128<128>(c, d), data, nbytes);
}

DCPX_TARGET_VPCLMUL inline __m512i load512(const std::byte* from) {
  return _mm512_loadu_si512(from);
}

template <std::uint64_t bits>
DCPX_TARGET_VPCLMUL inline __m512i fold512(__m512i lanes, __m512i next) {
  constexpr FoldKey key = fold_key(bits);
  const __m512i factors =
      _mm512_set_epi64(key.high, key.low, key.high, key.low, key.high, key.low, key.high, key.low);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(next, _mm512_clmulepi64_epi128(lanes, factors, 0x00),
                                   _mm512_clmulepi64_epi128(lanes, factors, 0x11), kXorOfThree);
}

DCPX_TARGET_VPCLMUL std::uint32_t vpclmul(std::uint32_t raw, const std::byte* data,
                                          std::size_t nbytes) noexcept {
  if (nbytes < 512) return pclmul(raw, data, nbytes);
  __m512i a = _mm512_xor_si512(load512(data),
                               _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(raw))));
  __m512i b = load512(data + 64);
  __m512i c = load512(data + 128);
  __m512i d = load512(data + 192);
  for (data += 256, nbytes -= 256; nbytes >= 256; data += 256, nbytes -= 256) {
    a = fold512<2048>(a, load512(data));
    b = fold512<2048>(b, load512(data + 64));
    c = fold512<2048>(c, load512(data + 128));
    d = fold512<2048>(d, load512(data + 192));
  }
  b = fold512<512>(a, b);
  c = fold512<512>(b, c);
  d = fold512<512>(c, d);
  for (; nbytes >= 64; data += 64, nbytes -= 64) d = fold512<512>(d, load512(data));
  alignas(64) std::byte lanes[64];
  _mm512_store_si512(lanes, d);
  __m128i lane = fold128<384>(load128(lanes), load128(lanes + 48));
  lane = fold128<256>(load128(lanes + 16), lane);
  lane = fold128<128>(load128(lanes + 32), lane);
  return finish(lane, data, nbytes);
}

// Asked of the processor: __builtin_cpu_supports says no to all in a module that zig has linked.
struct Cpu {
  bool has_pclmul = false;
  bool has_vpclmul = false;

  Cpu() noexcept {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return;
    has_pclmul = (ecx & bit_PCLMUL) != 0 && (ecx & bit_SSE4_1) != 0;
    const bool has_xgetbv = (ecx & bit_OSXSAVE) != 0;
    if (!has_pclmul || !has_xgetbv) return;
    unsigned saved = 0, high = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
    constexpr unsigned kWide = 0xe6;  // the system saves the registers of SSE, AVX and AVX-512
    if ((saved & kWide) != kWide || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return;
    has_vpclmul = (ebx & bit_AVX512F) != 0 && (ecx & bit_VPCLMULQDQ) != 0;
  }
};

const Cpu& cpu() noexcept {
  static const Cpu found;
  return found;
}

}  // namespace

Kernel find_pclmul() noexcept { return cpu().has_pclmul ? &pclmul : nullptr; }

Kernel find_vpclmul() noexcept { return cpu().has_vpclmul ? &vpclmul : nullptr; }

}  // namespace dcpx::crc32_kernels

#else

namespace dcpx::crc32_kernels {
Kernel find_pclmul() noexcept { return nullptr; }
Kernel find_vpclmul() noexcept { return nullptr; }
}  // namespace dcpx::crc32_kernels

#endif
