"""The window as the ledger has it, read twice: for service times and figures first, then moment by moment for replays.

What comes from outside is made again from its events, as `redecide` does it (`cluster.audit.rebuild`). A command is
believed where its digest is the recorded one, else where deciding it on the recorded state comes to the recorded
events. What cannot be made again and is about no job is taken as it was settled; the rest is left out and counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from enum import IntEnum
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from cluster.audit.rebuild import REBUILDERS, WALKING, Led
from cluster.audit.replay import Progress, ReplayFold, fold, from_image, from_nothing
from cluster.audit.whatif.observed import WindowFigures
from cluster.audit.whatif.services import Services, is_external_job_step
from cluster.system import format_instant
from replica.decide import decide, is_by_key
from replica.fold import SpeculativeState
from replica.messages import Accepted, Batch, Command, Entry, Request, command_digest, job_of
from replica.messages import commands as c
from replica.state import State
from replica.values import Instant, Revision
from snapshots import SnapshotRefused, load_snapshot
from snapshots import inspect as inspect_snapshot
from wal import Ledger, instant_of

PROVEN_MAX: Final = 256
"""Candidates of a command that are held against its digest, count: 3 ms."""

TRIED_MAX: Final = 8
"""Candidates that are decided where none has the digest, count: half a millisecond."""

_LAST_ENTRIES: Final = 1_024
"""Entries at the end of a ledger among which one is looked for that says what time it was, count."""

LEFT_ALONE: Final = frozenset(
    c.kind_of(command)
    for command in (
        *(c.OpenSession(), c.CloseSession(0), c.ExpireAnswers()),
        *(c.RecordStateDigest(0, b""), c.RecordHistories(0, 0, b"")),
        *(c.StartDrill("", "", 0), c.AbortDrill(0, ""), c.ProbeDrill(0), c.LockDrills(""), c.UnlockDrills("")),
        c.ConfirmDrill(0),
        *(c.MissExternalJob("", "", ""), c.RevokeCertificate("", ""), c.UnrevokeCertificate("")),
    )
) | {"end_drill"}
"""Kinds of commands by which nothing is scheduled otherwise: answers that are kept, digests, drills, certificates."""

PASS: Final = c.kind_of(c.RunSchedulingPass())

RECOVERY: Final = "recover_cluster"
"""Nobody led when it was decided, and nobody would decide it otherwise: a fact."""


class WindowRefused(Exception):
    """There is no such window; `remedy` says what there is."""

    def __init__(self, sentence: str, remedy: str) -> None:
        super().__init__(sentence)
        self.remedy = remedy


class Edge(NamedTuple):
    """Where a window begins or ends: at a revision, or at a time (µs since 1970)."""

    revision: int | None = None
    at_us: int | None = None

    def has_come(self, batch: Batch) -> bool:
        """Whether a window that begins here has begun with this batch."""
        if self.revision is not None:
            return batch.base >= self.revision
        return self.at_us is None or batch.at >= self.at_us

    def is_past(self, batch: Batch) -> bool:
        """Whether a window that ends here was over before this batch."""
        if self.revision is not None:
            return batch.base + len(batch.entries) > self.revision
        return self.at_us is not None and batch.at > self.at_us

    def __str__(self) -> str:
        if self.revision is not None:
            return f"revision {self.revision}"
        return "the beginning" if self.at_us is None else str(format_instant(Instant(self.at_us)))


class ItemKind(IntEnum):
    """What an item of a moment is."""

    PASS = 1
    """The leader ran a pass of the scheduler that found something."""
    REPORT = 2
    """An agent reported."""
    EXTERNAL_JOB = 3
    """An external job's scheduler said the next thing."""
    COMMAND = 4
    """Somebody asked for something, whatever else was going on."""
    FACT = 5
    """Something was settled that cannot be asked for again: its events are taken as they are."""


