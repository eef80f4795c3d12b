/* A disk that fails and a clock that is wrong, for a process that loads this library first.
 *
 * FAULT_PATH   files whose path contains this fail
 * FAULT_CALL   write | sync | rename | open: what fails
 * FAULT_AFTER  the number of calls that succeed first
 * FAULT_ERRNO  the error
 * FAULT_CLOCK  seconds that are added to the clock of the day
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static long number(const char *name) {
  const char *text = getenv(name);
  return text ? atol(text) : 0;
}

static int fails(const char *call, const char *path) {
  static long calls = 0;
  const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH");
  if (!wanted || !part || strcmp(wanted, call) || !path || !strstr(path, part)) return 0;
  if (__sync_fetch_and_add(&calls, 1) < number("FAULT_AFTER")) return 0;
  errno = number("FAULT_ERRNO");
  return 1;
}

static int fails_fd(const char *call, int fd) {
  if (!getenv("FAULT_CALL")) return 0;
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0) return 0;
  path[length] = 0;
  return fails(call, path);
}

/* A function that fails where `failed` holds, and calls the one of the system otherwise. */
#define CALL(type, name, arguments, failed, given)                \
  type name arguments {                                           \
    static __typeof__(&name) real;                                \
    if (!real) real = dlsym(RTLD_NEXT, #name);                    \
    return (failed) ? -1 : real given;                            \
  }
#define WRITE(name, part, given) CALL(ssize_t, name, part, fails_fd("write", fd), given)

WRITE(write, (int fd, const void *data, size_t size), (fd, data, size))
WRITE(writev, (int fd, const struct iovec *parts, int count), (fd, parts, count))
WRITE(pwrite, (int fd, const void *data, size_t size, off_t at), (fd, data, size, at))
WRITE(pwrite64, (int fd, const void *data, size_t size, off64_t at), (fd, data, size, at))
WRITE(pwritev, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
CALL(int, fsync, (int fd), fails_fd("sync", fd), (fd))
CALL(int, fdatasync, (int fd), fails_fd("sync", fd), (fd))
CALL(int, rename, (const char *from, const char *to), fails("rename", to), (from, to))
CALL(int, renameat, (int folder, const char *from, int other, const char *to),
     fails("rename", to), (folder, from, other, to))

#define OPEN(name)                                                                        \
  int name(const char *path, int flags, ...) {                                            \
    static __typeof__(&name) real;                                                        \
    if (!real) real = dlsym(RTLD_NEXT, #name);                                            \
    va_list rest;                                                                         \
    va_start(rest, flags);                                                                \
    mode_t mode = va_arg(rest, mode_t);                                                   \
    va_end(rest);                                                                         \
    int is_new = flags & (O_CREAT | O_WRONLY | O_RDWR);                                   \
    return is_new && fails("open", path) ? -1 : real(path, flags, mode);                  \
  }
OPEN(open)
OPEN(open64)

int clock_gettime(clockid_t clock, struct timespec *now) {
  static __typeof__(&clock_gettime) real;
  if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += number("FAULT_CLOCK");
  return code;
}
time_t time(time_t *now) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (now) *now = at.tv_sec;
  return at.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
  struct timespec at;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &at);
  now->tv_sec = at.tv_sec;
  now->tv_usec = at.tv_nsec / 1000;
  return 0;
}
