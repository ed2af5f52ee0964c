"""Process that causes one fault and undoes it on request, when the lease ends, or when the helper has ended.

The process runs in its own session, so it undoes the fault even if the helper is killed. If this process is killed, the
undo record remains, and the helper undoes the fault at once or at its next start.

    stdin   the assignment, then `lease SECONDS` of the monotonic clock, or `end`; one a line
    stdout  `done`, `undone`, or `refused SENTENCE; REMEDY`
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import signal
import sys
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from forebay.cluster.drills.helper.faults import Fault, ThisMachine, of_target
from forebay.cluster.drills.helper.messages import HelperRefused
from forebay.cluster.drills.helper.record import Busy, UndoRecord
from forebay.cluster.system import Clock, SystemClock, ignore_hangup

LINE_BYTES_MAX: Final = 256 * 1024
"""Limit of the assignment, bytes: nft rules for sixteen replicas take some kilobytes."""

EXIT_OK: Final = 0
EXIT_REFUSED: Final = 1


class FaultAssignment(msgspec.Struct, frozen=True):
    """Fault for one process, with its limits."""

    drill: int
    target: str
    fault: Fault
    lease_s: float
    """Duration of the fault without a renewal of the lease, seconds."""
    duration_s: float
    """Maximum duration of the fault with renewals, seconds."""


class _Ended(Exception):
    """Request to end by SIGTERM, for example at shutdown."""


class Lines:
    """Lines from the helper."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""

    def next(self, timeout_s: float) -> str | None:
        """Return the next line, an empty string once the helper has ended, or None after a timeout."""
        clock = SystemClock()
        until_s = clock.monotonic_s() + timeout_s
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._descriptor], [], [], max(0.0, until_s - clock.monotonic_s()))
            if not ready:
                return None
            data = os.read(self._descriptor, LINE_BYTES_MAX)
            if not data or len(self._rest) > LINE_BYTES_MAX:
                return ""
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line.decode("utf-8", "replace") or " "


class Lease:
    """Remaining time of a fault: it ends with the lease, with its maximum duration, on request, or with the helper."""

    def __init__(self, clock: Clock, lease_s: float, duration_s: float) -> None:
        self._clock = clock
        self._last_s = clock.monotonic_s() + duration_s
        self._until_s = min(clock.monotonic_s() + lease_s, self._last_s)

    @property
    def left_s(self) -> float:
        """Return the remaining time without further lines, seconds."""
        return self._until_s - self._clock.monotonic_s()

    def hear(self, line: str) -> None:
        """Process a line from the helper; an empty line means that the helper has ended."""
        word, _, value = line.partition(" ")
        self._until_s = min(float(value), self._last_s) if word == "lease" else self._clock.monotonic_s()


def wait_for_end(lines: Lines, lease: Lease) -> None:
    """Wait until the fault is to be undone."""
    while (left_s := lease.left_s) > 0:
        line = lines.next(left_s)
        if line is not None:
            lease.hear(line)


def run(arguments: list[str]) -> int:
    """Perform the helper's assignment, and return once the fault is undone."""
    parser = argparse.ArgumentParser(prog="forebay.cluster.drills.helper.performer")
    parser.add_argument("--directory", type=Path, required=True, help="directory of the record")
    parser.add_argument("--up", type=int, help="descriptor of the pipe to `forebay cluster up`")
    chosen = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_hangup()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    lines, machine = Lines(sys.stdin.fileno()), ThisMachine(chosen.up)
    assignment = msgspec.json.decode(lines.next(LINE_S) or "", type=FaultAssignment)
    try:
        record = UndoRecord(chosen.directory)
    except (Busy, OSError) as error:
        return _refused(str(error), "wait until it is undone")
    try:
        left = record.settle(machine)
        if left is not None:
            return _refused(
                f"drill {left.drill} had left a fault on {left.target}",
                "the fault is undone now: plan this drill again",
            )
        record.begin(of_target(assignment.drill, assignment.target, assignment.fault, machine), machine)
        signal.signal(signal.SIGTERM, _ended)
        with contextlib.suppress(_Ended):
            _say("done")
            wait_for_end(lines, Lease(SystemClock(), assignment.lease_s, assignment.duration_s))
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        record.settle(machine)
    except HelperRefused as error:
        return _refused(error.sentence, error.remedy)
    except (OSError, ValueError) as error:
        return _refused(str(error), "see the log of the helper")
    _say("undone")
    return EXIT_OK


LINE_S: Final = 10.0
"""Timeout for the assignment, which the helper sends at once, seconds."""


def _ended(number: int, frame: object) -> NoReturn:
    raise _Ended


def _refused(sentence: str, remedy: str) -> int:
    _say(f"refused {sentence}; {remedy}".replace("\n", " "))
    return EXIT_REFUSED


def _say(line: str) -> None:
    # The helper may have ended.
    with contextlib.suppress(OSError):
        os.write(sys.stdout.fileno(), f"{line}\n".encode())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
