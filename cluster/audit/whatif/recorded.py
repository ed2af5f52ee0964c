"""Recorded window, read twice: first for service times and figures, then moment by moment for replays.

External input is rebuilt from its events, as in `redecide` (`cluster.audit.rebuild`). A command is accepted if its
digest is the recorded one, or else if deciding it on the recorded state yields the recorded events. Commands that
cannot be rebuilt are settled as recorded if they concern no job; the others are left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.cluster.audit.rebuild import REBUILDERS, WALKING, Led
from forebay.cluster.audit.replay import Progress, ReplayFold, fold, from_image, from_nothing
from forebay.cluster.audit.whatif.observed import WindowFigures
from forebay.cluster.audit.whatif.services import Services, is_external_job_step
from forebay.cluster.system import format_instant
from forebay.replica.decide import decide, is_by_key
from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import Acceptance, Batch, Command, Entry, Request, command_digest, job_of
from forebay.replica.messages import commands as c
from forebay.replica.state import State
from forebay.replica.values import Instant, Revision
from forebay.snapshots import SnapshotRefused, load_snapshot
from forebay.snapshots import inspect as inspect_snapshot
from forebay.wal import Ledger, instant_of

PROVEN_MAX: Final = 256
"""Number of candidates of a command that are compared with its digest: 3 ms."""

TRIED_MAX: Final = 8
"""Number of candidates that are decided if no digest matches: half a millisecond."""

_LAST_ENTRIES: Final = 1_024
"""Number of entries at the end of a ledger that are searched for a batch with its time."""

LEFT_ALONE: Final = frozenset(
    c.kind_of(command)
    for command in (
        *(c.OpenSession(), c.CloseSession(0), c.ExpireCachedReplies()),
        *(c.RecordStateDigest(0, b""), c.RecordHistories(0, 0, b"")),
        *(c.StartDrill("", "", 0), c.AbortDrill(0, ""), c.ProbeDrill(0), c.LockDrills(""), c.UnlockDrills("")),
        c.ConfirmDrill(0),
        *(c.ReportMissingExternalJob("", "", ""), c.RevokeCertificate("", ""), c.UnrevokeCertificate("")),
    )
) | {"end_drill"}
"""Kinds of commands that do not affect scheduling: for cached replies, digests, drills and certificates."""

PASS: Final = c.kind_of(c.RunSchedulingCycle())

RECOVERY: Final = "recover_cluster"
"""Commands that state facts, which no leader decides."""


class WindowRefused(Exception):
    """Window that does not exist; `remedy` names the available range."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


class Edge(NamedTuple):
    """Start or end of a window: a revision, or a time (µs since 1970)."""

    revision: int | None = None
    at_us: int | None = None

    def has_come(self, batch: Batch) -> bool:
        """Return whether a window with this start has started when this batch is settled."""
        if self.revision is not None:
            return batch.base >= self.revision
        return self.at_us is None or batch.at >= self.at_us

    def is_past(self, batch: Batch) -> bool:
        """Return whether a window with this end ended before this batch."""
        if self.revision is not None:
            return batch.base + len(batch.entries) > self.revision
        return self.at_us is not None and batch.at > self.at_us

    def __str__(self) -> str:
        if self.revision is not None:
            return f"revision {self.revision}"
        return "the beginning" if self.at_us is None else str(format_instant(Instant(self.at_us)))


class ItemKind(IntEnum):
    """Kind of an item of a moment."""

    PASS = 1
    """Scheduling cycle of the leader that had an effect."""
    REPORT = 2
    """Report of an agent."""
    EXTERNAL_JOB = 3
    """Next step reported by an external job's scheduler."""
    COMMAND = 4
    """Request independent of the world's other events."""
    FACT = 5
    """Entry whose command cannot be repeated; its events are settled as recorded."""


class RecordedItem(NamedTuple):
    """Command of a moment: its ledger entry, and the rebuilt command or None."""

    kind: ItemKind
    entry: Entry
    command: Command | None = None

    @property
    def job(self) -> int:
        """Return the ledger ID of its first job, 0 for none."""
        return next((job for event in self.entry.events if (job := job_of(event))), 0)


class Moment(NamedTuple):
    """Batch of the ledger; `entry`: its index."""

    entry: int
    at: Instant
    term: int
    items: Sequence[RecordedItem]

    @property
    def has_pass(self) -> bool:
        """Return whether it contains a scheduling cycle."""
        return any(item.kind is ItemKind.PASS for item in self.items)


