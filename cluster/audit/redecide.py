"""Deciding a ledger again, with this release or another one, on the original states.

Each command is rebuilt from its events (`rebuild`) and decided on the state before it, at the clock of its batch;
scheduling cycles are run again. The outcome is compared with the ledger's.
"""

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from forebay.cluster.audit.deciding import CommandOutcome, Deciding, ask_by_position, recorded_outcome
from forebay.cluster.audit.rebuild import REBUILDERS, rebuilt
from forebay.cluster.audit.release import Release
from forebay.cluster.audit.release_fold import tables_that_differ
from forebay.cluster.audit.replay import ReplayFold
from forebay.replica.fold import SpeculativeState
from forebay.replica.messages import Batch, Event, Request, job_of
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.state import State, table_digests
from forebay.replica.values import Instant
from forebay.wal import encode_batch

ASKED_BATCHES: Final = 256
ASKED_BYTES: Final = 8 << 20
"""Limits of one portion for the other release, count and bytes; it decides one portion while the next is prepared."""

DIFFERENCES_KEPT: Final = 1_000
"""Number of differences kept with their events; further differences are only counted."""


DECIDED_HERE_MAX: Final = 20
"""Number of the other release's differences that this release decides too; each may cost a scheduling cycle."""


class Deviation(enum.StrEnum):
    """Kind of difference from the decision in the ledger."""

    WORDS = "words only"
    """Both reject with the same code and different text."""
    ORDER = "order only"
    """Same events in another order."""
    REASON = "reason only"
    """Same events except for their explanatory texts."""
    ALLOCATION = "other allocation"
    """A different job, node or mover gets space or starts, or the time differs."""
    EVENTS = "other events"
    REFUSAL = "other rejection"
    """Only one decision is a rejection, or the codes of the rejections differ."""

    @property
    def is_grave(self) -> bool:
        """Return whether the effect differs, not only the text."""
        return self in (Deviation.ALLOCATION, Deviation.EVENTS, Deviation.REFUSAL)


_TEXTS: Final = ("reason", "comment", "message")
"""Fields of events that are only displayed; no decision depends on them."""

_ALLOCATES: Final = (
    e.BufferAllocated, e.AllocationRevoked, e.PersistentReserved, e.RunOrdered, e.ExternalJobSpaceAllocated,
    e.MoverChanged, e.ExternalJobStageInOrdered,
)  # fmt: skip


def deviation(before: CommandOutcome, after: CommandOutcome) -> Deviation | None:
    """Return the difference between two outcomes of a command; None if they are equal."""
    if before == after:
        return None
    if before.fault or after.fault or (before.rejection is None) != (after.rejection is None):
        return Deviation.REFUSAL
    if before.rejection is not None and after.rejection is not None:
        return Deviation.WORDS if before.rejection.code == after.rejection.code else Deviation.REFUSAL
    if Counter(map(_plain, before.events)) == Counter(map(_plain, after.events)):
        return Deviation.ORDER
    silent = [tuple(map(_without_texts, outcome.events)) for outcome in (before, after)]
    if silent[0] == silent[1]:
        return Deviation.REASON
    changed = [tuple(one for one in outcome.events if isinstance(one, _ALLOCATES)) for outcome in (before, after)]
    return Deviation.EVENTS if changed[0] == changed[1] else Deviation.ALLOCATION


def _plain(event: Event) -> bytes:
    return msgspec.msgpack.encode(event)


def _without_texts(event: Event) -> Event:
    texts = {field: "" for field in _TEXTS if hasattr(event, field)}
    return msgspec.structs.replace(event, **texts) if texts else event


class CommandCounts(msgspec.Struct):
    """Counts of the results for commands of a kind."""

    same: int = 0
    different: int = 0
    not_rebuilt: int = 0
    """Commands with an effect that could not be rebuilt."""
    no_trace: int = 0
    """Commands that were rejected or changed nothing, so that no event describes them."""


class DecisionDifference(msgspec.Struct, frozen=True):
    """Decision that differs from the ledger.

    `here` tells whether this release decides as the ledger did; it is set only for the first differences of another
    release.
    """

    index: int
    revision: int
    at: Instant
    job: int | None
    command: str
    actor: str
    deviation: Deviation
    ledger: CommandOutcome
    decided: CommandOutcome
    here: bool | None = None


