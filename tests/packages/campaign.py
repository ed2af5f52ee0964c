"""A campaign of clean machines as a command: its options, how long each step took, its bounds, and how it ends.

Its last line is JSON; exit 77: this machine cannot, and why.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from tests.packages.machine import StepFailed

EXIT_IMPOSSIBLE: Final = 77

NEEDED: Final = ("mmdebstrap", "systemd-nspawn", "nsenter", "dpkg-deb")
"""Programs without which there is no clean machine."""


class Clock:
    """Steps with how long they took, seconds."""

    def __init__(self) -> None:
        """Begin with none."""
        self.steps: list[tuple[str, float]] = []
        self.bounded: list[tuple[str, float, float]] = []
        """What may take so long: what, how long it took, and how long it may."""

    @contextlib.contextmanager
    def step(self, what: str) -> Iterator[None]:
        """Time a step, and print it."""
        began_s = time.monotonic()
        yield
        took_s = time.monotonic() - began_s
        self.steps.append((what, round(took_s, 1)))
        print(f"{took_s:7.1f} s  {' '.join(what.split())[:110]}", flush=True)

    @contextlib.contextmanager
    def within(self, bound_s: float, what: str) -> Iterator[None]:
        """Hold the steps of a block to what they may take together; AssertionError."""
        began = len(self.steps)
        yield
        took_s = round(sum(took_s for _, took_s in self.steps[began:]), 1)
        self.bounded.append((what, took_s, bound_s))
        print(f"{took_s:7.1f} s  of {bound_s:.0f} s: {what}\n", flush=True)
        assert took_s <= bound_s, f"{what} took {took_s} s, and may take {bound_s} s"


def run(option: str, description: str, exercise: Callable[[Path, Path, Clock], None], more: Sequence[str] = ()) -> int:
    """Exercise this tree in a scratch directory, with a tar of a bare Debian and a clock; return the exit code.

    `more`: the programs that this campaign needs beside those for a machine.
    """
    name = f"scripts/package {option}"
    parser = argparse.ArgumentParser(prog=name, description=description)
    parser.add_argument(option, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help="a tar of the bare Debian 12 of this check, made if it is not there")
    chosen = parser.parse_args()
    missing = [program for program in (*NEEDED, *more) if shutil.which(program) is None]
    if os.geteuid() != 0 or missing:
        print(f"{name}: {'missing: ' + ', '.join(missing) if missing else 'it needs root'}", file=sys.stderr)
        return EXIT_IMPOSSIBLE
    work, clock, failed = Path(tempfile.mkdtemp(prefix="forebay-packages-")), Clock(), ""
    try:
        exercise(work, (chosen.base or work / "base.tar").resolve(), clock)
    except (StepFailed, AssertionError) as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        failed = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno} ({place.line}): {error}"
        print(f"{name}: after {clock.steps[-1:]}: {failed}", file=sys.stderr)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(json.dumps({"ok": not failed, "steps": clock.steps, "bounded": clock.bounded}))
    return 1 if failed else 0
