"""What a process of a job is given: rights, limits, priority, signals, umask, keyring; nothing of its agent's.

An agent runs as root, or under a unit with limits and priorities of its own, and none of that is meant for jobs.
`LIMITS` says what each resource limit becomes; `limit`, `prepare`, `forgo` and `reset` are called in this order.
Sources: capabilities(7), prctl(2), setrlimit(2), session-keyring(7), proc(5)."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

UNLIMITED: Final = -1

MIB: Final = 1024**2


class JobProcess(msgspec.Struct, frozen=True, kw_only=True):
    """What a site says of its jobs' processes; sizes in bytes, `UNLIMITED` is no limit."""

    umask: int = 0o022
    nice: int = 0
    """Scheduling priority, from -20 to 19."""
    core_bytes: int = 0
    """Largest core file."""
    locked_bytes: int = 8 * MIB
    """Most memory that can be locked; the kernel's own default. What moves data by RDMA needs more."""
    stack_bytes: int = 8 * MIB
    """Size of the stack; programs may raise it."""
    open_files: int = 524_288
    """Most descriptors that a process may allow itself: it begins with SOFT_FILES, above which select(2) fails."""
    processes: int = 0
    """Most processes of the user on the node; 0: as many as the kernel gives its first process."""
    no_new_privs: bool = True
    """Whether no program that is run has more rights than who runs it: sudo, ping and the like are without effect."""
    capabilities: tuple[str, ...] = ()
    """What programs with more rights may have at most, by their names in capabilities(7); with `no_new_privs` there are
    none."""


SOFT_FILES: Final = 1_024

CAPABILITIES: Final = (
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner"),
    *("sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice"),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap"),
    *("mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf"),
    "checkpoint_restore",
)
"""Names of capabilities(7) in the order of their numbers, without CAP_."""

_MESSAGE_QUEUE_BYTES: Final = 819_200
"""The kernel's default of RLIMIT_MSGQUEUE, bytes."""


def _kernel_processes() -> int:
    """Return how many processes, and pending signals, the kernel allows its first process: half of its threads."""
    return max(1, int(Path("/proc/sys/kernel/threads-max").read_text()) // 2)


@functools.cache
def _capabilities() -> int:
    """Return how many capabilities this kernel has, or may have."""
    try:
        return int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1
    except OSError:
        return _CAPABILITIES_MAX


Limit = tuple[int, int]
"""Soft and hard."""

LIMITS: Final[dict[int, Callable[[JobProcess], Limit]]] = {
    resource.RLIMIT_AS: lambda _: (UNLIMITED, UNLIMITED),
    resource.RLIMIT_CORE: lambda wanted: (wanted.core_bytes, wanted.core_bytes),
    resource.RLIMIT_CPU: lambda _: (UNLIMITED, UNLIMITED),
    resource.RLIMIT_DATA: lambda _: (UNLIMITED, UNLIMITED),
    resource.RLIMIT_FSIZE: lambda _: (UNLIMITED, UNLIMITED),
    resource.RLIMIT_MEMLOCK: lambda wanted: (wanted.locked_bytes, wanted.locked_bytes),
    resource.RLIMIT_MSGQUEUE: lambda _: (_MESSAGE_QUEUE_BYTES, _MESSAGE_QUEUE_BYTES),
    resource.RLIMIT_NICE: lambda _: (0, 0),
    resource.RLIMIT_NOFILE: lambda wanted: (min(SOFT_FILES, wanted.open_files), wanted.open_files),
    resource.RLIMIT_NPROC: lambda wanted: (wanted.processes or _kernel_processes(),) * 2,
    resource.RLIMIT_RSS: lambda _: (UNLIMITED, UNLIMITED),
    resource.RLIMIT_RTPRIO: lambda _: (0, 0),
    resource.RLIMIT_RTTIME: lambda _: (UNLIMITED, UNLIMITED),
    resource.RLIMIT_SIGPENDING: lambda _: (_kernel_processes(),) * 2,
    resource.RLIMIT_STACK: lambda wanted: (wanted.stack_bytes, UNLIMITED),
}
"""Every resource limit of setrlimit(2), but for that of file locks, which the kernel no longer keeps."""

_PR_SET_KEEPCAPS: Final = 8
_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_CAPABILITIES_MAX: Final = 64
"""How many the kernel's sets have room for."""

_CAPABILITY_VERSION_3: Final = 0x20080522
_KEYCTL_JOIN_SESSION_KEYRING: Final = 1
_IOPRIO_WHO_PROCESS: Final = 1
_CALLS: Final = {
    "x86_64": (250, 251),
    "aarch64": (219, 30),
    "riscv64": (219, 30),
    "ppc64le": (271, 273),
    "s390x": (280, 282),
}
"""Numbers of keyctl and ioprio_set, which the C library has no name for, by machine."""

_libc = ctypes.CDLL(None, use_errno=True)


def limit(wanted: JobProcess) -> None:
    """Set resource limits and priorities, as far as this account may: call it while that is the agent's. OSError."""
    for number, of in LIMITS.items():
        soft, hard = of(wanted)
        try:
            resource.setrlimit(number, (soft, hard))
        except (PermissionError, ValueError):
            _, most = resource.getrlimit(number)
            resource.setrlimit(number, (_least(soft, most), _least(hard, most)))
    # To be more important than the agent needs rights that one without them does not have.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, wanted.nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    _call(1, _IOPRIO_WHO_PROCESS, 0, 0)


def prepare(wanted: JobProcess) -> None:
    """Give up what another account could win back: call it before this process becomes that. OSError."""
    kept = {CAPABILITIES.index(name.lower().removeprefix("cap_")) for name in wanted.capabilities}
    if wanted.no_new_privs:
        kept = set()
    with contextlib.suppress(PermissionError):
        _prctl(_PR_SET_SECUREBITS, 0)
    for number in range(_capabilities()):
        if number in kept or _libc.prctl(_PR_CAPBSET_READ, ctypes.c_ulong(number), 0, 0, 0) != 1:
            continue
        try:
            _prctl(_PR_CAPBSET_DROP, number)
        except PermissionError:
            # An ordinary account has none to lose, and what its programs may have is not the agent's to decide.
            if os.geteuid() == 0 and not wanted.no_new_privs:
                raise


def forgo(wanted: JobProcess) -> None:
    """Give up every right beyond the account's own, now that this process has become it, for good. OSError."""
    _prctl(_PR_SET_KEEPCAPS, 0)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable, twice 32 of them.
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if wanted.no_new_privs:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # Who possesses a keyring may read its keys: the agent's session is not the job's.
    _call(0, _KEYCTL_JOIN_SESSION_KEYRING, 0)


def reset(wanted: JobProcess) -> None:
    """Set umask, signals and descriptors as at a login; only 0, 1 and 2 are passed on.

    SIGHUP is ignored, as under nohup(1): `systemctl kill -s HUP` on the agent reaches the processes of its jobs, too.
    """
    os.umask(wanted.umask)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


def _least(one: int, other: int) -> int:
    if UNLIMITED in (one, other):
        return max(one, other)
    return min(one, other)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _call(which: int, *arguments: int) -> None:
    """Call keyctl (0) or ioprio_set (1), where this machine's number is known; what fails there is left as it is."""
    numbers = _CALLS.get(platform.machine())
    if numbers is not None:
        _libc.syscall(ctypes.c_long(numbers[which]), *(ctypes.c_long(argument) for argument in arguments))
