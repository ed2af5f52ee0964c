"""Environment of a job's processes: rights, limits, priority, signals, umask, keyring.

None of these is inherited from the agent, which runs as root, or in a unit with limits and priorities that are not
meant for jobs. `LIMITS` gives the value of each resource limit. Call `limit`, `prepare`, `forgo` and `reset` in this
order.
Sources: capabilities(7), prctl(2), setrlimit(2), session-keyring(7), proc(5).
"""

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
    """Site settings for job processes; sizes in bytes, `UNLIMITED` is no limit."""

    umask: int = 0o022
    nice: int = 0
    """Scheduling priority, from -20 to 19."""
    core_bytes: int = 0
    """Maximum size of a core file."""
    locked_bytes: int = 8 * MIB
    """Maximum locked memory; the kernel's default. RDMA needs more."""
    stack_bytes: int = 8 * MIB
    """Soft limit of the stack; programs may raise it."""
    open_files: int = 524_288
    """Hard limit of open files; the soft limit is SOFT_FILES, above which select(2) fails."""
    processes: int = 0
    """Maximum number of the user's processes on the node; 0 for the kernel's limit of its first process."""
    no_new_privs: bool = True
    """True if programs cannot gain rights, so that sudo, ping and the like have no effect."""
    capabilities: tuple[str, ...] = ()
    """Maximum capabilities of privileged programs, by their names in capabilities(7); none with `no_new_privs`."""


SOFT_FILES: Final = 1_024

CAPABILITIES: Final = (
    *("chown", "dac_override", "dac_read_search", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("linux_immutable", "net_bind_service", "net_broadcast", "net_admin", "net_raw", "ipc_lock", "ipc_owner"),
    *("sys_module", "sys_rawio", "sys_chroot", "sys_ptrace", "sys_pacct", "sys_admin", "sys_boot", "sys_nice"),
    *("sys_resource", "sys_time", "sys_tty_config", "mknod", "lease", "audit_write", "audit_control", "setfcap"),
    *("mac_override", "mac_admin", "syslog", "wake_alarm", "block_suspend", "audit_read", "perfmon", "bpf"),
    "checkpoint_restore",
)
"""Names from capabilities(7) in numeric order, without CAP_."""

_MESSAGE_QUEUE_BYTES: Final = 819_200
"""The kernel's default of RLIMIT_MSGQUEUE, bytes."""


def _kernel_processes() -> int:
    """Return the kernel's limit of processes and pending signals for its first process: half of its threads."""
    return max(1, int(Path("/proc/sys/kernel/threads-max").read_text()) // 2)


@functools.cache
def _capabilities() -> int:
    """Return the number of capabilities this kernel has, or may have."""
    try:
        return int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1
    except OSError:
        return _CAPABILITIES_MAX


Limit = tuple[int, int]
"""Soft and hard limit."""

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
"""Every resource limit of setrlimit(2) except that of file locks, which the kernel no longer enforces."""

_PR_SET_KEEPCAPS: Final = 8
_PR_CAPBSET_READ: Final = 23
_PR_CAPBSET_DROP: Final = 24
_PR_SET_SECUREBITS: Final = 28
_PR_SET_NO_NEW_PRIVS: Final = 38
_PR_CAP_AMBIENT: Final = 47
_PR_CAP_AMBIENT_CLEAR_ALL: Final = 4

_CAPABILITIES_MAX: Final = 64
"""Size of the kernel's capability sets."""

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
"""System call numbers of keyctl and ioprio_set, for which the C library has no function, by machine."""

_libc = ctypes.CDLL(None, use_errno=True)


def limit(wanted: JobProcess) -> None:
    """Set resource limits and priorities as far as permitted; call it while running as the agent's account.

    Raises:
        OSError: A limit cannot be set.
    """
    for number, of in LIMITS.items():
        soft, hard = of(wanted)
        try:
            resource.setrlimit(number, (soft, hard))
        except (PermissionError, ValueError):
            _, most = resource.getrlimit(number)
            resource.setrlimit(number, (_least(soft, most), _least(hard, most)))
    # Raising the priority above the agent's needs rights that an unprivileged agent lacks.
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    with contextlib.suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, 0, wanted.nice)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("0")
    _call(1, _IOPRIO_WHO_PROCESS, 0, 0)


def prepare(wanted: JobProcess) -> None:
    """Drop rights that the job's account could regain; call it before changing to that account.

    Raises:
        OSError: A right cannot be dropped.
    """
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
            # An ordinary account has no capabilities to drop, and the agent does not decide on rights of its programs.
            if os.geteuid() == 0 and not wanted.no_new_privs:
                raise


def forgo(wanted: JobProcess) -> None:
    """Drop permanently all rights beyond the account's own, after changing to that account.

    Raises:
        OSError: A right cannot be dropped.
    """
    _prctl(_PR_SET_KEEPCAPS, 0)
    _prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    # Effective, permitted and inheritable sets, two words of 32 bits each.
    if _libc.capset(header, (ctypes.c_uint32 * 6)()) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if wanted.no_new_privs:
        _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    # Possession of a keyring permits reading its keys, so a job must not share the agent's session keyring.
    _call(0, _KEYCTL_JOIN_SESSION_KEYRING, 0)


def reset(wanted: JobProcess) -> None:
    """Set umask, signals and descriptors as at login; only descriptors 0, 1 and 2 are inherited.

    SIGHUP is ignored, as under nohup(1): `systemctl kill -s HUP` on the agent also reaches the processes of its jobs.
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
    """Call keyctl (0) or ioprio_set (1) if their number is known on this machine; ignore failures."""
    numbers = _CALLS.get(platform.machine())
    if numbers is not None:
        _libc.syscall(ctypes.c_long(numbers[which]), *(ctypes.c_long(argument) for argument in arguments))