class RedecidingReplay(ReplayFold):
    """Replay that decides commands again from a given batch on."""

    def __init__(self, start: ReplayFold, is_due: Callable[[Batch], bool], release: Release | None = None) -> None:
        """Continue `start`; decisions are compared from the first batch for which `is_due` holds."""
        super().__init__(start.state, start.last_index, start.ledger_digest, None, every_digest=False)
        self.tallies: defaultdict[str, CommandCounts] = defaultdict(CommandCounts)
        self.by_deviation: Counter[Deviation] = Counter()
        self.differences: list[DecisionDifference] = []
        self.first_revision = 0
        """First compared revision, 0 for none."""
        self._is_due, self._release = is_due, release
        self._deciding: Deciding | None = None
        self._waiting: list[_Asked] = []
        self._waiting_bytes = 0
        self._under_way: list[_Asked] = []
        """Batches that the other release is deciding."""

    @property
    def total(self) -> CommandCounts:
        """Return the counts for all commands."""
        rows = [msgspec.structs.astuple(tally) for tally in self.tallies.values()]
        return CommandCounts(*map(sum, zip(*rows, strict=True)))

    @property
    def rebuilt_share(self) -> float:
        """Return the share of the commands with an effect that could be rebuilt, from 0 to 1."""
        total = self.total
        rebuilt = total.same + total.different
        return rebuilt / (rebuilt + total.not_rebuilt) if rebuilt + total.not_rebuilt else 1.0

    @property
    def grave(self) -> DecisionDifference | None:
        """Return the first difference with a different effect."""
        return next((one for one in self.differences if one.deviation.is_grave), None)

    def _settle(self, index: int, batch: Batch) -> None:
        if self._deciding is None:
            if batch.base != self.state.revision or not self._is_due(batch):
                super()._settle(index, batch)
                return
            self._deciding = Deciding(self.state)
            self.first_revision = batch.base + 1
            if self._release is not None:
                self._release.begin(self.state)
        if batch.base != self.state.revision:
            super()._settle(index, batch)  # it is void
            return
        self.batches += 1
        before = self.state
        self._decide(self._deciding, batch)
        self.state = self._deciding.state
        self.digests.observe(index, before, batch, self.state)

    def _decide(self, deciding: Deciding, batch: Batch) -> None:
        before, requests = self.state, list[Request | None]()

        def ask(growing: SpeculativeState, place: int) -> Request | None:
            entry = batch.entries[place]
            command = rebuilt(growing, entry)
            requests.append(None if command is None else Request(entry.id, entry.actor, command))
            return requests[-1] if self._release is None else None

        outcomes = deciding.settle(batch, ask)
        data = b"" if self._release is None else encode_batch(batch)
        asked = _Asked(self.last_index + 1, before, batch, requests, data)
        if self._release is None:
            self._compare(asked, outcomes)
            return
        self._waiting.append(asked)
        self._waiting_bytes += len(asked.data)
        if len(self._waiting) >= ASKED_BATCHES or self._waiting_bytes >= ASKED_BYTES:
            self._ask()

    def _ask(self) -> None:
        """Send waiting batches to the other release, once it has finished the pending ones."""
        assert self._release is not None
        if self._under_way:
            for asked, outcomes in zip(self._under_way, self._release.outcomes(), strict=True):
                self._compare(asked, outcomes)
        self._under_way, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if self._under_way:
            self._release.send((asked.data, asked.requests) for asked in self._under_way)

    def finish(self) -> tuple[str, ...]:
        """Compare the other release's remaining outcomes; return the tables in which its state differs."""
        if self._release is None or self._deciding is None:
            return ()
        while self._waiting or self._under_way:
            self._ask()
        return tables_that_differ(table_digests(self.state), self._release.digests())

    def _compare(self, asked: "_Asked", outcomes: Sequence[CommandOutcome | None]) -> None:
        for place, (entry, outcome) in enumerate(zip(asked.batch.entries, outcomes, strict=True)):
            tally, ledger = self.tallies[entry.command], recorded_outcome(entry)
            if outcome is None:
                if entry.events:
                    tally.not_rebuilt += 1
                else:
                    tally.no_trace += 1
                continue
            found = deviation(ledger, outcome)
            if found is None:
                tally.same += 1
                continue
            tally.different += 1
            self.by_deviation[found] += 1
            if len(self.differences) >= DIFFERENCES_KEPT and (not found.is_grave or self.grave is not None):
                continue
            job = next((job for event in (*ledger.events, *outcome.events) if (job := job_of(event))), None)
            self.differences.append(
                DecisionDifference(
                    asked.index, asked.batch.base + place + 1, asked.batch.at, job, entry.command, str(entry.actor),
                    found, ledger, outcome, self._here(asked, place, ledger),
                )
            )  # fmt: skip

    def _here(self, asked: "_Asked", place: int, ledger: CommandOutcome) -> bool | None:
        """Return whether this release decides as the ledger did.

        The result is None without another release, and after the first differences.
        """
        if self._release is None or len(self.differences) >= DECIDED_HERE_MAX:
            return None
        requests = [request if at == place else None for at, request in enumerate(asked.requests)]
        return Deciding(asked.before).settle(asked.batch, ask_by_position(requests))[place] == ledger


class _Asked(msgspec.Struct, frozen=True):
    """Batch of the ledger at `index`, the state before it, and its rebuilt commands."""

    index: int
    before: State
    batch: Batch
    requests: list[Request | None]
    data: bytes
    """Encoded batch for another release; empty without one."""


def lacking(kinds: Iterable[str]) -> dict[str, str]:
    """Return, for kinds with commands that could not be rebuilt, the data that the ledger lacks."""
    return {kind: REBUILDERS[c.KINDS[kind]].lacks or UNPROVEN for kind in kinds if kind in c.KINDS}


UNPROVEN: Final = "a digest that proves it"
"""Missing data named for commands whose events contain all fields: no candidate has the recorded digest."""
