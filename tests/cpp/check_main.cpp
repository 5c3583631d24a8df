// Runs every registered case, or those whose name holds the first argument, in an order drawn from
// DCPX_SEED (1 by default).
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "check.h"

int main(int argc, char** argv) {
  const char* wanted = argc > 1 ? argv[1] : "";
  const char* seed_text = std::getenv("DCPX_SEED");
  const unsigned long seed = seed_text != nullptr ? std::strtoul(seed_text, nullptr, 10) : 1;
  std::vector<check::Case> cases = check::cases();
  std::shuffle(cases.begin(), cases.end(), std::mt19937_64(seed));
  int ran = 0;
  int failed = 0;
  for (const check::Case& one : cases) {
    if (std::strstr(one.name, wanted) == nullptr) continue;
    ++ran;
    try {
      one.run();
    } catch (const std::exception& error) {
      ++failed;
      std::printf("FAIL %s\n  %s\n", one.name, error.what());
    }
  }
  std::printf("%d cases, %d failed, DCPX_SEED=%lu\n", ran, failed, seed);
  return failed == 0 && ran > 0 ? 0 : 1;
}
