/* Preloaded into a process, ends it before its n-th system call that changes files, as SIGKILL would, and keeps a
   journal of the files whose content has been changed and brought to the disk since.

   Build: cc -shared -fPIC -o crash.so crash.c -ldl */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long left = -1;
static int journal = -1;

/* Arm: end before call number `count`, from 0. */
void crash_arm(long count, int descriptor) { journal = descriptor; left = count; }
/* The number of calls that are left; disarms. */
long crash_disarm(void) { long rest = left; left = -1; return rest; }

static void point(void) {
    if (left >= 0 && atomic_fetch_sub(&left, 1) == 0) syscall(SYS_exit_group, 137);
}

static void note(char what, int fd) {
    struct stat status;
    char line[64];
    if (journal < 0 || fstat(fd, &status) || !S_ISREG(status.st_mode)) return;
    syscall(SYS_write, journal, line, snprintf(line, sizeof line, "%c %lu\n", what, (unsigned long)status.st_ino));
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define MODE va_list list; va_start(list, flags); mode_t mode = va_arg(list, mode_t); va_end(list)
#define CHANGES (flags & (O_CREAT | O_TRUNC))

int open(const char *path, int flags, ...) { MODE; REAL(open); if (CHANGES) point(); return real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; REAL(open64); if (CHANGES) point(); return real(path, flags, mode); }
int openat(int at, const char *path, int flags, ...) { MODE; REAL(openat); if (CHANGES) point(); return real(at, path, flags, mode); }
int openat64(int at, const char *path, int flags, ...) { MODE; REAL(openat64); if (CHANGES) point(); return real(at, path, flags, mode); }
ssize_t write(int fd, const void *data, size_t size) { REAL(write); point(); note('w', fd); return real(fd, data, size); }
ssize_t writev(int fd, const struct iovec *data, int count) { REAL(writev); point(); note('w', fd); return real(fd, data, count); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { REAL(pwrite); point(); note('w', fd); return real(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { REAL(pwrite64); point(); note('w', fd); return real(fd, data, size, at); }
int ftruncate(int fd, off_t size) { REAL(ftruncate); point(); note('w', fd); return real(fd, size); }
int ftruncate64(int fd, off64_t size) { REAL(ftruncate64); point(); note('w', fd); return real(fd, size); }
int fsync(int fd) { REAL(fsync); point(); int result = real(fd); if (!result) note('s', fd); return result; }
int fdatasync(int fd) { REAL(fdatasync); point(); int result = real(fd); if (!result) note('s', fd); return result; }
int rename(const char *from, const char *to) { REAL(rename); point(); return real(from, to); }
int renameat(int at, const char *from, int to_at, const char *to) { REAL(renameat); point(); return real(at, from, to_at, to); }
int unlink(const char *path) { REAL(unlink); point(); return real(path); }
int unlinkat(int at, const char *path, int flags) { REAL(unlinkat); point(); return real(at, path, flags); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); point(); return real(path, mode); }
int mkdirat(int at, const char *path, mode_t mode) { REAL(mkdirat); point(); return real(at, path, mode); }
int rmdir(const char *path) { REAL(rmdir); point(); return real(path); }
int truncate(const char *path, off_t size) { REAL(truncate); point(); return real(path, size); }
