"""Private directory of a copy, created for one drill and removed at its end.

The coordinator and the copy's replicas hold a lock on it. If the coordinator is killed, its replicas die with it and
the lock is released, but the directory remains. The next drill on a copy removes the directory.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forebay.cluster.system import closing, open_directory, try_lock

PREFIX: Final = "forebay-drill-copy-"
"""Prefix of the directories' names."""

TRIES: Final = 50
TRY_EVERY_S: Final = 0.02
"""Number of attempts to remove a directory, and the seconds between two attempts."""

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def private_directory(base: Path) -> Iterator[tuple[Path, int]]:
    """Create a directory for a copy and yield it with the descriptor of its lock; remove it at the end.

    Processes of the copy inherit the descriptor, so the lock is held until they have all ended.

    Raises:
        OSError: if the directory cannot be created.
    """
    directory, lock = _make(base)
    try:
        yield directory, lock
    finally:
        _remove(directory)
        os.close(lock)


def _remove(directory: Path) -> None:
    """Remove a directory; retry while killed processes that have not ended yet write into it."""
    for _ in range(TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        threading.Event().wait(TRY_EVERY_S)


def _make(base: Path) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = open_directory(directory)
        # Retry if another drill's clean-up removed the directory before it was locked.
        if try_lock(lock) and directory.exists():
            return directory, lock
        os.close(lock)


def remove_left_over(base: Path) -> int:
    """Remove unused directories of this account's copies, and return their number."""
    count = 0
    for path in sorted(base.glob(f"{PREFIX}*")):
        try:
            opened = open_directory(path)
        except OSError:
            continue
        with closing(opened) as found:
            known = os.fstat(found)
            if known.st_uid == os.geteuid() and not known.st_mode & _OTHERS and try_lock(found):
                _remove(path)
                count += not path.exists()
    return count
