/* An adversary between a process and the kernel: it sees the calls of a process and of all its descendants, and at a
 * chosen one kills, refuses, flips a bit, swaps two names, or holds everything until the plan changes. Compiled and
 * told what to do by tests/faults/tracing.py.
 *
 *     tracer PLAN -- COMMAND...
 *
 * becomes COMMAND, with the same process id and parent; a process that it leaves behind traces it. A seccomp filter
 * stops only the calls that the plan wants to see, so the rest runs at full speed. The plan is a file that both sides
 * map: it may be changed while the command runs. */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/fs.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

enum { NOTHING, KILL_TREE, KILL_MAIN, KILL_ONE, FAIL, FLIP_WRITTEN, FLIP_READ, SWAP, HOLD };
enum { WRITE = 1, SYNC = 2, RENAME = 4, MAKE = 8, REMOVE = 16, META = 32, READ = 64, LOOK = 128, OTHER = 256 };

/* As tracing.py packs it. */
struct plan {
    _Atomic uint32_t action;
    _Atomic uint32_t classes; /* which calls count */
    _Atomic uint32_t error;   /* errno of what fails */
    _Atomic uint32_t skip;    /* so many calls that count pass first */
    _Atomic uint32_t period;  /* 0: once; N: again at every Nth */
    _Atomic uint32_t after;   /* 0: before the call, 1: after it */
    _Atomic uint32_t counted; /* calls that counted: ours to write, as all below */
    _Atomic uint32_t hits;    /* so often it was done */
    uint64_t seed;            /* of which bit */
    _Atomic uint32_t watch;   /* which calls are stopped at all: fixed when the command starts */
    _Atomic uint32_t living;  /* processes and threads that are traced */
    char needle[208];         /* in the path of what a call is about */
    char one[256], other[256]; /* SWAP: the two names */
    char log[256];            /* where each call that counts is noted, or empty */
    char last[512];           /* the call at which it was done last */
};

struct call {
    int number;
    const char *name;
    uint32_t class;
    int descriptor; /* which argument, -1: none */
    int directory, path;
};