class RecordedItem(NamedTuple):
    """One command of a moment: what the ledger has of it, and the command as far as it could be made again."""

    kind: ItemKind
    entry: Entry
    command: Command | None = None

    @property
    def job(self) -> int:
        """The first job that it was about, by its number in the ledger; 0 for none."""
        return next((job for event in self.entry.events if (job := job_of(event))), 0)


class Moment(NamedTuple):
    """One batch of the ledger; `entry`: its index."""

    entry: int
    at: Instant
    term: int
    items: Sequence[RecordedItem]

    @property
    def has_pass(self) -> bool:
        """Whether a pass of the scheduler is in it."""
        return any(item.kind is ItemKind.PASS for item in self.items)


class _Walk(ReplayFold):
    """A fold of the ledger that shows a window to whoever derives from it, and ends behind it."""

    def __init__(self, start: ReplayFold, first: Edge, last: Edge) -> None:
        super().__init__(start.state, start.last_index, start.ledger_digest, None, every_digest=False)
        self._first, self._last = first, last
        self._term = 0
        self.has_begun = False
        self._is_over = False
        self.end: tuple[int, bytes] = (start.last_index, start.ledger_digest)
        """The last entry of the window, and the digest of the ledger after it."""

    @property
    def arrived(self) -> bool:
        """Whether the window lies behind."""
        return self._is_over

    def take(self, entry: Any) -> None:
        """Take the next entry."""
        self._term = entry.term
        super().take(entry)
        if not self._is_over:
            self.end = self.last_index, self.ledger_digest

    def _settle(self, index: int, batch: Batch) -> None:
        if batch.base != self.state.revision:
            super()._settle(index, batch)
            return
        # Nothing can be changed before there is a cluster.
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
        """Take note that the window begins, with this batch."""
        raise NotImplementedError

    def saw(self, index: int, batch: Batch) -> None:
        """Settle a batch of the window."""
        raise NotImplementedError


class WindowReading(_Walk):
    """The first reading: service times, and the figures of what was."""

    def __init__(
        self, start: ReplayFold, first: Edge, last: Edge, observe: Callable[[State, int], WindowFigures]
    ) -> None:
        super().__init__(start, first, last)
        self.services = Services()
        self._observe = observe
        self.observed: WindowFigures | None = None
        self.start: ReplayFold = start
        """Where the window begins: the second reading and each replay begin there, too."""
        self.from_us = 0

    def begins(self, index: int, batch: Batch) -> None:
        """Take note of the state in which the window begins."""
        self.start = ReplayFold(self.state, self.last_index, self.ledger_digest, None, every_digest=False)
        at_us = self._first.at_us
        self.from_us = int(batch.at) if at_us is None else max(at_us, int(self.state.at))
        self.services.begins(self.state, self.from_us)
        self.observed = self._observe(self.state, self.from_us)

    def saw(self, index: int, batch: Batch) -> None:
        """Settle a batch, and take note of what it did."""
        before, observed = self.state, self.observed
        assert observed is not None  # `begins` has come before
        observed.sample(batch.at)
        super(_Walk, self)._settle(index, batch)
        self.services.saw(index, batch.at, batch.entries, before, self.state)
        events = [event for one in batch.entries if one.command not in LEFT_ALONE for event in one.events]
        observed.saw(batch.at, events, self.state)


class Repeating(_Walk):
    """The second reading: each batch as a moment, with the commands in it made again."""

    def __init__(self, start: ReplayFold, first: Edge, last: Edge, show: Callable[[Moment], None]) -> None:
        super().__init__(start, first, last)
        self._show = show
        self.left_out = Counter[str]()
        """What led to something and could not be made again, by kind of command."""
        self.unproven = Counter[str]()
        """What was made again without its digest, by kind of command."""

    def begins(self, index: int, batch: Batch) -> None:
        """The state is where the window begins."""

    def saw(self, index: int, batch: Batch) -> None:
        """Settle a batch, and show it."""
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
        command = None if entry.command == RECOVERY else self._made_again(growing, entry)
        if command is not None:
            return RecordedItem(
                ItemKind.EXTERNAL_JOB if is_external_job_step(entry) else ItemKind.COMMAND, entry, command
            )
        if all(job_of(event) is None for event in entry.events):
            return RecordedItem(ItemKind.FACT, entry)
        self.left_out[entry.command] += 1
        return None

    def _made_again(self, growing: SpeculativeState, entry: Entry) -> Command | None:
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
    """Whether a command leads to what an entry has, on the state before it."""
    facts = growing.facts if is_by_key(command) else growing.state()
    decision = decide(facts, Request(entry.id, entry.actor, command), growing.at)
    return isinstance(decision, Accepted) and decision.events == entry.events


