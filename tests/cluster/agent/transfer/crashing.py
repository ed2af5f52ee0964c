"""A transfer in a process of its own that dies at a chosen call, helpers and all."""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import struct
from collections.abc import Callable
from typing import Any, Final, NoReturn

from forebay.cluster.system.processes import become_subreaper

_KILLED: Final = 9

CALLS = (
    "open", "read", "write", "pread", "pwrite", "preadv", "pwritev", "fsync", "fdatasync", "rename", "unlink", "mkdir",
    "ftruncate", "posix_fallocate", "fchmod", "utime", "copy_file_range", "sendfile", "rmdir", "link",
)  # fmt: skip
"""Calls of the module os, between any two of which a process may die."""


def calls_of(work: Callable[[], object]) -> int:
    """Return how many of CALLS the work makes when nothing happens to it."""
    return _run(work, 0)[1]


def dies_at(work: Callable[[], object], number: int) -> bool:
    """Let the work's process and all that it started be killed before its call of this number; False if it was over."""
    return _run(work, number)[0]


def _run(work: Callable[[], object], number: int) -> tuple[bool, int]:
    counter = mmap.mmap(-1, 16)
    keeper = os.fork()
    if not keeper:
        _keep(work, counter, number)
    _, status = os.waitpid(keeper, 0)
    (count,) = struct.unpack_from("q", counter)
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, _KILLED), "the work failed by itself"
    return code == _KILLED, count


def _keep(work: Callable[[], object], counter: mmap.mmap, number: int) -> NoReturn:
    """Do the work in a child, and end when nothing that the child started is left."""
    code = 1
    try:
        # The first process of the machine, which would adopt them otherwise, may take its time.
        become_subreaper()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            _arm(counter, number)
            work()
            os._exit(0)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-1, 0)
        code = _KILLED if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
    finally:
        os._exit(code)


def _arm(counter: mmap.mmap, number: int) -> None:
    # Two processes that count at once may count one call together: the moment is as good.
    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def calling(*arguments: Any, **named: Any) -> Any:
            (count,) = struct.unpack_from("q", counter)
            struct.pack_into("q", counter, 0, count + 1)
            if count + 1 == number:
                os.killpg(0, signal.SIGKILL)
            return call(*arguments, **named)

        return calling

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
