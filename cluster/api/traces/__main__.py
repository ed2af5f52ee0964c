"""Trace exporter process: `python -m cluster.api.traces SOCKET PARENT DIRECTORY URL`, started by its replica.

SOCKET is a descriptor, PARENT the replica's process, whose death ends this one, DIRECTORY the replica's directory, URL
the collector's. The replica reports whether it leads; the process exports finished jobs and reports counts.
"""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from forebay.cluster.api.traces.finished_jobs import LATE_US, FinishedJob, FinishedJobReader
from forebay.cluster.api.traces.frames import EXIT_NOT_INSTALLED, EXPORTER_CODEC, Leadership, TraceCounts
from forebay.cluster.api.traces.spans import JobSpan, spans_of, trace_id
from forebay.cluster.ipc import ChildSocket, begin_child
from forebay.cluster.system import SystemClock
from forebay.replica.values import Instant
from forebay.wal import Environment, Ledger

LOGGER = logging.getLogger("forebay.cluster.api.traces")

LOOK_S: Final = 1.0
"""Interval of checks for finished jobs, seconds; the per-job index is written every few seconds."""

WAITING_MAX: Final = 1_000
"""Traces waiting for an unavailable collector, count; the oldest are dropped."""

SPANS_WAITING_MAX: Final = 50_000
"""Spans of waiting traces, count: about a kilobyte each. A job that is retried forever has thousands."""

AT_ONCE: Final = 50
SPANS_AT_ONCE: Final = 2_000
"""Traces in one request, and their spans before the last trace, counts."""

TRIES_MAX: Final = 5
"""Attempts to send one request, count; then its traces are dropped."""

RETRY_S: Final = 1.0
"""Delay before the next attempt, seconds; doubled each time."""

NICENESS: Final = 19

MEMORY_BYTES: Final = 512 * 1024 * 1024
"""Memory limit of this process, bytes, because the exporter does not bound a collector's responses."""

Send = Callable[[list[tuple[bytes, list[JobSpan]]]], bool]


class _Trace(NamedTuple):
    """A waiting trace."""

    trace_id: bytes
    at: Instant
    spans: list[JobSpan]


class Sender:
    """Queue of traces, with counts of those sent and dropped."""

    def __init__(self, cluster: str, send: Send, monotonic_s: Callable[[], float]) -> None:
        self._cluster = cluster
        self._send = send
        self._monotonic_s = monotonic_s
        self._waiting: deque[_Trace] = deque()
        self._spans = 0
        """Spans of the waiting traces, count."""
        self._tries = 0
        self._again_s = 0.0
        self.leads = False
        self.sent = 0
        self.dropped = 0
        """Counts of traces."""

    @property
    def waiting(self) -> int:
        """Traces waiting for the collector, count."""
        return len(self._waiting) if self.leads else 0

    def take(self, over: Sequence[FinishedJob]) -> None:
        """Queue the traces of finished jobs if this replica leads or soon does."""
        for one in over:
            spans = spans_of(self._cluster, one.job, one.steps)
            if spans:
                self._waiting.append(_Trace(trace_id(self._cluster, one.job), one.at, spans))
                self._spans += len(spans)
        while not self.leads and self._waiting and self._waiting[0].at < self._waiting[-1].at - LATE_US:
            self._first()
        while len(self._waiting) > WAITING_MAX or self._spans > SPANS_WAITING_MAX:
            self._first()
            self.dropped += self.leads

    def step(self) -> bool:
        """Send some waiting traces; return True to continue at once."""
        if not self.leads or not self._waiting or self._monotonic_s() < self._again_s:
            return False
        chosen: list[_Trace] = []
        while self._waiting and len(chosen) < AT_ONCE and sum(len(one.spans) for one in chosen) < SPANS_AT_ONCE:
            chosen.append(self._first())
        if self._send([(one.trace_id, one.spans) for one in chosen]):
            if self._tries:
                LOGGER.warning("the collector accepts traces again")
            self._tries, self._again_s = 0, 0.0
            self.sent += len(chosen)
            return bool(self._waiting)
        if not self._tries:
            LOGGER.warning("the collector has not accepted %d job traces: they will be sent again", len(chosen))
        self._tries += 1
        self._again_s = self._monotonic_s() + RETRY_S * 2.0 ** min(self._tries, TRIES_MAX)
        if self._tries % TRIES_MAX:
            self._waiting.extendleft(reversed(chosen))
            self._spans += sum(len(one.spans) for one in chosen)
        else:
            LOGGER.warning("dropped %d job traces: the collector did not accept them", len(chosen))
            self.dropped += len(chosen)
        return False

    def _first(self) -> _Trace:
        first = self._waiting.popleft()
        self._spans -= len(first.spans)
        return first


def run(link: ChildSocket[TraceCounts, Leadership], jobs: FinishedJobReader, sender: Sender) -> None:
    """Run until the replica closes the socket (EOFError)."""
    told, more = TraceCounts(0, 0, 0), False
    while True:
        if link.is_readable(0 if more else LOOK_S):
            for said in link.receive():
                sender.leads = said.leads
        over, more = jobs.read()
        sender.take(over)
        more |= sender.step()
        counts = TraceCounts(sender.sent, sender.dropped, sender.waiting)
        if counts != told:
            link.send(counts)
            told = counts


def main(arguments: Sequence[str]) -> int:
    """Run the process; return its exit code."""
    link, (directory, url) = begin_child(arguments, niceness=NICENESS)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    try:
        from forebay.cluster.api.traces.exporter import Exporter
    except ImportError as error:
        LOGGER.error("no traces are sent: %s; install OpenTelemetry: pip install forebay[otel]", error)
        return EXIT_NOT_INSTALLED
    home = Path(directory)
    with Environment.open_readonly(home / "wal") as environment, link:
        ledger = Ledger(environment)
        exporter = Exporter(url, ledger.cluster_id)
        sender = Sender(ledger.cluster_id, exporter.send, SystemClock().monotonic_s)
        with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
            run(ChildSocket(link, EXPORTER_CODEC), FinishedJobReader(ledger, home / "index"), sender)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
