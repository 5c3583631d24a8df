/* What the disk takes: writes BYTES from ready memory to a fresh file and prints the seconds.
 *
 *   raw_write PATH BYTES BLOCK THREADS PREALLOCATE
 *   raw_write PATH BYTES check
 *
 * The memory is as large as the file (a small reused source would be hot in the cache), on huge
 * pages, filled beforehand; the threads wait before the clock starts. Timed: open, fallocate if
 * PREALLOCATE is 1, pwrite of BLOCK bytes by THREADS threads with O_DIRECT, fdatasync, close.
 * Prints "SECONDS direct|buffered". The second form compares a file with what the first wrote. */
#include "raw_common.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

static unsigned char* source;
static size_t file_bytes, block_bytes;
static int fd;
static atomic_size_t next_block;
static pthread_barrier_t start_line;

static void write_all(size_t begin, size_t end) {
  while (begin < end) {
    const ssize_t n = pwrite(fd, source + begin, end - begin, (off_t)begin);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("raw_write: pwrite");
    begin += (size_t)n;
  }
}

static void* work(void* unused) {
  (void)unused;
  pthread_barrier_wait(&start_line);
  for (;;) {
    const size_t begin = atomic_fetch_add(&next_block, 1) * block_bytes;
    if (begin >= file_bytes) return NULL;
    const size_t end = begin + block_bytes;
    write_all(begin, end < file_bytes ? end : file_bytes);
  }
}

static void check(const char* path) {
  const size_t chunk_bytes = 1 << 20;
  unsigned char* read_back = malloc(chunk_bytes);
  const int in = open(path, O_RDONLY);
  if (read_back == NULL || in < 0) fail("raw_write: open to check");
  size_t at = 0;
  for (;;) {
    const ssize_t n = read(in, read_back, chunk_bytes);
    if (n < 0) fail("raw_write: read");
    if (n == 0) break;
    if (at + (size_t)n > file_bytes || memcmp(read_back, source + at, (size_t)n) != 0) {
      fprintf(stderr, "raw_write: a byte after %zu is not what was written\n", at);
      exit(2);
    }
    at += (size_t)n;
  }
  if (at != file_bytes) {
    fprintf(stderr, "raw_write: %zu bytes of %zu are in the file\n", at, file_bytes);
    exit(2);
  }
}

int main(int argc, char** argv) {
  const int is_check = argc == 4 && strcmp(argv[3], "check") == 0;
  if (argc != 6 && !is_check) {
    fprintf(stderr, "usage: raw_write PATH BYTES (BLOCK THREADS PREALLOCATE | check)\n");
    return 1;
  }
  const char* path = argv[1];
  file_bytes = round_up(strtoull(argv[2], NULL, 10), kPageBytes);
  source = ready_memory(file_bytes);
  if (is_check) {
    check(path);
    return 0;
  }
  block_bytes = round_up(strtoull(argv[3], NULL, 10), kPageBytes);
  const unsigned threads = (unsigned)strtoul(argv[4], NULL, 10);
  const int preallocate = atoi(argv[5]);

  pthread_t ids[kMaxThreads];
  if (threads < 1 || threads > kMaxThreads) fail("raw_write: THREADS is not 1 to 64");
  pthread_barrier_init(&start_line, NULL, threads + 1);
  for (unsigned i = 0; i < threads; ++i) {
    if ((errno = pthread_create(&ids[i], NULL, work, NULL)) != 0) fail("raw_write: pthread_create");
  }

  const double began = now_s();
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  int is_direct = 1;
  fd = open(path, flags | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) { /* no O_DIRECT here; the file was made all the same */
    is_direct = 0;
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  }
  if (fd < 0) fail("raw_write: open");
  if (preallocate && fallocate(fd, 0, 0, (off_t)file_bytes) != 0) fail("raw_write: fallocate");
  pthread_barrier_wait(&start_line);
  for (unsigned i = 0; i < threads; ++i) pthread_join(ids[i], NULL);
  if (fdatasync(fd) != 0) fail("raw_write: fdatasync");
  if (close(fd) != 0) fail("raw_write: close");
  const double seconds = now_s() - began;

  printf("%.9f %s\n", seconds, is_direct ? "direct" : "buffered");
  return 0;
}
