"""Process that holds the lock of a directory as a replica or an agent does, and does nothing else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from forebay.cluster.system import fields_of

HOLDS: Final = (
    "import fcntl, os, sys, threading\n"
    "place = os.open(sys.argv[1], os.O_RDONLY)\n"
    "fcntl.flock(place, fcntl.LOCK_EX)\n"
    "print('held', flush=True)\n"
    "threading.Event().wait()\n"
)


@contextlib.contextmanager
def holding(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Create a directory, start a process that holds its lock, and end the process afterwards."""
    directory.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(directory)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()


def state_of(pid: int) -> str:
    """Return the state of a process as in proc(5): T is stopped."""
    fields = fields_of(pid)
    return "" if fields is None else fields[0].decode()