class _Walk(ReplayFold):
    """Fold of the ledger that reports a window to a subclass, and ends after it."""

    def __init__(self, start: ReplayFold, first: Edge, last: Edge) -> None:
        super().__init__(start.state, start.last_index, start.ledger_digest, None, every_digest=False)
        self._first, self._last = first, last
        self._term = 0
        self.has_begun = False
        self._is_over = False
        self.end: tuple[int, bytes] = (start.last_index, start.ledger_digest)
        """Last entry of the window, and the ledger digest after it."""

    @property
    def has_arrived(self) -> bool:
        """Return whether the window has ended."""
        return self._is_over

    def take(self, entry: Any) -> None:
        """Process the next entry."""
        self._term = entry.term
        super().take(entry)
        if not self._is_over:
            self.end = self.last_index, self.ledger_digest

    def _settle(self, index: int, batch: Batch) -> None:
        if batch.base != self.state.revision:
            super()._settle(index, batch)
            return
        # No changes are possible before the cluster exists.
        if not self.has_begun and self.state.feature_level and self._first.has_come(batch):
            self.has_begun = True
            self.begins(index, batch)
        if self.has_begun and self._last.is_past(batch):
            self._is_over = True
        elif self.has_begun:
            self.saw(index, batch)
        else:
            super()._settle(index, batch)

    def begins(self, index: int, batch: Batch) -> None:
        """Start the window with this batch."""
        raise NotImplementedError

    def saw(self, index: int, batch: Batch) -> None:
        """Settle a batch of the window."""
        raise NotImplementedError


class WindowReading(_Walk):
    """First reading: service times, and the recorded figures."""

    def __init__(
        self, start: ReplayFold, first: Edge, last: Edge, observe: Callable[[State, int], WindowFigures]
    ) -> None:
        super().__init__(start, first, last)
        self.services = Services()
        self._observe = observe
        self.observed: WindowFigures | None = None
        self.start: ReplayFold = start
        """State before the window, from which the second reading and each replay start."""
        self.from_us = 0

    def begins(self, index: int, batch: Batch) -> None:
        """Record the state at the start of the window."""
        self.start = ReplayFold(self.state, self.last_index, self.ledger_digest, None, every_digest=False)
        at_us = self._first.at_us
        self.from_us = int(batch.at) if at_us is None else max(at_us, int(self.state.at))
        self.services.begins(self.state, self.from_us)
        self.observed = self._observe(self.state, self.from_us)

    def saw(self, index: int, batch: Batch) -> None:
        """Settle a batch, and record its effects."""
        before, observed = self.state, self.observed
        assert observed is not None  # `begins` was called before
        observed.sample(batch.at)
        super(_Walk, self)._settle(index, batch)
        self.services.saw(index, batch.at, batch.entries, before, self.state)
        events = [event for one in batch.entries if one.command not in LEFT_ALONE for event in one.events]
        observed.saw(batch.at, events, self.state)


class Repeating(_Walk):
    """Second reading: converts each batch to a moment with rebuilt commands."""

    def __init__(self, start: ReplayFold, first: Edge, last: Edge, show: Callable[[Moment], None]) -> None:
        super().__init__(start, first, last)
        self._show = show
        self.left_out = Counter[str]()
        """Kind -> number of commands with an effect that could not be rebuilt."""
        self.unproven = Counter[str]()
        """Kind -> number of commands rebuilt without the proof of a digest."""

    def begins(self, index: int, batch: Batch) -> None:
        """Do nothing: the state is already that of the window's start."""

    def saw(self, index: int, batch: Batch) -> None:
        """Settle a batch, and forward it."""
        growing = SpeculativeState(self.state, batch.at)
        items: list[RecordedItem] = []
        for entry in batch.entries:
            item = self._item(growing, entry)
            if item is not None:
                items.append(item)
            growing.add(entry)
        self.state = growing.state()
        self._show(Moment(index, batch.at, self._term, items))

    def _item(self, growing: SpeculativeState, entry: Entry) -> RecordedItem | None:
        if not entry.events or entry.command in LEFT_ALONE:
            return None
        if entry.command == PASS:
            return RecordedItem(ItemKind.PASS, entry)
        if entry.command == "report_operation":
            return RecordedItem(ItemKind.REPORT, entry)
        command = None if entry.command == RECOVERY else self._rebuild(growing, entry)
        if command is not None:
            return RecordedItem(
                ItemKind.EXTERNAL_JOB if is_external_job_step(entry) else ItemKind.COMMAND, entry, command
            )
        if all(job_of(event) is None for event in entry.events):
            return RecordedItem(ItemKind.FACT, entry)
        self.left_out[entry.command] += 1
        return None

    def _rebuild(self, growing: SpeculativeState, entry: Entry) -> Command | None:
        kind = c.KINDS.get(entry.command)
        candidates = None if kind is None else REBUILDERS[kind].candidates
        if kind is None or candidates is None:
            return None
        led = Led(growing.state() if kind in WALKING else growing.facts, entry.actor, entry.events)
        likely: list[Command] = []
        try:
            for command in islice(candidates(led), PROVEN_MAX):
                if command_digest(Request(entry.id, entry.actor, command)) == entry.digest:
                    return command
                if len(likely) < TRIED_MAX:
                    likely.append(command)
        except LookupError:
            return None
        self.unproven[entry.command] += 1
        return next((command for command in likely if _leads_to(growing, entry, command)), None)