static const struct call calls[] = {
    {SYS_write, "write", WRITE, 0, -1, -1},
    {SYS_pwrite64, "pwrite64", WRITE, 0, -1, -1},
    {SYS_writev, "writev", WRITE, 0, -1, -1},
    {SYS_pwritev, "pwritev", WRITE, 0, -1, -1},
    {SYS_pwritev2, "pwritev2", WRITE, 0, -1, -1},
    {SYS_copy_file_range, "copy_file_range", WRITE, 2, -1, -1},
    {SYS_sendfile, "sendfile", WRITE, 0, -1, -1},
    {SYS_splice, "splice", WRITE, 2, -1, -1},
    {SYS_ftruncate, "ftruncate", WRITE, 0, -1, -1},
    {SYS_fallocate, "fallocate", WRITE, 0, -1, -1},
    {SYS_ioctl, "ioctl", WRITE, 0, -1, -1},
    {SYS_fsync, "fsync", SYNC, 0, -1, -1},
    {SYS_fdatasync, "fdatasync", SYNC, 0, -1, -1},
    {SYS_syncfs, "syncfs", SYNC, 0, -1, -1},
    {SYS_sync_file_range, "sync_file_range", SYNC, 0, -1, -1},
    {SYS_renameat2, "renameat2", RENAME, -1, 2, 3},
    {SYS_renameat, "renameat", RENAME, -1, 2, 3},
    {SYS_linkat, "linkat", RENAME, -1, 2, 3},
    {SYS_symlinkat, "symlinkat", RENAME, -1, 1, 2},
    {SYS_mkdirat, "mkdirat", MAKE, -1, 0, 1},
    {SYS_mknodat, "mknodat", MAKE, -1, 0, 1},
    {SYS_openat, "openat", LOOK, -1, 0, 1},
    {SYS_openat2, "openat2", LOOK, -1, 0, 1},
    {SYS_unlinkat, "unlinkat", REMOVE, -1, 0, 1},
    {SYS_fchmod, "fchmod", META, 0, -1, -1},
    {SYS_fchmodat, "fchmodat", META, -1, 0, 1},
    {SYS_fchown, "fchown", META, 0, -1, -1},
    {SYS_fchownat, "fchownat", META, -1, 0, 1},
    {SYS_utimensat, "utimensat", META, 0, 0, 1},
    {SYS_fsetxattr, "fsetxattr", META, 0, -1, -1},
    {SYS_read, "read", READ, 0, -1, -1},
    {SYS_pread64, "pread64", READ, 0, -1, -1},
    {SYS_readv, "readv", READ, 0, -1, -1},
    {SYS_preadv, "preadv", READ, 0, -1, -1},
    {SYS_preadv2, "preadv2", READ, 0, -1, -1},
    {SYS_fstat, "fstat", LOOK, 0, -1, -1},
    {SYS_newfstatat, "newfstatat", LOOK, 0, 0, 1},
    {SYS_statx, "statx", LOOK, 0, 0, 1},
    {SYS_readlinkat, "readlinkat", LOOK, -1, 0, 1},
    {SYS_getdents64, "getdents64", LOOK, 0, -1, -1},
#ifdef SYS_open
    {SYS_rename, "rename", RENAME, -1, -1, 1},
    {SYS_link, "link", RENAME, -1, -1, 1},
    {SYS_symlink, "symlink", RENAME, -1, -1, 1},
    {SYS_mkdir, "mkdir", MAKE, -1, -1, 0},
    {SYS_open, "open", LOOK, -1, -1, 0},
    {SYS_creat, "creat", MAKE, -1, -1, 0},
    {SYS_unlink, "unlink", REMOVE, -1, -1, 0},
    {SYS_rmdir, "rmdir", REMOVE, -1, -1, 0},
    {SYS_chmod, "chmod", META, -1, -1, 0},
    {SYS_stat, "stat", LOOK, -1, -1, 0},
    {SYS_lstat, "lstat", LOOK, -1, -1, 0},
    {SYS_readlink, "readlink", LOOK, -1, -1, 0},
#endif
};
enum { CALLS = sizeof calls / sizeof calls[0], TRACED_MAX = 4096 };

static struct plan *plan;
static pid_t main_pid;
static pid_t traced[TRACED_MAX];
static struct { pid_t pid; uint64_t number, arguments[6]; } entered[TRACED_MAX];

static void die(const char *what)
{
    fprintf(stderr, "tracer: %s: %s\n", what, strerror(errno));
    _exit(125);
}

static int peek(pid_t pid, uint64_t address, void *bytes, size_t length)
{
    struct iovec here = {bytes, length}, there = {(void *)address, length};
    return process_vm_readv(pid, &here, 1, &there, 1, 0) == (ssize_t)length ? 0 : -1;
}

/* A zero-terminated text of another process, page by page: what follows it may not be mapped. */
static void peek_text(pid_t pid, uint64_t address, char *text, size_t room)
{
    size_t got = 0;
    while (got + 1 < room) {
        size_t length = 4096 - (address + got) % 4096;
        if (length > room - 1 - got)
            length = room - 1 - got;
        if (peek(pid, address + got, text + got, length) < 0)
            break;
        char *end = memchr(text + got, 0, length);
        if (end != NULL)
            return;
        got += length;
    }
    text[got] = 0;
}

static void link_of(pid_t pid, const char *what, char *path)
{
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/%s", pid, what);
    ssize_t length = readlink(name, path, PATH_MAX - 1);
    path[length < 0 ? 0 : length] = 0;
}

