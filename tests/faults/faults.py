"""Disk faults of a running replica, injected by a preloaded library.

faults.c says what it does. The plan is a file that both sides map, so that no process has to be told.
"""

import contextlib
import errno
import mmap
import struct
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests.faults.kernel import Unable

SOURCE = Path(__file__).with_name("faults.c")
TOOLS = {"gcc": "gcc", "gencat": "libc6-dev"}
"""Programs and their packages; `gencat` is what shows that the headers of the C library are there."""

KINDS = {"nothing": 0, "sync": 1, "write": 2, "short-write": 3, "lie": 4, "lie-last": 5, "slow": 6}
_PLAN = struct.Struct("<IIIII48s")


class Plan(NamedTuple):
    """What is to fail: which calls, with which errno, on files whose path has `needle` in it, after `skip` calls.

    `slow`: syncs do not fail, and take `delay_ms` longer.
    """

    what: str
    error: int = errno.EIO
    needle: str = "data.mdb"
    skip: int = 0
    delay_ms: int = 0


def build(directory: Path, source: Path = SOURCE) -> Path:
    """Compile the library into `directory` and return its path; Unable with the compiler's complaint."""
    directory.mkdir(parents=True, exist_ok=True)
    library = directory / source.with_suffix(".so").name
    line = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    try:
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        complaint = "" if done.returncode == 0 else done.stderr.strip() or f"exit {done.returncode}"
    except FileNotFoundError:
        complaint = "gcc is not installed"
    if complaint:
        raise Unable(f"needs gcc with the C library's headers (Debian: gcc libc6-dev): {complaint}")
    return library


def environment(library: Path, plan: Plan, file: Path) -> Mapping[str, str]:
    """Write the plan of one process and return the variables that make it obey."""
    file.write_bytes(_pack(plan))
    return {"LD_PRELOAD": str(library), "FOREBAY_FAULTS": str(file)}


def change(plan: Plan, file: Path) -> None:
    """Change the plan of a process that may be running."""
    with file.open("r+b") as opened, contextlib.closing(mmap.mmap(opened.fileno(), _PLAN.size)) as mapped:
        # What is to fail comes last: until then the old plan holds.
        packed = _pack(plan)
        mapped[0:4] = struct.pack("<I", KINDS["nothing"])
        mapped[4:] = packed[4:]
        mapped[0:4] = packed[0:4]


def hits(file: Path) -> int:
    """Return how many calls have failed as planned."""
    return int(_PLAN.unpack(file.read_bytes())[3])


def _pack(plan: Plan) -> bytes:
    needle = plan.needle.encode()
    if len(needle) >= 48:
        raise ValueError(f"{plan.needle!r} is too long for a plan")
    return _PLAN.pack(KINDS[plan.what], plan.error, plan.skip, 0, plan.delay_ms, needle)
