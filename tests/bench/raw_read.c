/* What disk and page cache give: reads BYTES of a file to ready memory and prints the seconds.
 *
 *   raw_read PATH BYTES BLOCK THREADS (direct | buffered) [REFERENCE]
 *
 * The memory is as large as what is read, on huge pages, touched beforehand; the threads wait
 * before the clock starts. Timed: open, preadv of BLOCK bytes by THREADS threads, close. Prints
 * "SECONDS direct|buffered". With REFERENCE, what was read is compared with the same bytes of that
 * file afterwards. */
#include "raw_common.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/uio.h>
#include <unistd.h>

static unsigned char* destination;
static size_t wanted_bytes, block_bytes;
static int fd;
static atomic_size_t next_block;
static pthread_barrier_t start_line;

static void read_all(size_t begin, size_t end) {
  while (begin < end) {
    const struct iovec piece = {destination + begin, end - begin};
    const ssize_t n = preadv(fd, &piece, 1, (off_t)begin);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENODATA;
    if (n <= 0) fail("raw_read: preadv");
    begin += (size_t)n;
  }
}

static void* work(void* unused) {
  (void)unused;
  pthread_barrier_wait(&start_line);
  for (;;) {
    const size_t begin = atomic_fetch_add(&next_block, 1) * block_bytes;
    if (begin >= wanted_bytes) return NULL;
    const size_t end = begin + block_bytes;
    read_all(begin, end < wanted_bytes ? end : wanted_bytes);
  }
}

static void check(const char* path) {
  const size_t chunk_bytes = 1 << 20;
  unsigned char* expected = malloc(chunk_bytes);
  const int in = open(path, O_RDONLY);
  if (expected == NULL || in < 0) fail("raw_read: open the reference");
  for (size_t at = 0; at < wanted_bytes;) {
    const size_t left = wanted_bytes - at;
    const ssize_t n = read(in, expected, left < chunk_bytes ? left : chunk_bytes);
    if (n < 0) fail("raw_read: read the reference");
    if (n == 0 || memcmp(expected, destination + at, (size_t)n) != 0) {
      fprintf(stderr, "raw_read: a byte after %zu is not what is in the file\n", at);
      exit(2);
    }
    at += (size_t)n;
  }
}

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) {
    fprintf(stderr, "usage: raw_read PATH BYTES BLOCK THREADS (direct | buffered) [REFERENCE]\n");
    return 1;
  }
  const int wants_direct = strcmp(argv[5], "direct") == 0;
  /* Whole pages alone can be read by O_DIRECT; the file is longer than its tensors. */
  wanted_bytes = strtoull(argv[2], NULL, 10) / kPageBytes * kPageBytes;
  block_bytes = round_up(strtoull(argv[3], NULL, 10), kPageBytes);
  const unsigned threads = (unsigned)strtoul(argv[4], NULL, 10);
  destination = ready_memory(wanted_bytes);

  pthread_t ids[kMaxThreads];
  if (threads < 1 || threads > kMaxThreads) fail("raw_read: THREADS is not 1 to 64");
  pthread_barrier_init(&start_line, NULL, threads + 1);
  for (unsigned i = 0; i < threads; ++i) {
    if ((errno = pthread_create(&ids[i], NULL, work, NULL)) != 0) fail("raw_read: pthread_create");
  }

  const double began = now_s();
  const int flags = O_RDONLY | O_CLOEXEC;
  int is_direct = wants_direct;
  fd = open(argv[1], wants_direct ? flags | O_DIRECT : flags);
  if (fd < 0 && wants_direct && errno == EINVAL) { /* no O_DIRECT here */
    is_direct = 0;
    fd = open(argv[1], flags);
  }
  if (fd < 0) fail("raw_read: open");
  pthread_barrier_wait(&start_line);
  for (unsigned i = 0; i < threads; ++i) pthread_join(ids[i], NULL);
  if (close(fd) != 0) fail("raw_read: close");
  const double seconds = now_s() - began;

  if (argc == 7) check(argv[6]);
  printf("%.9f %s\n", seconds, is_direct ? "direct" : "buffered");
  return 0;
}
