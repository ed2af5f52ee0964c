"""Adversary between a process and the kernel: at a chosen system call it kills, rejects, flips a bit, swaps or delays.

tracer.c does it; this is its plan, a file that both sides map, so that it may be changed while the command runs.
"""

import contextlib
import errno
import mmap
import struct
import subprocess
from enum import IntEnum, IntFlag
from pathlib import Path
from typing import NamedTuple

from tests.faults.kernel import Unable

SOURCE = Path(__file__).with_name("tracer.c")

_PLAN = struct.Struct("<8IQ2I208s256s256s256s512s")
_COUNTED = struct.Struct("<2I")
_COUNTED_AT = 24
_LIVING_AT = 44


class Action(IntEnum):
    """What is done at the call."""

    NOTHING = 0
    KILL_TREE = 1
    """Everything that is traced dies at once, as with its agent."""
    KILL_MAIN = 2
    """Only the process that was started first."""
    KILL_ONE = 3
    """Only the process whose call it is."""
    FAIL = 4
    FLIP_WRITTEN = 5
    """A bit of what the call has put into its file."""
    FLIP_READ = 6
    """A bit of what the call has got, in the memory of the caller."""
    SWAP = 7
    HOLD = 8
    """All of it stands still until there is another plan."""


class Calls(IntFlag):
    """Kinds of calls."""

    WRITE = 1
    SYNC = 2
    RENAME = 4
    MAKE = 8
    REMOVE = 16
    META = 32
    READ = 64
    LOOK = 128
    OTHER = 256


CHANGING = Calls.WRITE | Calls.SYNC | Calls.RENAME | Calls.MAKE | Calls.REMOVE | Calls.META
EVERY = CHANGING | Calls.READ | Calls.LOOK | Calls.OTHER


class Plan(NamedTuple):
    """What is done, at which call, and to whom."""

    action: Action = Action.NOTHING
    classes: Calls = CHANGING
    """The calls that count."""
    needle: str = ""
    """What is in the path of a call that counts."""
    skip: int = 0
    """So many calls that count pass first."""
    period: int = 0
    """0: it is done once; N: again at every Nth call that counts."""
    after: bool = False
    error: int = errno.EIO
    seed: int = 1
    watch: Calls = Calls(0)
    """The calls that may come to count later; 0: only those that count now."""
    one: str = ""
    other: str = ""
    log: str = ""


def build(directory: Path) -> Path:
    """Compile the tracer into `directory` and return its path; Unable with the compiler's complaint."""
    directory.mkdir(parents=True, exist_ok=True)
    program = directory / "tracer"
    if program.exists():
        return program
    line = ["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-o", str(program), str(SOURCE)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unable(f"needs gcc with the C library's headers (Debian: gcc libc6-dev): {done.stderr.strip()}")
    probe = Tracer(program, directory / "probe")
    if subprocess.run([program, probe.file, "--", "true"], capture_output=True, check=False).returncode != 0:
        program.unlink()
        raise Unable("processes cannot be traced here (ptrace and seccomp filters): allow CAP_SYS_PTRACE")
    return program


class Tracer:
    """The tracer's program and one plan."""

    def __init__(self, program: Path, file: Path, *, fresh: bool = True) -> None:
        """Begin with a plan that does nothing, in `file`, or with the one that somebody else has put there."""
        self.program = program
        self.file = file
        if fresh:
            self.set(Plan())

    def set(self, plan: Plan) -> None:
        """Take a plan; the counters begin again."""
        packed = _pack(plan)
        if not self.file.exists() or self.file.stat().st_size != _PLAN.size:
            self.file.write_bytes(packed)
            return
        with self._mapped() as mapped:
            # What is done comes last: until then nothing is.
            mapped[0:4] = struct.pack("<I", Action.NOTHING)
            # How many live is the tracer's alone: somebody may just be ending.
            mapped[4:_LIVING_AT] = packed[4:_LIVING_AT]
            mapped[_LIVING_AT + 4 :] = packed[_LIVING_AT + 4 :]
            mapped[0:4] = packed[0:4]

    @property
    def counted(self) -> int:
        """Calls that counted since the plan was taken."""
        with self._mapped() as mapped:
            return int(_COUNTED.unpack_from(mapped, _COUNTED_AT)[0])

    @property
    def hits(self) -> int:
        """How often it was done since the plan was taken."""
        with self._mapped() as mapped:
            return int(_COUNTED.unpack_from(mapped, _COUNTED_AT)[1])

    @property
    def living(self) -> int:
        """Processes and threads that are traced now."""
        with self._mapped() as mapped:
            return int(struct.unpack_from("<I", mapped, _LIVING_AT)[0])

    @property
    def last(self) -> str:
        """The call at which it was done last: its number, process, name and path."""
        with self._mapped() as mapped:
            return bytes(mapped[_PLAN.size - 512 :]).partition(b"\0")[0].decode("utf-8", "replace").strip()

    def _mapped(self) -> "contextlib.closing[mmap.mmap]":
        with self.file.open("r+b") as opened:
            return contextlib.closing(mmap.mmap(opened.fileno(), _PLAN.size))


def _pack(plan: Plan) -> bytes:
    texts = [
        (plan.needle.encode(), 208), (plan.one.encode(), 256), (plan.other.encode(), 256), (plan.log.encode(), 256),
    ]  # fmt: skip
    for text, room in texts:
        if len(text) >= room:
            raise ValueError(f"{text!r} is too long for a plan")
    return _PLAN.pack(
        plan.action, plan.classes, plan.error, plan.skip, plan.period, plan.after, 0, 0,
        plan.seed, plan.watch | plan.classes, 0, *(text for text, _ in texts), b"",
    )  # fmt: skip
