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

static void move_all(size_t begin, size_t end) {
  while (begin < end) {
    const ssize_t n = pwrite(fd, memory_of_file + begin, end - begin, (off_t)begin);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail("raw_write: pwrite");
    begin += (size_t)n;
  }
}

int main(int argc, char** argv) {
  const int is_check = argc == 4 && strcmp(argv[3], "check") == 0;
  if (argc != 6 && !is_check) {
    fprintf(stderr, "usage: raw_write PATH BYTES (BLOCK THREADS PREALLOCATE | check)\n");
    return 1;
  }
  const char* path = argv[1];
  total_bytes = round_up(strtoull(argv[2], NULL, 10), kPageBytes);
  memory_of_file = ready_memory(total_bytes);
  if (is_check) {
    if (compare(path) == total_bytes) return 0;
    fprintf(stderr, "raw_write: the file has not %zu bytes\n", total_bytes);
    return 2;
  }
  make_threads(argv[3], argv[4]);
  const int preallocate = atoi(argv[5]);

  const double began = now_s();
  const int flags = O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC;
  int is_direct = 1;
  fd = open(path, flags | O_DIRECT, 0600);
  if (fd < 0 && errno == EINVAL) { /* no O_DIRECT here; the file was made all the same */
    is_direct = 0;
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
  }
  if (fd < 0) fail("raw_write: open");
  if (preallocate && fallocate(fd, 0, 0, (off_t)total_bytes) != 0) fail("raw_write: fallocate");
  run_threads();
  if (fdatasync(fd) != 0) fail("raw_write: fdatasync");
  if (close(fd) != 0) fail("raw_write: close");
  const double seconds = now_s() - began;

  printf("%.9f %s\n", seconds, is_direct ? "direct" : "buffered");
  return 0;
}
