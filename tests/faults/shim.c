/* A disk that fails and a clock that is wrong, for a process that loads this library first.
 *
 * FAULT_PATH   files whose path contains this fail
 * FAULT_CALL   write | sync | rename | open: what fails
 * FAULT_AFTER  the number of calls that succeed first
 * FAULT_TIMES  the number of calls that fail then; 0: all
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

static long calls = 0;

static int fails(const char *call, const char *path) {
  const char *wanted = getenv("FAULT_CALL"), *part = getenv("FAULT_PATH");
  if (!wanted || !part || strcmp(wanted, call) || !path || !strstr(path, part)) return 0;
  const char *after = getenv("FAULT_AFTER"), *times = getenv("FAULT_TIMES");
  long number = __sync_fetch_and_add(&calls, 1) - (after ? atol(after) : 0);
  long most = times ? atol(times) : 0;
  if (number < 0 || (most && number >= most)) return 0;
  const char *code = getenv("FAULT_ERRNO");
  errno = code ? atoi(code) : EIO;
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

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t size) {
  REAL(write);
  return fails_fd("write", fd) ? -1 : real(fd, data, size);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(writev);
  return fails_fd("write", fd) ? -1 : real(fd, parts, count);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
  REAL(pwrite);
  return fails_fd("write", fd) ? -1 : real(fd, data, size, at);
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
  REAL(pwrite64);
  return fails_fd("write", fd) ? -1 : real(fd, data, size, at);
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
  REAL(pwritev);
  return fails_fd("write", fd) ? -1 : real(fd, parts, count, at);
}
int fsync(int fd) {
  REAL(fsync);
  return fails_fd("sync", fd) ? -1 : real(fd);
}
int fdatasync(int fd) {
  REAL(fdatasync);
  return fails_fd("sync", fd) ? -1 : real(fd);
}
int rename(const char *from, const char *to) {
  REAL(rename);
  return fails("rename", to) ? -1 : real(from, to);
}
int renameat(int folder, const char *from, int other, const char *to) {
  REAL(renameat);
  return fails("rename", to) ? -1 : real(folder, from, other, to);
}
static int opens_new(int flags) { return flags & (O_CREAT | O_WRONLY | O_RDWR); }
int open(const char *path, int flags, ...) {
  REAL(open);
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return opens_new(flags) && fails("open", path) ? -1 : real(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
  REAL(open64);
  va_list rest;
  va_start(rest, flags);
  mode_t mode = va_arg(rest, mode_t);
  va_end(rest);
  return opens_new(flags) && fails("open", path) ? -1 : real(path, flags, mode);
}

static long shift(void) {
  const char *seconds = getenv("FAULT_CLOCK");
  return seconds ? atol(seconds) : 0;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  REAL(clock_gettime);
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += shift();
  return code;
}
time_t time(time_t *now) {
  struct timespec at;
  clock_gettime(CLOCK_REALTIME, &at);
  if (now) *now = at.tv_sec;
  return at.tv_sec;
}
int gettimeofday(struct timeval *now, void *zone) {
  REAL(gettimeofday);
  int code = real(now, zone);
  if (now) now->tv_sec += shift();
  return code;
}
