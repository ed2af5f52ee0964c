/* Faults of a disk, for one process: loaded with LD_PRELOAD before the C library, it lets chosen calls on chosen files
 * fail as the plan in a shared file says. The plan is read at every call, so a fault can be switched on while the
 * process runs. Compiled by tests/faults/faults.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { NOTHING = 0, SYNC = 1, WRITE = 2, SHORT_WRITE = 3, LIE = 4, LIE_LAST = 5, SLOW = 6 };

/* Little-endian, as faults.py packs it. */
struct plan {
    _Atomic uint32_t what;  /* one of the above */
    _Atomic uint32_t error; /* errno of what fails */
    _Atomic uint32_t skip;  /* so many calls succeed first */
    _Atomic uint32_t hits;  /* so many have failed: ours to count */
    _Atomic uint32_t delay_ms; /* how much longer a call takes that is slow */
    char needle[48];        /* in the path of the file, or empty for every regular file */
};

static struct plan *plan;

int open(const char *path, int flags, ...);

__attribute__((constructor)) static void open_plan(void)
{
    const char *path = getenv("FOREBAY_FAULTS");
    int descriptor = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0)
        return;
    void *found = mmap(NULL, sizeof(struct plan), PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (found != MAP_FAILED)
        plan = found;
}

/* Whether the fault `kind` is due for a call on this descriptor. */
static int due(uint32_t kind, int descriptor)
{
    char link[48], path[PATH_MAX];
    if (plan == NULL || atomic_load(&plan->what) != kind)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0 || path[0] != '/')
        return 0;
    path[length] = 0;
    if (plan->needle[0] != 0 && strstr(path, plan->needle) == NULL)
        return 0;
    uint32_t left = atomic_load(&plan->skip);
    while (left > 0)
        if (atomic_compare_exchange_weak(&plan->skip, &left, left - 1))
            return 0;
    atomic_fetch_add(&plan->hits, 1);
    return 1;
}

static int fails(uint32_t kind, int descriptor)
{
    if (!due(kind, descriptor))
        return 0;
    errno = (int)atomic_load(&plan->error);
    return 1;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

/* A disk that does its work, and takes its time. */
static void linger(int descriptor)
{
    if (!due(SLOW, descriptor))
        return;
    uint32_t left_ms = atomic_load(&plan->delay_ms);
    struct timespec left = {left_ms / 1000, (long)(left_ms % 1000) * 1000000};
    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        ;
}

#define SYNCING(name)                  \
    int name(int descriptor)           \
    {                                  \
        REAL(name);                    \
        linger(descriptor);            \
        if (due(LIE, descriptor))      \
            return 0;                  \
        if (fails(SYNC, descriptor))   \
            return -1;                 \
        return real(descriptor);       \
    }

SYNCING(fdatasync)
SYNCING(fsync)

int msync(void *address, size_t length, int flags)
{
    REAL(msync);
    if (plan != NULL && atomic_load(&plan->what) == LIE)
        return 0;
    return real(address, length, flags);
}

/* A lying disk also takes no notice of files that ask to be written through. LMDB's meta pages are: with LIE_LAST, which
 * is honest otherwise, each transaction becomes durable only with the next one. */
#define OPENING(name)                                                     \
    int name(const char *path, int flags, ...)                            \
    {                                                                     \
        REAL(name);                                                       \
        va_list rest;                                                     \
        va_start(rest, flags);                                            \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                     \
        if (plan != NULL && (atomic_load(&plan->what) == LIE || atomic_load(&plan->what) == LIE_LAST))              \
            flags &= ~(O_SYNC | O_DSYNC);                                 \
        return real(path, flags, mode);                                   \
    }

OPENING(open)
OPENING(open64)

/* A device that fills up takes a part of a write first, and none of the next. */
#define WRITING(name, offset_type)                                                                 \
    ssize_t name(int descriptor, const void *bytes, size_t length, offset_type offset)             \
    {                                                                                              \
        REAL(name);                                                                                \
        if (fails(WRITE, descriptor))                                                              \
            return -1;                                                                             \
        if (length > 512 && due(SHORT_WRITE, descriptor)) {                                        \
            atomic_store(&plan->what, WRITE);                                                      \
            return real(descriptor, bytes, length / 2, offset);                                    \
        }                                                                                          \
        return real(descriptor, bytes, length, offset);                                            \
    }

WRITING(pwrite, off_t)
WRITING(pwrite64, off64_t)

#define WRITING_MANY(name, offset_type)                                                            \
    ssize_t name(int descriptor, const struct iovec *pieces, int count, offset_type offset)        \
    {                                                                                              \
        REAL(name);                                                                                \
        if (fails(WRITE, descriptor))                                                              \
            return -1;                                                                             \
        if (due(SHORT_WRITE, descriptor)) {                                                        \
            atomic_store(&plan->what, WRITE);                                                      \
            return real(descriptor, pieces, count > 1 ? count - 1 : count, offset);                \
        }                                                                                          \
        return real(descriptor, pieces, count, offset);                                            \
    }

WRITING_MANY(pwritev, off_t)
WRITING_MANY(pwritev64, off64_t)

ssize_t writev(int descriptor, const struct iovec *pieces, int count)
{
    REAL(writev);
    if (plan != NULL && plan->needle[0] != 0) {
        if (fails(WRITE, descriptor))
            return -1;
        if (due(SHORT_WRITE, descriptor)) {
            atomic_store(&plan->what, WRITE);
            return real(descriptor, pieces, count > 1 ? count - 1 : count);
        }
    }
    return real(descriptor, pieces, count);
}

ssize_t write(int descriptor, const void *bytes, size_t length)
{
    REAL(write);
    if (plan != NULL && plan->needle[0] != 0 && fails(WRITE, descriptor))
        return -1;
    return real(descriptor, bytes, length);
}
