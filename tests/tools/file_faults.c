/* Preloaded into a command by fault_shim.py: counts the operations of the process on files
 * below FAULT_DIR, lets the one with the number FAULT_AT fail, and writes each to FAULT_LOG:
 *
 *     NUMBER NAME RESULT PATH [ARGUMENTS]
 *
 * RESULT is a descriptor, a count or 0, and -1 after a failure. Bytes are in hexadecimal
 * digits. What is written to standard error is logged as well, so that the log says what the
 * command had reported at any time. Children run without it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

enum { kMostFiles = 4096 };

static char directory[PATH_MAX];
static long fail_at;
static int fail_with;
static int log_file = -1;
static long count;
static char *names[kMostFiles]; /* of open files below the directory */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name)                                           \
  static __typeof__(name) *real;                             \
  if (real == NULL) *(void **)&real = dlsym(RTLD_NEXT, #name)

static ssize_t real_write(int file, const void *bytes, size_t size) {
  REAL(write);
  return real(file, bytes, size);
}

__attribute__((constructor)) static void start(void) {
  const char *given = getenv("FAULT_DIR");
  if (given == NULL) return;
  snprintf(directory, sizeof directory, "%s", given);
  fail_at = atol(getenv("FAULT_AT"));
  fail_with = atoi(getenv("FAULT_ERRNO"));
  int file = open(getenv("FAULT_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  log_file = fcntl(file, F_DUPFD_CLOEXEC, 900); /* out of the way of a test's limits */
  close(file);
  unsetenv("FAULT_DIR");
  unsetenv("LD_PRELOAD");
}

/* The path without "." and with the current directory, if it is below the directory. */
static const char *inside(const char *path) {
  static __thread char whole[2 * PATH_MAX];
  if (directory[0] == 0 || path == NULL) return NULL;
  if (path[0] == '/') {
    snprintf(whole, sizeof whole, "%s", path);
  } else {
    char here[PATH_MAX];
    if (getcwd(here, sizeof here) == NULL) return NULL;
    snprintf(whole, sizeof whole, "%s/%s", here, path);
  }
  size_t size = strlen(whole);
  while (size > 1 && (whole[size - 1] == '/' ||
                      (whole[size - 1] == '.' && whole[size - 2] == '/'))) {
    whole[--size] = 0;
  }
  const size_t prefix = strlen(directory);
  return strncmp(whole, directory, prefix) == 0 ? whole : NULL;
}

static const char *name_of(int file) {
  return file >= 0 && file < kMostFiles ? names[file] : NULL;
}

static void log_line(long number, const char *name, long result, const char *path,
                     const char *format, ...) {
  char more[3 * PATH_MAX];
  va_list list;
  va_start(list, format);
  vsnprintf(more, sizeof more, format, list);
  va_end(list);
  char line[6 * PATH_MAX];
  const int size = snprintf(line, sizeof line, "%ld %s %ld %s %s\n", number, name, result,
                            path, more);
  if (real_write(log_file, line, (size_t)size) != size) abort();
}

static void log_bytes(long number, const char *name, long result, const char *path,
                      const unsigned char *bytes, long from) {
  const size_t size = result > 0 ? (size_t)result : 0;
  char *text = malloc(2 * size + 2 * PATH_MAX);
  size_t at = (size_t)sprintf(text, "%ld %s %ld %s %ld ", number, name, result, path, from);
  for (size_t i = 0; i < size; ++i) at += (size_t)sprintf(text + at, "%02x", bytes[i]);
  text[at++] = '\n';
  if (real_write(log_file, text, at) != (ssize_t)at) abort();
  free(text);
}

/* Counts an operation. Returns its number; sets *fails if it is the one to fail. */
static long begin(int *fails) {
  const long number = ++count;
  *fails = number == fail_at;
  if (*fails) errno = fail_with;
  return number;
}

#define LOCK pthread_mutex_lock(&mutex)
#define UNLOCK pthread_mutex_unlock(&mutex)

/* An operation with the path or descriptor of a file below the directory. */
#define COUNTED(type, name, where, call, ...)                  \
  do {                                                         \
    LOCK;                                                      \
    int fails;                                                 \
    const long number = begin(&fails);                         \
    type result = -1;                                          \
    if (!fails) result = call;                                 \
    const int reason = errno;                                  \
    log_line(number, name, (long)result, where, __VA_ARGS__);  \
    UNLOCK;                                                    \
    errno = reason;                                            \
    return result;                                             \
  } while (0)

static int keep_name(int file, const char *path) {
  if (file >= 0 && file < kMostFiles) names[file] = strdup(path);
  return file;
}

#define OPEN(function)                                                              \
  int function(const char *path, int flags, ...) {                                  \
    REAL(function);                                                                 \
    va_list list;                                                                   \
    va_start(list, flags);                                                          \
    const mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0; \
    va_end(list);                                                                   \
    const char *at = inside(path);                                                  \
    if (at == NULL) return real(path, flags, mode);                                 \
    COUNTED(int, "open", at, keep_name(real(path, flags, mode), at), "%d", flags);  \
  }
OPEN(open)
OPEN(open64)

static int number_of(FILE *file) { return file == NULL ? -1 : fileno(file); }

#define FOPEN(function)                                                               \
  FILE *function(const char *path, const char *mode) {                                \
    REAL(function);                                                                   \
    const char *at = inside(path);                                                    \
    if (at == NULL) return real(path, mode);                                          \
    LOCK;                                                                             \
    int fails;                                                                        \
    const long number = begin(&fails);                                                \
    FILE *result = fails ? NULL : real(path, mode);                                   \
    const int reason = errno;                                                         \
    keep_name(number_of(result), at);                                                 \
    const int flags = mode[0] == 'r' ? O_RDONLY                                       \
                      : mode[0] == 'a' ? O_WRONLY | O_CREAT | O_APPEND                \
                                       : O_WRONLY | O_CREAT | O_TRUNC;                \
    log_line(number, "open", (long)number_of(result), at, "%d", flags);               \
    UNLOCK;                                                                           \
    errno = reason;                                                                   \
    return result;                                                                    \
  }
FOPEN(fopen)
FOPEN(fopen64)

int close(int file) {
  REAL(close);
  if (name_of(file) != NULL) {
    LOCK;
    log_line(0, "close", file, names[file], "%d", file);
    free(names[file]);
    names[file] = NULL;
    UNLOCK;
  }
  return real(file);
}

ssize_t write(int file, const void *bytes, size_t size) {
  const char *at = name_of(file);
  if (at == NULL && (file != STDERR_FILENO || log_file < 0)) {
    return real_write(file, bytes, size);
  }
  LOCK;
  int fails = 0;
  const long number = at != NULL ? begin(&fails) : 0;
  const ssize_t result = fails ? -1 : real_write(file, bytes, size);
  const int reason = errno;
  log_bytes(number, at != NULL ? "write" : "say", result, at != NULL ? at : "-", bytes, file);
  UNLOCK;
  errno = reason;
  return result;
}

ssize_t read(int file, void *bytes, size_t size) {
  REAL(read);
  const char *at = name_of(file);
  if (at == NULL) return real(file, bytes, size);
  COUNTED(ssize_t, "read", at, real(file, bytes, size), "%d", file);
}

ssize_t pread(int file, void *bytes, size_t size, off_t from) {
  REAL(pread);
  const char *at = name_of(file);
  if (at == NULL) return real(file, bytes, size, from);
  COUNTED(ssize_t, "read", at, real(file, bytes, size, from), "%d", file);
}

ssize_t pread64(int file, void *bytes, size_t size, off64_t from) {
  REAL(pread64);
  const char *at = name_of(file);
  if (at == NULL) return real(file, bytes, size, from);
  COUNTED(ssize_t, "read", at, real(file, bytes, size, from), "%d", file);
}

off_t lseek(int file, off_t offset, int whence) {
  REAL(lseek);
  const char *at = name_of(file);
  if (at == NULL) return real(file, offset, whence);
  COUNTED(off_t, "lseek", at, real(file, offset, whence), "%d", file);
}

off64_t lseek64(int file, off64_t offset, int whence) {
  REAL(lseek64);
  const char *at = name_of(file);
  if (at == NULL) return real(file, offset, whence);
  COUNTED(off64_t, "lseek", at, real(file, offset, whence), "%d", file);
}

int fsync(int file) {
  REAL(fsync);
  const char *at = name_of(file);
  if (at == NULL) return real(file);
  COUNTED(int, "fsync", at, real(file), "%d", file);
}

int ftruncate(int file, off_t size) {
  REAL(ftruncate);
  const char *at = name_of(file);
  if (at == NULL) return real(file, size);
  COUNTED(int, "ftruncate", at, real(file, size), "%d %ld", file, (long)size);
}

int ftruncate64(int file, off64_t size) {
  REAL(ftruncate64);
  const char *at = name_of(file);
  if (at == NULL) return real(file, size);
  COUNTED(int, "ftruncate", at, real(file, size), "%d %ld", file, (long)size);
}

int fchmod(int file, mode_t mode) {
  REAL(fchmod);
  const char *at = name_of(file);
  if (at == NULL) return real(file, mode);
  COUNTED(int, "fchmod", at, real(file, mode), "%d", file);
}

int rename(const char *from, const char *to) {
  REAL(rename);
  const char *at = inside(to);
  if (at == NULL) return real(from, to);
  char target[2 * PATH_MAX];
  snprintf(target, sizeof target, "%s", at);
  at = inside(from);
  COUNTED(int, "rename", at, real(from, to), "%s", target);
}

int unlink(const char *path) {
  REAL(unlink);
  const char *at = inside(path);
  if (at == NULL) return real(path);
  COUNTED(int, "unlink", at, real(path), "%s", "");
}

int remove(const char *path) {
  REAL(remove);
  const char *at = inside(path);
  if (at == NULL) return real(path);
  COUNTED(int, "unlink", at, real(path), "%s", "");
}

int mkdir(const char *path, mode_t mode) {
  REAL(mkdir);
  const char *at = inside(path);
  if (at == NULL) return real(path, mode);
  COUNTED(int, "mkdir", at, real(path, mode), "%s", "");
}

DIR *opendir(const char *path) {
  REAL(opendir);
  const char *at = inside(path);
  if (at == NULL) return real(path);
  LOCK;
  int fails;
  const long number = begin(&fails);
  DIR *result = fails ? NULL : real(path);
  const int reason = errno;
  log_line(number, "opendir", result == NULL ? -1 : 0, at, "%s", "");
  UNLOCK;
  errno = reason;
  return result;
}
