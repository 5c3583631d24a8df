/* What raw_write.c and raw_read.c share: ready memory on huge pages, threads that take block after
 * block of it, a clock, an end with a cause. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

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

static unsigned char* memory_of_file;
static size_t total_bytes, block_bytes;
static int fd;
static atomic_size_t next_block;
static pthread_barrier_t start_line;
static pthread_t thread_ids[kMaxThreads];
static unsigned thread_count;

static void move_all(size_t begin, size_t end); /* of the program */

static void* work(void* unused) {
  (void)unused;
  pthread_barrier_wait(&start_line);
  for (;;) {
    const size_t begin = atomic_fetch_add(&next_block, 1) * block_bytes;
    if (begin >= total_bytes) return NULL;
    const size_t end = begin + block_bytes;
    move_all(begin, end < total_bytes ? end : total_bytes);
  }
}

/* Starts the threads, which wait for `run_threads`. */
static void make_threads(const char* block, const char* count) {
  block_bytes = round_up(strtoull(block, NULL, 10), kPageBytes);
  thread_count = (unsigned)strtoul(count, NULL, 10);
  if (thread_count < 1 || thread_count > kMaxThreads) fail("THREADS is not 1 to 64");
  pthread_barrier_init(&start_line, NULL, thread_count + 1);
  for (unsigned i = 0; i < thread_count; ++i) {
    if ((errno = pthread_create(&thread_ids[i], NULL, work, NULL)) != 0) fail("pthread_create");
  }
}

static void run_threads(void) {
  pthread_barrier_wait(&start_line);
  for (unsigned i = 0; i < thread_count; ++i) pthread_join(thread_ids[i], NULL);
}

/* Compares a file with the memory, up to `total_bytes`; returns how many bytes the file has. */
static size_t compare(const char* path) {
  const size_t chunk_bytes = 1 << 20;
  unsigned char* chunk = malloc(chunk_bytes);
  const int in = open(path, O_RDONLY);
  if (chunk == NULL || in < 0) fail("open to compare");
  for (size_t at = 0;;) {
    const size_t left = total_bytes - at;
    const ssize_t n = read(in, chunk, left + 1 < chunk_bytes ? left + 1 : chunk_bytes);
    if (n < 0) fail("read to compare");
    const size_t looked_at = (size_t)n < left ? (size_t)n : left;
    if (memcmp(chunk, memory_of_file + at, looked_at) != 0) {
      fprintf(stderr, "a byte after %zu differs\n", at);
      exit(2);
    }
    if (n == 0 || (size_t)n > left) return at + (size_t)n;
    at += (size_t)n;
  }
}
