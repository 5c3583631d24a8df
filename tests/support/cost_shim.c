/* Counts what a process and its descendants spend, in a page that all of them share (costs.py).

   Preloaded. DCPX_COSTS_PAGE names the page's file; costs_open maps another one later. What a
   process adds is there at once, so a kill loses nothing but its CPU seconds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

extern char* program_invocation_short_name;

/* In the order of costs.Page. Seconds are in ns. */
static struct {
  _Atomic uint64_t starts, torch_imports, compiler_ns, syncs, sync_ns, sleeps, sleep_ns;
} * page;

void costs_open(const char* path) {
  int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (fd < 0) return;
  void* mapped = ftruncate(fd, sizeof *page) ? MAP_FAILED
      : mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  if (mapped != MAP_FAILED) page = mapped;
}

static uint64_t now_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

static int is_compiler(void) {
  static const char* const names[] = {"cc1", "cc1plus", "as", "ld", "collect2", "lto1", "nvcc",
                                      "cicc", "ptxas", "cudafe++", "clang-tidy", "mypy"};
  for (size_t i = 0; i < sizeof names / sizeof *names; i++)
    if (!strcmp(program_invocation_short_name, names[i])) return 1;
  return 0;
}

__attribute__((constructor)) static void begin(void) {
  const char* path = getenv("DCPX_COSTS_PAGE");
  if (path != NULL) costs_open(path);
  if (page != NULL) page->starts++;
}

__attribute__((destructor)) static void end(void) {
  if (page != NULL && is_compiler()) page->compiler_ns += now_ns(CLOCK_PROCESS_CPUTIME_ID);
}

/* Defines NAME as libc has it, its calls counted and timed. */
#define TIMED(count, sum, result, name, parameters, arguments)               \
  result name parameters {                                                   \
    static result(*next) parameters;                                         \
    if (next == NULL) next = (result(*) parameters)dlsym(RTLD_NEXT, #name);  \
    uint64_t began = now_ns(CLOCK_MONOTONIC);                                \
    result found = next arguments;                                           \
    if (page != NULL) {                                                      \
      page->count++;                                                         \
      page->sum += now_ns(CLOCK_MONOTONIC) - began;                          \
    }                                                                        \
    return found;                                                            \
  }

TIMED(syncs, sync_ns, int, fsync, (int fd), (fd))
TIMED(syncs, sync_ns, int, fdatasync, (int fd), (fd))
TIMED(syncs, sync_ns, int, syncfs, (int fd), (fd))
TIMED(sleeps, sleep_ns, int, nanosleep, (const struct timespec* asked, struct timespec* left),
      (asked, left))
TIMED(sleeps, sleep_ns, int, clock_nanosleep,
      (clockid_t clock, int flags, const struct timespec* asked, struct timespec* left),
      (clock, flags, asked, left))
TIMED(sleeps, sleep_ns, int, usleep, (useconds_t asked), (asked))

void* dlopen(const char* name, int flags) {
  static void* (*next)(const char*, int);
  if (next == NULL) next = (void* (*)(const char*, int))dlsym(RTLD_NEXT, "dlopen");
  if (page != NULL && name != NULL && strstr(name, "/torch/_C.") != NULL) page->torch_imports++;
  return next(name, flags);
}
