"""A fork into a cgroup (clone3 with CLONE_INTO_CGROUP), and one whose parent is this process's own (CLONE_PARENT).

A process that enters a cgroup by itself waits until every processor has passed through the kernel once, some 15 ms; one
that is made in it waits for nothing."""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Final, NamedTuple

_CLONE3: Final = 435
"""Number of clone3(2), which all machines have in common."""

_CLONE_PARENT: Final = 0x0000_8000
_CLONE_CHILD_CLEARTID: Final = 0x0020_0000
_CLONE_CHILD_SETTID: Final = 0x0100_0000
_CLONE_INTO_CGROUP: Final = 0x2_0000_0000
_PR_GET_TID_ADDRESS: Final = 40

_WITHOUT_CGROUP_BYTES: Final = 64
"""Size of the arguments of clone3(2) as it came with Linux 5.3; cgroups came with 5.7."""


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
"""The C library, called with the interpreter's lock held: no other thread, and no signal handler, runs in between."""


class Forked(NamedTuple):
    """What a fork returns."""

    pid: int
    """0 in the child."""
    is_within: bool
    """Whether the child lives in the cgroup that was asked for; if not, it has to enter it."""


def fork(cgroup: int = -1, *, sibling: bool = False) -> Forked:
    """Fork as os.fork does, the child into the cgroup of an open directory, if one is given and the kernel can.

    The parent of a `sibling` is this process's. OSError: nobody was forked.
    """
    if cgroup >= 0:
        try:
            return Forked(_clone(cgroup, sibling=sibling), True)
        except OSError:
            # Linux before 5.7, or a reason that entering it will name.
            pass
    return Forked(_clone(-1, sibling=True) if sibling else os.fork(), False)


def _clone(cgroup: int, *, sibling: bool) -> int:
    address = ctypes.c_uint64()
    # A sibling ends with the signal that this process ends with.
    arguments = _CloneArguments(exit_signal=0 if sibling else signal.SIGCHLD)
    if sibling:
        arguments.flags |= _CLONE_PARENT
    if cgroup >= 0:
        arguments.flags |= _CLONE_INTO_CGROUP
        arguments.cgroup = cgroup
    # The C library keeps the id of its thread where the kernel is told to write it. Where that cannot be found it has a
    # stale one in the child, which only matters to mutexes that processes share: there are none.
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