static void path_of(pid_t pid, const struct call *call, const uint64_t *arguments, char *path)
{
    char what[32], name[PATH_MAX];
    path[0] = name[0] = 0;
    if (call->path >= 0 && arguments[call->path] != 0)
        peek_text(pid, arguments[call->path], name, sizeof name);
    if (name[0] == '/') {
        strcpy(path, name);
        return;
    }
    int directory = call->path >= 0 && name[0] != 0 ? call->directory : call->descriptor;
    if (directory < 0 || (int)arguments[directory] == AT_FDCWD)
        strcpy(what, "cwd");
    else
        snprintf(what, sizeof what, "fd/%d", (int)arguments[directory]);
    link_of(pid, what, path);
    size_t length = strlen(path);
    if (name[0] != 0 && length + strlen(name) + 2 < PATH_MAX) {
        path[length] = '/';
        strcpy(path + length + 1, name);
    }
}

static const struct call *call_of(uint64_t number)
{
    for (int at = 0; at < CALLS; at++)
        if ((uint64_t)calls[at].number == number)
            return &calls[at];
    return NULL;
}

static uint32_t class_of(pid_t pid, const struct call *call, const uint64_t *arguments)
{
    uint64_t flags = 0;
    if (call == NULL)
        return OTHER;
    if (call->number == SYS_openat)
        flags = arguments[2];
#ifdef SYS_open
    else if (call->number == SYS_open)
        flags = arguments[1];
#endif
    else if (call->number == SYS_openat2)
        peek(pid, arguments[2], &flags, sizeof flags);
    if (flags & O_CREAT)
        return MAKE;
    if (call->number == SYS_ioctl && (uint32_t)arguments[1] != FICLONE && (uint32_t)arguments[1] != FICLONERANGE)
        return OTHER;
    return call->class;
}

static uint64_t chance(void)
{
    plan->seed ^= plan->seed << 13;
    plan->seed ^= plan->seed >> 7;
    plan->seed ^= plan->seed << 17;
    return plan->seed;
}

static void kill_tree(void)
{
    for (int at = 0; at < TRACED_MAX; at++)
        if (traced[at] != 0)
            kill(traced[at], SIGKILL);
}

/* Flip a bit of what a call has just put into a file, behind the caller's back. */
static int flip_written(pid_t pid, uint64_t number, const uint64_t *arguments, int64_t result)
{
    const struct call *call = call_of(number);
    if (call == NULL || call->class != WRITE || number == SYS_ftruncate || number == SYS_fallocate)
        return 0;
    int64_t end = -1, length = result;
    char name[64], line[64];
    unsigned char byte;
    if (number == SYS_pwrite64)
        end = (int64_t)arguments[3] + result;
    else if (number == SYS_pwritev || number == SYS_pwritev2)
        end = (int64_t)arguments[3] + result;
    else if (number == SYS_copy_file_range && arguments[3] != 0)
        peek(pid, arguments[3], &end, sizeof end);
    int descriptor = (int)arguments[call->descriptor];
    snprintf(name, sizeof name, "/proc/%d/fd/%d", pid, descriptor);
    int file = open(name, O_RDWR | O_CLOEXEC);
    if (file < 0)
        return 0;
    if (number == SYS_ioctl) {
        length = end = lseek(file, 0, SEEK_END);
    } else if (end < 0) {
        snprintf(name, sizeof name, "/proc/%d/fdinfo/%d", pid, descriptor);
        FILE *info = fopen(name, "r");
        while (info != NULL && fgets(line, sizeof line, info) != NULL)
            if (sscanf(line, "pos: %ld", &end) == 1)
                break;
        if (info != NULL)
            fclose(info);
    }
    int done = 0;
    if (length > 0 && end >= length) {
        off_t at = end - length + (off_t)(chance() % (uint64_t)length);
        if (pread(file, &byte, 1, at) == 1) {
            byte ^= (unsigned char)(1 << chance() % 8);
            done = pwrite(file, &byte, 1, at) == 1;
        }
    }
    close(file);
    return done;
}

