// In front of libc (LD_PRELOAD): the n-th call on a directory tree is killed, failed, cut short, held
// or left out, or the power goes before it. It sees the calls of C++ and of Python alike, and counts
// only those on paths and descriptors beneath the tree that shim_watch() named.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

// What happens to the call that is due. call_shim.py has the same numbers.
enum { COUNT, KILL, HALF_KILL, FAIL, SHORT, POWER, DROP, HOLD };
enum { CHANGES = 1, READS = 2, DIR_FSYNC = 4, FILE_FSYNC = 8, WRITES = 16, MOVES = 32 };
enum { MOST = 100000 };

static char tree[PATH_MAX];
static size_t tree_length;
static atomic_long left = -1;  // calls until it is due; negative: not armed
static atomic_long seen;       // calls since arming
static int action, argument, kinds, is_lasting;
static char names[MOST][24];
static char targets[MOST][120];  // what the calls were on, from the tree on
static __thread char touched[2 * PATH_MAX];  // what is_watched_*() has just found
static atomic_long left_to_drop;  // besides the action: calls until the one that is left out
static int dropped_kinds;

void shim_watch(const char* path) {
  tree_length = strlen(path);
  memcpy(tree, path, tree_length + 1);
}
// From now on, the `nth` call (from 0) of `which` kinds; `lasting`: and every one after it.
void shim_arm(long nth, int what, int value, int which, int lasting) {
  seen = 0;
  action = what, argument = value, kinds = which, is_lasting = lasting;
  left = nth;
}
void shim_disarm(void) { left = -1, is_lasting = 0; }
// Besides what shim_arm() has in mind: the `nth` call of `which` kinds is left out.
void shim_drop(long nth, int which) { left_to_drop = nth, dropped_kinds = which; }
long shim_seen(void) { return seen; }
const char* shim_name(long n) { return n < MOST ? names[n] : ""; }
const char* shim_target(long n) { return n < MOST ? targets[n] : ""; }

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int is_within(const char* path) {
  const int is = tree_length && strncmp(path, tree, tree_length) == 0 &&
                 (path[tree_length] == 0 || path[tree_length] == '/');
  if (is) snprintf(touched, sizeof touched, "%s", path + tree_length);
  return is;
}
static int is_watched_fd(int fd) {
  char link[40], path[PATH_MAX];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = NEXT(readlink)(link, path, sizeof path - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return is_within(path);
}
static int is_watched_at(int dir, const char* path) {
  if (!path) return is_watched_fd(dir);
  if (path[0] == '/') return is_within(path);
  char here[PATH_MAX];
  const int is = dir != AT_FDCWD ? is_watched_fd(dir) : getcwd(here, sizeof here) && is_within(here);
  if (is) {
    const size_t end = strlen(touched);
    snprintf(touched + end, sizeof touched - end, "/%s", path);
  }
  return is;
}

// Returns what to do with this call; ends the process or the power by itself.
static int verdict(const char* name, int kind, int is_watched) {
  if (left < 0 && !(is_lasting && seen)) return COUNT;
  if (!(kind & kinds) || !is_watched) return COUNT;
  const long n = atomic_fetch_add(&seen, 1);
  if (n < MOST) {
    snprintf(names[n], sizeof names[n], "%s", name);
    snprintf(targets[n], sizeof targets[n], "%.*s", (int)sizeof targets[n] - 1, touched);
  }
  const long due = atomic_fetch_sub(&left, 1);
  const int is_left_out = (kind & dropped_kinds) && atomic_fetch_sub(&left_to_drop, 1) == 0;
  if (due > 0 || (due < 0 && !is_lasting)) return is_left_out ? DROP : COUNT;
  if (action == KILL) kill(getpid(), SIGKILL);
  while (action == HOLD) pause();
  if (action == POWER) {  // FS_IOC_SHUTDOWN: 1 flushes the journal first, 2 does not
    const int fd = (int)syscall(SYS_openat, AT_FDCWD, tree, O_RDONLY | O_DIRECTORY, 0);
    unsigned flag = (unsigned)argument;
    if (fd < 0 || syscall(SYS_ioctl, fd, _IOR('X', 125, unsigned), &flag) != 0) _exit(99);
    kill(getpid(), SIGKILL);
  }
  if (action == FAIL) errno = argument;
  return action;
}

static int is_armed(void) { return left >= 0 || is_lasting; }

#define ON(kind, watched) const int v = verdict(__func__, kind, is_armed() ? (watched) : 0)
#define GO_OR_FAIL(failed) \
  if (v == FAIL) return failed; \
  if (v == DROP) return 0
#define CALL(type, name, args, pass, kind, watched) \
  type name args { ON(kind, watched); GO_OR_FAIL(-1); return NEXT(name) pass; }
#define OPEN(name, args, pass, watched) \
  int name args { \
    mode_t mode = 0; \
    if (flags & (O_CREAT | __O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, mode_t); va_end(a); } \
    ON(flags & (O_CREAT | O_TRUNC) ? CHANGES : READS, watched); \
    if (v == FAIL) return -1; \
    return NEXT(name) pass; \
  }
// Half of the bytes, in blocks where there are some, as an O_DIRECT write must be.
static size_t half_of(size_t n) { return n >= 8192 ? n / 8192 * 4096 : n / 2; }
#define MOVE(name, args, pass, half, kind, watched) \
  ssize_t name args { \
    ON(kind, watched); \
    GO_OR_FAIL(-1); \
    if (v == SHORT && n > 1) return NEXT(name) half; \
    if (v == HALF_KILL) { if (NEXT(name) half >= 0) {} kill(getpid(), SIGKILL); } \
    return NEXT(name) pass; \
  }

OPEN(open, (const char* p, int flags, ...), (p, flags, mode), is_watched_at(AT_FDCWD, p))
OPEN(open64, (const char* p, int flags, ...), (p, flags, mode), is_watched_at(AT_FDCWD, p))
OPEN(openat, (int d, const char* p, int flags, ...), (d, p, flags, mode), is_watched_at(d, p))
OPEN(openat64, (int d, const char* p, int flags, ...), (d, p, flags, mode), is_watched_at(d, p))
// openat2 has no wrapper in libc, nor has cachestat.
long syscall(long number, ...) {
  enum { kCachestat = 451 };
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; ++i) a[i] = va_arg(list, long);
  va_end(list);
  int v = COUNT;
  if (number == SYS_openat2 && is_armed())
    v = verdict("openat2", READS, is_watched_at((int)a[0], (const char*)a[1]));
  if (number == kCachestat && is_armed())
    v = verdict("cachestat", READS, is_watched_fd((int)a[0]));
  if (v == FAIL) return -1;
  return NEXT(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

#define FSYNC(fd) (is_directory(fd) ? CHANGES | DIR_FSYNC : CHANGES | FILE_FSYNC)
static int is_directory(int fd) {
  struct stat found;
  return NEXT(fstat)(fd, &found) == 0 && S_ISDIR(found.st_mode);
}
CALL(int, fsync, (int fd), (fd), FSYNC(fd), is_watched_fd(fd))
CALL(int, fdatasync, (int fd), (fd), FSYNC(fd), is_watched_fd(fd))
MOVE(pwrite, (int fd, const void* b, size_t n, off_t o), (fd, b, n, o), (fd, b, half_of(n), o), CHANGES | WRITES | MOVES, is_watched_fd(fd))
MOVE(pwrite64, (int fd, const void* b, size_t n, off64_t o), (fd, b, n, o), (fd, b, half_of(n), o), CHANGES | WRITES | MOVES, is_watched_fd(fd))
MOVE(write, (int fd, const void* b, size_t n), (fd, b, n), (fd, b, half_of(n)), CHANGES | WRITES | MOVES, is_watched_fd(fd))
MOVE(pread, (int fd, void* b, size_t n, off_t o), (fd, b, n, o), (fd, b, half_of(n), o), READS | MOVES, is_watched_fd(fd))
MOVE(pread64, (int fd, void* b, size_t n, off64_t o), (fd, b, n, o), (fd, b, half_of(n), o), READS | MOVES, is_watched_fd(fd))
MOVE(read, (int fd, void* b, size_t n), (fd, b, n), (fd, b, half_of(n)), READS | MOVES, is_watched_fd(fd))
static ssize_t read_first(int fd, const struct iovec* parts, off64_t o) {
  return NEXT(pread64)(fd, parts->iov_base, half_of(parts->iov_len), o);
}
ssize_t preadv(int fd, const struct iovec* parts, int count, off_t o) {
  ON(READS | MOVES, is_watched_fd(fd));
  GO_OR_FAIL(-1);
  return v == SHORT && parts->iov_len > 1 ? read_first(fd, parts, o) : NEXT(preadv)(fd, parts, count, o);
}
ssize_t preadv64(int fd, const struct iovec* parts, int count, off64_t o) {
  ON(READS | MOVES, is_watched_fd(fd));
  GO_OR_FAIL(-1);
  return v == SHORT && parts->iov_len > 1 ? read_first(fd, parts, o) : NEXT(preadv64)(fd, parts, count, o);
}
CALL(int, fallocate, (int fd, int m, off_t o, off_t n), (fd, m, o, n), CHANGES, is_watched_fd(fd))
CALL(int, fallocate64, (int fd, int m, off64_t o, off64_t n), (fd, m, o, n), CHANGES, is_watched_fd(fd))
CALL(int, ftruncate, (int fd, off_t n), (fd, n), CHANGES, is_watched_fd(fd))
CALL(int, ftruncate64, (int fd, off64_t n), (fd, n), CHANGES, is_watched_fd(fd))
CALL(int, sync_file_range, (int fd, off64_t o, off64_t n, unsigned f), (fd, o, n, f), CHANGES, is_watched_fd(fd))
CALL(int, rename, (const char* a, const char* b), (a, b), CHANGES, is_watched_at(AT_FDCWD, b))
CALL(int, renameat, (int d, const char* a, int e, const char* b), (d, a, e, b), CHANGES, is_watched_at(e, b))
CALL(int, link, (const char* a, const char* b), (a, b), CHANGES, is_watched_at(AT_FDCWD, b))
CALL(int, linkat, (int d, const char* a, int e, const char* b, int f), (d, a, e, b, f), CHANGES, is_watched_at(e, b))
CALL(int, unlink, (const char* p), (p), CHANGES, is_watched_at(AT_FDCWD, p))
CALL(int, unlinkat, (int d, const char* p, int f), (d, p, f), CHANGES, is_watched_at(d, p))
CALL(int, rmdir, (const char* p), (p), CHANGES, is_watched_at(AT_FDCWD, p))
CALL(int, mkdir, (const char* p, mode_t m), (p, m), CHANGES, is_watched_at(AT_FDCWD, p))
CALL(int, mkdirat, (int d, const char* p, mode_t m), (d, p, m), CHANGES, is_watched_at(d, p))
CALL(int, flock, (int fd, int op), (fd, op), CHANGES, is_watched_fd(fd))
CALL(int, fstat, (int fd, struct stat* s), (fd, s), READS, is_watched_fd(fd))
CALL(int, fstat64, (int fd, struct stat64* s), (fd, s), READS, is_watched_fd(fd))
CALL(int, stat, (const char* p, struct stat* s), (p, s), READS, is_watched_at(AT_FDCWD, p))
CALL(int, stat64, (const char* p, struct stat64* s), (p, s), READS, is_watched_at(AT_FDCWD, p))
CALL(int, lstat, (const char* p, struct stat* s), (p, s), READS, is_watched_at(AT_FDCWD, p))
CALL(int, lstat64, (const char* p, struct stat64* s), (p, s), READS, is_watched_at(AT_FDCWD, p))
CALL(int, fstatat, (int d, const char* p, struct stat* s, int f), (d, p, s, f), READS, is_watched_at(d, p))
CALL(int, fstatat64, (int d, const char* p, struct stat64* s, int f), (d, p, s, f), READS, is_watched_at(d, p))
CALL(int, fstatvfs, (int fd, struct statvfs* s), (fd, s), READS, is_watched_fd(fd))
CALL(int, fstatvfs64, (int fd, struct statvfs64* s), (fd, s), READS, is_watched_fd(fd))
CALL(int, statvfs, (const char* p, struct statvfs* s), (p, s), READS, is_watched_at(AT_FDCWD, p))
CALL(int, statvfs64, (const char* p, struct statvfs64* s), (p, s), READS, is_watched_at(AT_FDCWD, p))
// As Linux does, the descriptor is gone even where close() reports an error.
int close(int fd) {
  ON(CHANGES, is_watched_fd(fd));
  if (v == FAIL) { NEXT(close)(fd); errno = argument; return -1; }
  return NEXT(close)(fd);
}
DIR* fdopendir(int fd) {
  ON(READS, is_watched_fd(fd));
  return v == FAIL ? NULL : NEXT(fdopendir)(fd);
}
DIR* opendir(const char* p) {
  ON(READS, is_watched_at(AT_FDCWD, p));
  return v == FAIL ? NULL : NEXT(opendir)(p);
}
#define READDIR(type, name) \
  struct type* name(DIR* d) { \
    ON(READS, is_watched_fd(dirfd(d))); \
    return v == FAIL ? NULL : NEXT(name)(d); \
  }
READDIR(dirent, readdir)
READDIR(dirent64, readdir64)
// What copies a descriptor and what switches O_DIRECT.
#define FCNTL(name) \
  int name(int fd, int command, ...) { \
    va_list list; \
    va_start(list, command); \
    void* value = va_arg(list, void*); \
    va_end(list); \
    ON(READS, (command == F_DUPFD_CLOEXEC || command == F_SETFL) && is_watched_fd(fd)); \
    if (v == FAIL) return -1; \
    return NEXT(name)(fd, command, value); \
  }
FCNTL(fcntl)
FCNTL(fcntl64)
