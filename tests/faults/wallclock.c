/* The wall clock of one process, off by as many seconds as the file says that FOREBAY_WALLCLOCK names: loaded with
 * LD_PRELOAD before the C library, read at every call, so that a clock can be set while its process runs. Monotonic
 * clocks stay as they are. A wait until a moment of the wall clock ends when that clock shows it, as the kernel's would:
 * the threads of slurmctld wait so. Compiled by tests/faults/attacks/clocks.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

/* Monotonic clocks count from the start of the machine, seconds: a later moment is one of the wall clock. */
#define WALL_CLOCK_S 1000000000

static _Atomic int64_t *off_s;
static int (*real_wait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real)(clockid_t, struct timespec *);

__attribute__((constructor)) static void find(void)
{
    const char *path = getenv("FOREBAY_WALLCLOCK");
    int descriptor = path == NULL ? -1 : open(path, O_RDWR | O_CLOEXEC);
    if (descriptor < 0)
        return;
    void *found = mmap(NULL, sizeof *off_s, PROT_READ, MAP_SHARED, descriptor, 0);
    close(descriptor);
    if (found != MAP_FAILED)
        off_s = found;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    if (real == NULL)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(clock, time);
    if (result == 0 && off_s != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += atomic_load(off_s);
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone)
{
    struct timespec time;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &time) != 0)
        return -1;
    now->tv_sec = time.tv_sec;
    now->tv_usec = time.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return -1;
    if (result != NULL)
        *result = now.tv_sec;
    return now.tv_sec;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict until)
{
    struct timespec moment = *until;
    if (real_wait == NULL) {
        /* On x86-64 the C library has an older one of this name, too. */
        void *found = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
        real_wait = (int (*)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *))(
            found != NULL ? found : dlsym(RTLD_NEXT, "pthread_cond_timedwait"));
    }
    if (off_s != NULL && moment.tv_sec > WALL_CLOCK_S)
        moment.tv_sec -= atomic_load(off_s);
    return real_wait(condition, mutex, &moment);
}