/* Flip a bit of what a call has just read into the caller's memory. */
static int flip_read(pid_t pid, uint64_t number, const uint64_t *arguments, int64_t result)
{
    uint64_t address = arguments[1];
    unsigned char byte;
    if (result <= 0)
        return 0;
    if (number == SYS_readv || number == SYS_preadv || number == SYS_preadv2) {
        struct iovec first;
        if (peek(pid, arguments[1], &first, sizeof first) < 0 || first.iov_len == 0)
            return 0;
        address = (uint64_t)first.iov_base;
        result = result < (int64_t)first.iov_len ? result : (int64_t)first.iov_len;
    } else if (number != SYS_read && number != SYS_pread64)
        return 0;
    address += chance() % (uint64_t)result;
    if (peek(pid, address, &byte, 1) < 0)
        return 0;
    byte ^= (unsigned char)(1 << chance() % 8);
    struct iovec here = {&byte, 1}, there = {(void *)address, 1};
    return process_vm_writev(pid, &here, 1, &there, 1, 0) == 1;
}

/* Have the call that is about to happen not happen, and return an error instead. */
static void refuse(pid_t pid, int error)
{
#if defined __x86_64__
    struct user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, pid, 0, &registers) < 0)
        return;
    registers.orig_rax = (unsigned long long)-1;
    registers.rax = (unsigned long long)-error;
    ptrace(PTRACE_SETREGS, pid, 0, &registers);
#elif defined __aarch64__
    struct user_regs_struct registers;
    struct iovec all = {&registers, sizeof registers};
    int none = -1;
    struct iovec number = {&none, sizeof none};
    if (ptrace(PTRACE_GETREGSET, pid, NT_PRSTATUS, &all) < 0)
        return;
    registers.regs[0] = (uint64_t)-error;
    ptrace(PTRACE_SETREGSET, pid, NT_PRSTATUS, &all);
    ptrace(PTRACE_SETREGSET, pid, NT_ARM_SYSTEM_CALL, &number);
#else
#error "tracer.c knows the registers of x86_64 and aarch64"
#endif
}

static void note(const char *text)
{
    if (plan->log[0] == 0)
        return;
    int file = open(plan->log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    if (file >= 0) {
        if (write(file, text, strlen(text)) < 0) {
        }
        close(file);
    }
}

/* Whether a call counts, and whether it is the one; notes what it is. */
static int due(pid_t pid, const struct call *call, const uint64_t *arguments)
{
    static int begun;
    char path[PATH_MAX];
    uint32_t class = class_of(pid, call, arguments);
    path[0] = 0;
    if (call != NULL)
        path_of(pid, call, arguments, path);
    int about = path[0] == '/' && strstr(path, plan->needle) != NULL;
    begun |= about;
    if (!(plan->classes & class) || !(about || (class == OTHER && begun)))
        return 0;
    char text[512];
    const char *name = call == NULL ? "other" : call->name;
    char first = 1;
    /* The C library's fstat. */
    if (call != NULL && call->number == SYS_newfstatat && peek(pid, arguments[1], &first, 1) == 0 && first == 0)
        name = "fstat";
    snprintf(text, sizeof text, "%u %d %s %.400s\n", atomic_load(&plan->counted), pid, name, path);
    atomic_fetch_add(&plan->counted, 1);
    note(text);
    if (plan->action == NOTHING)
        return 0;
    if (plan->skip > 0) {
        atomic_fetch_sub(&plan->skip, 1);
        return 0;
    }
    if (plan->hits > 0 && plan->period == 0)
        return 0;
    plan->skip = plan->period == 0 ? 0 : plan->period - 1;
    strncpy(plan->last, text, sizeof plan->last - 1);
    return 1;
}

enum { GO_ON, SEE_EXIT };

static int act(pid_t pid)
{
    atomic_fetch_add(&plan->hits, 1);
    switch (plan->action) {
    case KILL_TREE:
        kill_tree();
        return GO_ON;
    case KILL_MAIN:
        kill(main_pid, SIGKILL);
        return GO_ON;
    case KILL_ONE:
        kill(pid, SIGKILL);
        return GO_ON;
    case SWAP:
        syscall(SYS_renameat2, AT_FDCWD, plan->one, AT_FDCWD, plan->other, RENAME_EXCHANGE);
        return GO_ON;
    case HOLD:
        /* Who else makes a call that is watched waits too: all of it stands still. */
        while (plan->action == HOLD)
            usleep(500);
        return GO_ON;
    }
    return GO_ON;
}

static int on_entry(pid_t pid)
{
    struct __ptrace_syscall_info info;
    if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) < 0)
        return GO_ON;
    const struct call *call = call_of(info.seccomp.nr);
    const uint64_t *arguments = (const uint64_t *)info.seccomp.args;
    if (!due(pid, call, arguments))
        return GO_ON;
    int at_exit = plan->action == FLIP_WRITTEN || plan->action == FLIP_READ || (plan->action != FAIL && plan->after);
    if (at_exit) {
        for (int at = 0; at < TRACED_MAX; at++)
            if (entered[at].pid == 0 || entered[at].pid == pid) {
                entered[at].pid = pid;
                entered[at].number = info.seccomp.nr;
                memcpy(entered[at].arguments, arguments, sizeof entered[at].arguments);
                return SEE_EXIT;
            }
        return GO_ON;
    }
    if (plan->action == FAIL) {
        atomic_fetch_add(&plan->hits, 1);
        refuse(pid, (int)plan->error);
        return GO_ON;
    }
    return act(pid);
}

