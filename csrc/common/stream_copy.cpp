#include "common/stream_copy.h"

#include <algorithm>
#include <cstring>

#include "common/bytes.h"

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace dcpx {

#if defined(__x86_64__)

namespace {

constexpr std::uint64_t kLineBytes = 64;
constexpr std::uint64_t kAheadBytes = 1024;

}  // namespace

void stream_copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes) noexcept {
  const std::uint64_t to_line = align_up(reinterpret_cast<std::uintptr_t>(dst), kLineBytes) -
                                reinterpret_cast<std::uintptr_t>(dst);
  const std::uint64_t head = std::min(nbytes, to_line);
  std::memcpy(dst, src, head);
  const std::uint64_t lines = (nbytes - head) / kLineBytes;
  std::byte* to = dst + head;
  const std::byte* from = src + head;
  for (std::uint64_t i = 0; i < lines; ++i, to += kLineBytes, from += kLineBytes) {
    // Behind the end, where there is nothing to fetch, it does nothing.
    _mm_prefetch(reinterpret_cast<const char*>(from) + kAheadBytes, _MM_HINT_NTA);
    const auto* in = reinterpret_cast<const __m128i*>(from);
    auto* out = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(in);
    const __m128i b = _mm_loadu_si128(in + 1);
    const __m128i c = _mm_loadu_si128(in + 2);
    const __m128i d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  std::memcpy(to, from, nbytes - head - lines * kLineBytes);
  _mm_sfence();
}

#else

void stream_copy(std::byte* dst, const std::byte* src, std::uint64_t nbytes) noexcept {
  std::memcpy(dst, src, nbytes);
}

#endif

}  // namespace dcpx
