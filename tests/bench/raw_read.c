/* What disk and page cache give: reads BYTES of a file to ready memory and prints the seconds.
 *
 *   raw_read PATH BYTES BLOCK THREADS (direct | buffered) [REFERENCE]
 *
 * The memory is as large as what is read, on huge pages, touched beforehand; the threads wait
 * before the clock starts. Timed: open, preadv of BLOCK bytes by THREADS threads, close. Prints
 * "SECONDS direct|buffered". With REFERENCE, what was read is compared with the same bytes of that
 * file afterwards. */
#include "raw_common.h"

#include <sys/uio.h>

static void move_all(size_t begin, size_t end) {
  while (begin < end) {
    const struct iovec piece = {memory_of_file + begin, end - begin};
    const ssize_t n = preadv(fd, &piece, 1, (off_t)begin);
    if (n < 0 && errno == EINTR) continue;
    if (n == 0) errno = ENODATA;
    if (n <= 0) fail("raw_read: preadv");
    begin += (size_t)n;
  }
}

int main(int argc, char** argv) {
  if (argc != 6 && argc != 7) {
    fprintf(stderr, "usage: raw_read PATH BYTES BLOCK THREADS (direct | buffered) [REFERENCE]\n");
    return 1;
  }
  const int wants_direct = strcmp(argv[5], "direct") == 0;
  /* Whole pages alone can be read by O_DIRECT; the file is longer than its tensors. */
  total_bytes = strtoull(argv[2], NULL, 10) / kPageBytes * kPageBytes;
  memory_of_file = ready_memory(total_bytes);
  make_threads(argv[3], argv[4]);

  const double began = now_s();
  const int flags = O_RDONLY | O_CLOEXEC;
  int is_direct = wants_direct;
  fd = open(argv[1], wants_direct ? flags | O_DIRECT : flags);
  if (fd < 0 && wants_direct && errno == EINVAL) { /* no O_DIRECT here */
    is_direct = 0;
    fd = open(argv[1], flags);
  }
  if (fd < 0) fail("raw_read: open");
  run_threads();
  if (close(fd) != 0) fail("raw_read: close");
  const double seconds = now_s() - began;

  if (argc == 7 && compare(argv[6]) < total_bytes) {
    fprintf(stderr, "raw_read: the reference is shorter\n");
    return 2;
  }
  printf("%.9f %s\n", seconds, is_direct ? "direct" : "buffered");
  return 0;
}