static int on_exit_of_call(pid_t pid)
{
    struct __ptrace_syscall_info info;
    for (int at = 0; at < TRACED_MAX; at++) {
        if (entered[at].pid != pid)
            continue;
        entered[at].pid = 0;
        if (ptrace(PTRACE_GET_SYSCALL_INFO, pid, sizeof info, &info) < 0 || info.op != PTRACE_SYSCALL_INFO_EXIT)
            return GO_ON;
        int64_t result = info.exit.rval;
        int done = 1;
        if (plan->action == FLIP_WRITTEN || plan->action == FLIP_READ) {
            done = plan->action == FLIP_WRITTEN ? flip_written(pid, entered[at].number, entered[at].arguments, result)
                                                : flip_read(pid, entered[at].number, entered[at].arguments, result);
            if (done)
                atomic_fetch_add(&plan->hits, 1);
            else
                plan->skip = 0; /* The next one, then. */
            return GO_ON;
        }
        return act(pid);
    }
    return GO_ON;
}

static void remember(pid_t pid)
{
    for (int at = 0; at < TRACED_MAX; at++)
        if (traced[at] == pid)
            return;
    for (int at = 0; at < TRACED_MAX; at++)
        if (traced[at] == 0) {
            traced[at] = pid;
            atomic_fetch_add(&plan->living, 1);
            return;
        }
}

static void forget(pid_t pid)
{
    for (int at = 0; at < TRACED_MAX; at++) {
        if (traced[at] == pid) {
            traced[at] = 0;
            atomic_fetch_sub(&plan->living, 1);
        }
        if (entered[at].pid == pid)
            entered[at].pid = 0;
    }
}

static void trace(void)
{
    for (;;) {
        int status;
        pid_t pid = waitpid(-1, &status, __WALL);
        if (pid < 0 && errno == EINTR)
            continue;
        if (pid < 0)
            return;
        if (!WIFSTOPPED(status)) {
            forget(pid);
            continue;
        }
        remember(pid);
        int event = status >> 16, number = WSTOPSIG(status), next = GO_ON;
        if (event == PTRACE_EVENT_SECCOMP) {
            next = on_entry(pid);
            number = 0;
        } else if (event == PTRACE_EVENT_STOP) {
            if (number == SIGSTOP || number == SIGTSTP || number == SIGTTIN || number == SIGTTOU) {
                ptrace(PTRACE_LISTEN, pid, 0, 0);
                continue;
            }
            number = 0;
        } else if (event != 0) {
            number = 0;
        } else if (number == (SIGTRAP | 0x80)) {
            next = on_exit_of_call(pid);
            number = 0;
        }
        ptrace(next == SEE_EXIT ? PTRACE_SYSCALL : PTRACE_CONT, pid, 0, number);
    }
}

