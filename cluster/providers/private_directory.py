"""Private directory of one provider call by a replica, removed after the call, or by the next call after a kill.

If a replica is killed, its workers and their calls end, but background processes of a call and the call's directory
remain. So the directory is locked during the call, and the directory's name marks the call's processes. A later call
that finds an unlocked directory kills the marked processes and removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from typing import Final

from forebay.cluster.providers.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX
from forebay.cluster.system import all_pids, closing, environment_variables, open_directory, send, start_time, try_lock

PREFIX: Final = "forebay-call-"

MARK: Final = "FOREBAY_OPERATION"
"""Variable that marks the processes of a call; its value is the directory's name."""

_NAME: Final = re.compile(re.escape(PREFIX) + r"[a-z0-9_]{8}", re.ASCII)


@contextlib.contextmanager
def private_directory() -> Iterator[str]:
    """Create a directory only this account can access, and remove it on exit.

    Raises:
        OSError: The directory cannot be created.
    """
    path, lock = _make_locked()
    os.environ[MARK] = os.path.basename(path)
    try:
        yield path
    finally:
        del os.environ[MARK]
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def _make_locked() -> tuple[str, int]:
    while True:
        path = tempfile.mkdtemp(prefix=PREFIX)
        try:
            lock = open_directory(path)
        except FileNotFoundError:
            continue  # a concurrent cleanup has already removed the directory
        if try_lock(lock) and os.fstat(lock).st_nlink:
            return path, lock
        # A concurrent cleanup locked the directory first and will remove it.
        os.close(lock)


def remove_abandoned() -> None:
    """Kill processes of this account's abandoned calls and remove their directories."""
    with contextlib.suppress(OSError):
        with closing(os.open(tempfile.gettempdir(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as place:
            for name in os.listdir(place):
                if _NAME.fullmatch(name):
                    with contextlib.suppress(OSError):
                        _remove(place, name)


def _remove(place: int, name: str) -> None:
    with closing(open_directory(name, dir_fd=place)) as directory:
        status = os.fstat(directory)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700 or not try_lock(directory):
            return
        for _ in range(KILL_ROUNDS_MAX):
            left = [pid for pid in all_pids() if _is_of(name, pid)]
            if not left:
                break
            for pid in left:
                send(pid, signal.SIGKILL, still=partial(_is_of, name, pid))
            signal.sigtimedwait((), KILL_PAUSE_S)
        shutil.rmtree(name, dir_fd=place)


def _is_of(name: str, pid: int) -> bool:
    return f"{MARK}={name}".encode() in environment_variables(pid) and start_time(pid) is not None
