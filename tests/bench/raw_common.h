/* What raw_write.c and raw_read.c share: ready memory on huge pages, a clock, an end with a cause. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { kPageBytes = 4096, kHugePageBytes = 2 << 20, kMaxThreads = 64 };

static void fail(const char* what) {
  fprintf(stderr, "%s: %s\n", what, strerror(errno));
  exit(1);
}

static size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

static double now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Memory for `bytes`, filled with bits that no disk compresses. */
static unsigned char* ready_memory(size_t bytes) {
  unsigned char* memory = mmap(NULL, round_up(bytes, kHugePageBytes) + kHugePageBytes,
                               PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) fail("mmap");
  memory = (unsigned char*)round_up((size_t)memory, kHugePageBytes);
  /* Where huge pages are switched off this fails, and small ones serve. */
  (void)madvise(memory, round_up(bytes, kHugePageBytes), MADV_HUGEPAGE);
  uint64_t* words = (uint64_t*)memory;
  uint64_t state = 0x9e3779b97f4a7c15u;
  for (size_t i = 0; i < bytes / sizeof(uint64_t); ++i) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    words[i] = state;
  }
  return memory;
}