static void filter(uint32_t watch)
{
    struct sock_filter lines[2 * CALLS + 4];
    unsigned short count = 0;
    lines[count++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    if (watch & OTHER)
        lines[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
    for (int at = 0; at < CALLS && !(watch & OTHER); at++) {
        uint32_t class = calls[at].class | (strncmp(calls[at].name, "open", 4) == 0 ? MAKE : 0);
        if (!(watch & class))
            continue;
        lines[count++] =
            (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)calls[at].number, 0, 1);
        lines[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRACE);
    }
    lines[count++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = {count, lines};
    if (geteuid() != 0 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0)
        die("PR_SET_NO_NEW_PRIVS");
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0) < 0)
        die("a seccomp filter cannot be set");
}

/* Exchange two names as fast as the kernel does it, for as long as the plan says SWAP; count each. */
static int swap_for_ever(void)
{
    pid_t parent = getppid();
    while (getppid() == parent) {
        for (int times = 0; times < 64; times++) {
            if (plan->action != SWAP) {
                usleep(200);
                break;
            }
            if (syscall(SYS_renameat2, AT_FDCWD, plan->one, AT_FDCWD, plan->other, RENAME_EXCHANGE) == 0)
                atomic_fetch_add(&plan->counted, 1);
            for (unsigned wait = (unsigned)(chance() % (plan->period + 1)); wait > 0; wait--)
                __asm__ volatile("" ::: "memory");
        }
    }
    return 0;
}

static int traced_already(void)
{
    char line[256];
    int pid = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "TracerPid: %d", &pid) == 1)
            break;
    if (file != NULL)
        fclose(file);
    return pid != 0;
}

int main(int count, char **words)
{
    if (count < 3) {
        fprintf(stderr, "usage: tracer PLAN -- COMMAND... | tracer PLAN swap\n");
        return 2;
    }
    int file = open(words[1], O_RDWR | O_CLOEXEC);
    if (file < 0)
        die(words[1]);
    plan = mmap(NULL, sizeof *plan, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (plan == MAP_FAILED)
        die("mmap");
    close(file);
    if (strcmp(words[2], "swap") == 0)
        return swap_for_ever();
    int ready[2];
    if (traced_already()) {
        execvp(words[3], words + 3);
        die(words[3]);
    }
    if (pipe2(ready, O_CLOEXEC) < 0)
        die("pipe");
    main_pid = getpid();
    prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
    pid_t between = fork();
    if (between == 0) {
        if (fork() != 0)
            _exit(0);
        setsid();
        /* Whoever looks for processes of the command by what they were started with is not to find us. */
        for (char **variable = environ; *variable != NULL; variable++)
            memset(*variable, 0, strlen(*variable));
        int nowhere = open("/dev/null", O_RDWR);
        dup2(nowhere, 0);
        dup2(nowhere, 1);
        int going = dup2(ready[1], 3);
        /* Locks that the command inherits must not live on in us. */
        close_range(4, ~0U, 0);
        long how = PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK | PTRACE_O_TRACECLONE | PTRACE_O_TRACEEXEC |
                   PTRACE_O_TRACESECCOMP | PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL;
        if (ptrace(PTRACE_SEIZE, main_pid, 0, how) < 0)
            die("ptrace");
        remember(main_pid);
        if (write(going, "g", 1) != 1)
            die("pipe");
        close(going);
        trace();
        _exit(0);
    }
    if (between < 0)
        die("fork");
    waitpid(between, NULL, 0);
    close(ready[1]);
    char word;
    if (read(ready[0], &word, 1) != 1) {
        fprintf(stderr, "tracer: it cannot trace\n");
        _exit(125);
    }
    close(ready[0]);
    filter(plan->watch);
    execvp(words[3], words + 3);
    die(words[3]);
}