def _leads_to(growing: SpeculativeState, entry: Entry, command: Command) -> bool:
    """Return whether a command on the state before an entry yields the entry's events."""
    facts = growing.facts if is_by_key(command) else growing.state()
    decision = decide(facts, Request(entry.id, entry.actor, command), growing.at)
    return isinstance(decision, Acceptance) and decision.events == entry.events


def read_services(
    ledger: Ledger,
    snapshots: Sequence[tuple[int, Path]],
    first: Edge,
    last: Edge,
    observe: Callable[[State, int], WindowFigures],
    progress: Progress | None = None,
) -> WindowReading:
    """Return the first reading of a window.

    Starts from the newest of `snapshots` (entry, file) before the window, otherwise from the first entry.
    Exceptions of `replay` also propagate.

    Raises:
        WindowRefused: The window does not exist.
        ReplayRefused: The window is not held here.
    """
    _check(ledger, first, last)
    reading = WindowReading(_start(ledger, snapshots, first), first, last, observe)
    fold(ledger, reading, ledger.applied_index, progress)
    if not reading.has_begun or reading.observed is None:
        raise WindowRefused(f"nothing was settled from {first} on", _available_range(ledger))
    if reading.last_index == reading.start.last_index or reading.end[0] == reading.start.last_index:
        raise WindowRefused(f"nothing was settled between {first} and {last}", _available_range(ledger))
    return reading


def repeat(
    ledger: Ledger,
    reading: WindowReading,
    first: Edge,
    last: Edge,
    show: Callable[[Moment], None],
    progress: Progress | None = None,
) -> Repeating:
    """Forward the moments of a window in order, and return the second reading."""
    repeating = Repeating(reading.start, first, last, show)
    fold(ledger, repeating, reading.end[0], progress)
    return repeating


def _check(ledger: Ledger, first: Edge, last: Edge) -> None:
    if first.revision is not None and first.revision >= ledger.applied_revision:
        raise WindowRefused(f"nothing was settled after revision {first.revision}", _available_range(ledger))
    if last.revision is not None and last.revision > ledger.applied_revision:
        raise WindowRefused(f"revision {last.revision} is not settled", _available_range(ledger))
    pairs = ((first.revision, last.revision), (first.at_us, last.at_us))
    if any(begin is not None and end is not None and begin >= end for begin, end in pairs):
        raise WindowRefused(f"the window ends at {last}, but begins at {first}", "choose an end after the beginning")


def _available_range(ledger: Ledger) -> str:
    at = _instants(ledger)
    return f"the ledger ends with revision {ledger.applied_revision}" + (f", of {format_instant(at[-1])}" if at else "")


def _instants(ledger: Ledger) -> list[Instant]:
    """Return the clocks of the last held batches, the latest last."""
    held = ledger.read(max(1, ledger.applied_index - _LAST_ENTRIES), limit=_LAST_ENTRIES + 1)
    return sorted(instant for entry in held if (instant := instant_of(entry.data)))


def end_of(ledger: Ledger, last: Edge) -> int:
    """Return the end of a window, µs since 1970.

    Raises:
        WindowRefused: The end is not settled yet, or not held here.
    """
    if last.at_us is not None:
        return last.at_us
    if last.revision is None or last.revision >= ledger.applied_revision:
        if not (at := _instants(ledger)):
            raise WindowRefused(
                "the last entries of the ledger contain no commands",
                "`forebay audit verify` lists the entries held here",
            )
        return at[-1]
    try:
        index = ledger.index_of_revision(Revision(max(1, last.revision)))
    except LookupError as error:
        raise WindowRefused(f"revision {last.revision} is not held here", _available_range(ledger)) from error
    entry = next(iter(ledger.read(index, limit=1)))
    return int(instant_of(entry.data) or 0)


def _start(ledger: Ledger, snapshots: Sequence[tuple[int, Path]], first: Edge) -> ReplayFold:
    for index, path in reversed(snapshots):
        try:
            if index > ledger.applied_index:
                continue
            summary = inspect_snapshot(path)
            if first.revision is not None and summary.revision > first.revision:
                continue
            if first.revision is None and (first.at_us is None or summary.at >= first.at_us):
                continue
            return from_image(ledger, load_snapshot(path))
        except SnapshotRefused:
            continue  # deleted by the replica meanwhile, or damaged: `audit verify --deep` reports that
    return from_nothing()
