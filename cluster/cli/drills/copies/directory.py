"""The private directory of a copy: made for one drill, locked for as long as anybody of it lives, removed at its end.

A coordinator that is killed leaves one. Its replicas die with it, and with the last of them the lock ends: whoever
makes a copy next finds that nobody holds it, and removes it.
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

from cluster.system import closing, open_directory, try_lock

PREFIX: Final = "forebay-drill-copy-"
"""What the directories are called by."""

TRIES: Final = 50
TRY_EVERY_S: Final = 0.02
"""How often a directory is removed until it is gone, and the time between, seconds."""

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def private_directory(base: Path) -> Iterator[tuple[Path, int]]:
    """Make a directory for a copy, and remove it at the end; with the descriptor that holds its lock. OSError.

    Processes of the copy are given the descriptor, so that the lock lasts as long as they do.
    """
    directory, lock = _make(base)
    try:
        yield directory, lock
    finally:
        _remove(directory)
        os.close(lock)


def _remove(directory: Path) -> None:
    """Remove it, also from under processes that were killed just now, and have not ended."""
    for _ in range(TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not directory.exists():
            return
        threading.Event().wait(TRY_EVERY_S)


def _make(base: Path) -> tuple[Path, int]:
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        lock = open_directory(directory)
        # Whoever looks for what is left may have found it before it was locked, and removed it.
        if try_lock(lock) and directory.exists():
            return directory, lock
        os.close(lock)


def remove_left_over(base: Path) -> int:
    """Remove directories of copies that nobody uses any more, and return how many. Others' are left alone."""
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
