"""Fork into a cgroup (clone3 with CLONE_INTO_CGROUP), or as a sibling (CLONE_PARENT).

Moving an existing process into a cgroup takes about 15 ms, until every processor has passed through the kernel;
creating it there takes no extra time.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final, NamedTuple

_CLONE3: Final = 435
"""System call number of clone3(2), the same on all architectures."""

_CLONE_PARENT: Final = 0x0000_8000
_CLONE_CHILD_CLEARTID: Final = 0x0020_0000
_CLONE_CHILD_SETTID: Final = 0x0100_0000
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
_PR_GET_TID_ADDRESS: Final = 40

_WITHOUT_CGROUP_BYTES: Final = 64
"""Size of the clone3(2) arguments in Linux 5.3; cgroups were added in 5.7."""


class _CloneArguments(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "flags",
            "pidfd",
            "child_tid",
            "parent_tid",
            "exit_signal",
            "stack",
            "stack_size",
            "tls",
            "set_tid",
            "set_tid_size",
            "cgroup",
        )
    ]


_libc = ctypes.PyDLL(None, use_errno=True)
"""C library called with the interpreter lock held, so that no other thread or signal handler runs in between."""


class ForkResult(NamedTuple):
    """Result of a fork."""

    pid: int
    """Process ID of the child; 0 in the child."""
    is_within: bool
    """True if the child is in the requested cgroup; otherwise it has to enter it."""


def fork(cgroup: int = -1, *, sibling: bool = False) -> ForkResult:
    """Fork like os.fork, if possible directly into the cgroup of an open directory.

    A `sibling` becomes a child of this process's parent.

    Raises:
        OSError: No process was created.
    """
    if cgroup >= 0:
        try:
            return ForkResult(_clone(cgroup, sibling=sibling), True)
        except OSError:
            # Linux before 5.7, or a reason that entering the cgroup will report.
            pass
    return ForkResult(_clone(-1, sibling=True) if sibling else os.fork(), False)


def _clone(cgroup: int, *, sibling: bool) -> int:
    address = ctypes.c_uint64()
    # A sibling's exit signal is that of this process.
    arguments = _CloneArguments(exit_signal=0 if sibling else signal.SIGCHLD)
    if sibling:
        arguments.flags |= _CLONE_PARENT
    if cgroup >= 0:
        arguments.flags |= _CLONE_INTO_CGROUP
        arguments.cgroup = cgroup
    # The C library caches its thread ID at an address known to the kernel. Without it the child's copy is stale, which
    # matters only for mutexes shared between processes; there are none.
    if _libc.prctl(_PR_GET_TID_ADDRESS, ctypes.byref(address), 0, 0, 0) == 0 and address.value:
        arguments.flags |= _CLONE_CHILD_SETTID | _CLONE_CHILD_CLEARTID
        arguments.child_tid = address.value
    size_bytes = ctypes.sizeof(arguments) if cgroup >= 0 else _WITHOUT_CGROUP_BYTES
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = int(_libc.syscall(ctypes.c_long(_CLONE3), ctypes.byref(arguments), ctypes.c_size_t(size_bytes)))
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return pid