def read_services(
    ledger: Ledger,
    snapshots: Sequence[tuple[int, Path]],
    first: Edge,
    last: Edge,
    observe: Callable[[State, int], WindowFigures],
    progress: Progress | None = None,
) -> WindowReading:
    """Return a window as it was read for the first time.

    Begins with the newest of `snapshots` (entry, file) that is older than the window, else with nothing. WindowRefused
    for a window that there is not, ReplayRefused where it is not held here; the other errors of `replay`.
    """
    _check(ledger, first, last)
    reading = WindowReading(_start(ledger, snapshots, first), first, last, observe)
    fold(ledger, reading, ledger.applied_index, progress)
    if not reading.has_begun or reading.observed is None:
        raise WindowRefused(f"nothing was settled from {first} on", _what_there_is(ledger))
    if reading.last_index == reading.start.last_index or reading.end[0] == reading.start.last_index:
        raise WindowRefused(f"nothing was settled between {first} and {last}", _what_there_is(ledger))
    return reading


def repeat(
    ledger: Ledger,
    reading: WindowReading,
    first: Edge,
    last: Edge,
    show: Callable[[Moment], None],
    progress: Progress | None = None,
) -> Repeating:
    """Show the moments of a window that was read, one after the other, and return what could not be shown of it."""
    repeating = Repeating(reading.start, first, last, show)
    fold(ledger, repeating, reading.end[0], progress)
    return repeating


def _check(ledger: Ledger, first: Edge, last: Edge) -> None:
    if first.revision is not None and first.revision >= ledger.applied_revision:
        raise WindowRefused(f"nothing was settled after revision {first.revision}", _what_there_is(ledger))
    if last.revision is not None and last.revision > ledger.applied_revision:
        raise WindowRefused(f"revision {last.revision} is not settled", _what_there_is(ledger))
    pairs = ((first.revision, last.revision), (first.at_us, last.at_us))
    if any(begin is not None and end is not None and begin >= end for begin, end in pairs):
        raise WindowRefused(f"the window ends at {last}, and begins at {first}", "let it end after its beginning")


def _what_there_is(ledger: Ledger) -> str:
    at = _instants(ledger)
    return f"the ledger ends with revision {ledger.applied_revision}" + (f", of {format_instant(at[-1])}" if at else "")


def _instants(ledger: Ledger) -> list[Instant]:
    """Return the clocks of the last batches that are held, the latest last."""
    held = ledger.read(max(1, ledger.applied_index - _LAST_ENTRIES), limit=_LAST_ENTRIES + 1)
    return sorted(instant for entry in held if (instant := instant_of(entry.data)))


def end_of(ledger: Ledger, last: Edge) -> int:
    """Return when a window ends, µs since 1970; WindowRefused where that is not settled."""
    if last.at_us is not None:
        return last.at_us
    if last.revision is None or last.revision >= ledger.applied_revision:
        if not (at := _instants(ledger)):
            raise WindowRefused("the ledger has no commands at its end", "`forebay audit verify` says what is held")
        return at[-1]
    try:
        index = ledger.index_of_revision(Revision(max(1, last.revision)))
    except LookupError as error:
        raise WindowRefused(f"revision {last.revision} is not held here", _what_there_is(ledger)) from error
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
            continue  # forgotten by the replica meanwhile, or damaged: `audit verify --deep` says so
    return from_nothing()
