// FUZZ(wire) { ... } is a fuzz target, of `data` and `size`: libFuzzer's where DCPX_LIBFUZZER is
// set, else a test that replays corpus/wire: each file, what is cut off of a short one or has one
// byte changed, and DCPX_FUZZ_ROUNDS (2,500) mutations of each, drawn from DCPX_SEED.
#pragma once

#include <cstddef>
#include <cstdint>

#include "check.h"

namespace check {

using Target = void (*)(const std::uint8_t* data, std::size_t size);
void replay(const char* name, Target target);

}  // namespace check

#define FUZZ(name)                                           \
  static void fuzz_##name(const std::uint8_t*, std::size_t); \
  FUZZ_ENTRY(name)                                           \
  static void fuzz_##name(const std::uint8_t* data, std::size_t size)
#ifdef DCPX_LIBFUZZER
#define FUZZ_ENTRY(name)                                                              \
  extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) { \
    fuzz_##name(data, size);                                                          \
    return 0;                                                                         \
  }
#else
#define FUZZ_ENTRY(name) \
  TEST(what_is_fuzzed_as_##name) { check::replay(#name, fuzz_##name); }
#endif
