"""Observed fold of a ledger window: computes all figures of a report in one pass over the entries."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec

from forebay.cluster.api.render import job_words
from forebay.cluster.audit.replay import Progress, ReplayFold, ReplayRefused, fold, from_image, from_nothing
from forebay.cluster.audit.report.figures import (
    COLUMNS,
    NO_WAIT,
    UNFINISHED,
    JobBars,
    PendingJobs,
    PoolUsage,
    ReasonFigures,
    ReportSource,
    StateBar,
    Term,
    TransferFigures,
    WindowReport,
    WindowTotals,
)
from forebay.replica.messages import Batch, TransferRecorded, jobs_of
from forebay.replica.messages import events as e
from forebay.replica.model import JobState, Stage
from forebay.replica.scheduler import SchedulingIndex, verdicts_of
from forebay.replica.state import State, state_digest
from forebay.replica.values import NEVER, Instant
from forebay.replica.views import buffer_word
from forebay.snapshots import SnapshotRefused, load_snapshot
from forebay.snapshots import inspect as inspect_snapshot
from forebay.wal import EntryKind, Ledger, LedgerEntry, decode_batch, kind_of

JOBS_SHOWN_MAX: Final = 200
"""Number of jobs drawn by default: those that waited longest."""

BARS_MAX: Final = 300
"""Maximum number of listed bars of one job; a job that is retried for ever has more."""

TRANSFERS_MAX: Final = 500
"""Number of listed transfers: those with the most bytes."""

TERMS_MAX: Final = 500
"""Number of listed terms: the last ones."""

NODES_MAX: Final = 10_000
"""Maximum number of nodes with recorded rates."""

_LAST_ENTRIES: Final = 1_024
"""Number of entries at the end of a ledger that are searched for the last batch, whose time is the ledger's end."""


Item = TypeVar("Item")
Seen = TypeVar("Seen", bound="WindowReplay")


class Window(NamedTuple):
    """Start and end, both inclusive; the cluster's clock, microseconds since 1970."""

    from_us: int
    to_us: int

    def column(self, at_us: int) -> int:
        """Return the column of a time, the nearest one if it lies outside."""
        column = (at_us - self.from_us) * COLUMNS // max(1, self.to_us - self.from_us)
        return min(max(column, 0), COLUMNS - 1)


def read_window(
    ledger: Ledger,
    snapshots: Sequence[tuple[int, Path]],
    *,
    from_us: int | None,
    to_us: int | None,
    jobs: Iterable[int] = (),
    progress: Progress | None = None,
) -> WindowReport:
    """Return the figures of a window; its start and end default to those of the ledger.

    Starts from the newest of `snapshots` (entry, file) before the window, otherwise from the first entry.
    Exceptions of `replay` also propagate.

    Raises:
        ReplayRefused: The ledger has no entries in the window, or lacks some.
    """
    chosen = frozenset(jobs)
    walk = watch(
        ledger,
        snapshots,
        lambda start, window: _Walk(start, window, chosen),
        from_us=from_us,
        to_us=to_us,
        progress=progress,
    )
    return walk.report(ledger.cluster_id)


def watch(
    ledger: Ledger,
    snapshots: Sequence[tuple[int, Path]],
    begin: Callable[[ReplayFold, Window], Seen],
    *,
    from_us: int | None,
    to_us: int | None,
    progress: Progress | None = None,
) -> Seen:
    """Fold a window of the ledger into the observer that `begin` creates, and return the observer."""
    ledger = ledger.as_of_now()
    window = Window(*_bounds(ledger, from_us, to_us))
    watched = begin(_start(ledger, snapshots, window), window)
    fold(ledger, watched, ledger.applied_index, progress)
    return watched


def _bounds(ledger: Ledger, from_us: int | None, to_us: int | None) -> tuple[int, int]:
    last = ledger.applied_index
    found = [at for entry in ledger.read(max(1, last - _LAST_ENTRIES), limit=_LAST_ENTRIES + 1) if (at := _time(entry))]
    if not found:
        raise ReplayRefused("the last entries of the ledger contain no commands, so there is nothing to show")
    if from_us is None:
        first = (at for entry in ledger.read(ledger.first_index, limit=last) if (at := _time(entry)))
        from_us = next(first)
    # The last time may not be the greatest, because an operator may have set the clock back.
    to_us = max(found) if to_us is None else min(to_us, max(found))
    if from_us > to_us:
        raise ReplayRefused("the window begins after the end of the ledger")
    return from_us, to_us


def _time(entry: LedgerEntry) -> Instant:
    return decode_batch(entry.data).at if kind_of(entry.data) is EntryKind.BATCH else NEVER


def _start(ledger: Ledger, snapshots: Sequence[tuple[int, Path]], window: Window) -> ReplayFold:
    for index, path in reversed(snapshots):
        try:
            if index > ledger.applied_index or inspect_snapshot(path).at >= window.from_us:
                continue
            return from_image(ledger, load_snapshot(path))
        except SnapshotRefused:
            continue  # deleted by the replica meanwhile, or damaged: `audit verify --deep` reports that
    return from_nothing()


class _JobTrack:
    """Observed job."""

    def __init__(self, called: str, name: str, user: str, pool: str, size_bytes: int) -> None:
        self.called, self.name, self.user, self.pool, self.size_bytes = called, name, user, pool, size_bytes
        self.bars: list[StateBar] = []
        self.left_out = 0
        self.waited_us = 0
        self.is_now: tuple[str, str | None, int] | None = None
        self.since_us = 0
        self.reasons: dict[str, None] = {}

    def becomes(self, now: tuple[str, str | None, int] | None, at_us: int) -> None:
        """Record the job's new state, buffer state and attempt; None means that it has finished."""
        if now == self.is_now:
            return
        if self.is_now is not None:
            self._close(self.is_now, at_us)
        self.is_now, self.since_us, self.reasons = now, at_us, {}

    def _close(self, was: tuple[str, str | None, int], at_us: int | None, end_us: int = 0) -> None:
        if was[0] == "PENDING":
            self.waited_us += (end_us if at_us is None else at_us) - self.since_us
        if len(self.bars) == BARS_MAX:
            self.left_out += 1
            return
        state, buffer, attempt = was
        self.bars.append(StateBar(state, buffer, self.since_us, at_us, attempt, tuple(self.reasons)))

    def ended(self, job: int, result: str, end_us: int) -> JobBars:
        """Return the job's bars; the bar at the end of the window stays open."""
        if self.is_now is not None:
            self._close(self.is_now, None, end_us)
            self.is_now = None
        bars, waited = tuple(self.bars), self.waited_us
        return JobBars(
            job, self.name, self.user, self.pool, self.size_bytes, result, waited, bars, self.left_out, self.called
        )


def _by_job(seen: Iterable[JobBars]) -> tuple[JobBars, ...]:
    """Return jobs ordered by their start; a finished job that was requeued occurs twice."""
    found: dict[int, JobBars] = {}
    for one in sorted(seen, key=lambda one: (one.bars[0].from_us, one.job)):
        first = found.get(one.job)
        found[one.job] = (
            one
            if first is None
            else msgspec.structs.replace(
                one,
                bars=first.bars + one.bars,
                waited_us=first.waited_us + one.waited_us,
                left_out=first.left_out + one.left_out,
            )
        )
    return tuple(found.values())


class _Most(Generic[Item]):
    """The largest of many items, up to a fixed number."""

    def __init__(self, most: int) -> None:
        self._most, self._kept, self.left_out = most, list[tuple[tuple[int, ...], Item]](), 0

    def add(self, key: tuple[int, ...], item: Item) -> None:
        """Add an item; keys are unique."""
        if len(self._kept) < self._most:
            heapq.heappush(self._kept, (key, item))
            return
        heapq.heappushpop(self._kept, (key, item))
        self.left_out += 1

    def items(self) -> list[Item]:
        """Return the items, the largest first."""
        return [item for _, item in sorted(self._kept, key=lambda kept: kept[0], reverse=True)]


class _JobTotals:
    """Headline figures of the jobs in a window; a job counts once even if it finished and was requeued."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, int, tuple[int, str]]] = {}
        self.moved_bytes: Counter[Stage] = Counter()
        self.interruptions = 0

    def add(self, job: JobBars) -> None:
        """Add a job, or the next part of its life."""
        _, waited_us, longest = self._seen.get(job.job, ("", 0, (-1, NO_WAIT)))
        longest = max(longest, job.longest_wait, key=lambda wait: wait[0])
        self._seen[job.job] = (job.result or UNFINISHED, waited_us + job.waited_us, longest)

    def totals(self, failovers: int) -> WindowTotals:
        """Return the figures."""
        waits = sorted(waited_us for _, waited_us, _ in self._seen.values())
        outcomes = Counter(outcome for outcome, _, _ in self._seen.values())
        reasons: dict[str, ReasonFigures] = {}
        for _, waited_us, (_, reason) in self._seen.values():
            before = reasons.get(reason, ReasonFigures(0, 0))
            reasons[reason] = ReasonFigures(before.jobs + 1, before.waited_us + waited_us)
        return WindowTotals(
            outcomes=dict(sorted(outcomes.items())),
            wait_p50_us=_quantile(waits, 50),
            wait_p95_us=_quantile(waits, 95),
            staged_in_bytes=self.moved_bytes[Stage.STAGE_IN],
            staged_out_bytes=self.moved_bytes[Stage.STAGE_OUT],
            failovers=failovers,
            interruptions=self.interruptions,
            reasons=dict(sorted(reasons.items())),
        )


def _quantile(values: Sequence[int], percent: int) -> int:
    """Return the smallest of the sorted values that `percent` of them do not exceed; 0 for none."""
    return values[max(0, -(-len(values) * percent // 100) - 1)] if values else 0


class PoolColumns:
    """Steps of a pool, reduced to the first, last, smallest and greatest of each column."""

    def __init__(self, unit: str) -> None:
        self.unit = unit
        self._columns: dict[int, list[tuple[int, int, int, int]]] = {}
        self._last: tuple[int, int, int] | None = None

    def add(self, column: int, at_us: int, values: tuple[int, int, int]) -> None:
        """Record the pool's values from now on."""
        if values == self._last:
            return
        self._last = values
        step = (at_us, *values)
        kept = self._columns.setdefault(column, [])
        if len(kept) < 4:
            kept.append(step)
            return
        first, middle = kept[0], [*kept[1:], step]
        extremes = (min(middle, key=_held), max(middle, key=_held), step)
        kept[:] = [first, *(one for one in middle if any(one is extreme for extreme in extremes))]

    def steps(self) -> tuple[tuple[int, int, int, int], ...]:
        """Return the steps in order."""
        return tuple(step for column in sorted(self._columns) for step in self._columns[column])


def _held(step: tuple[int, int, int, int]) -> int:
    return step[1]


class WindowReplay(ReplayFold):
    """Replay that reports the changes in a window to a subclass, and ends after the window."""

    def __init__(self, start: ReplayFold, window: Window) -> None:
        super().__init__(start.state, start.last_index, start.ledger_digest, None, every_digest=False)
        self._window = window
        self._now_us = 0
        self._has_begun = False
        self._end: tuple[State, int, bytes] | None = None

    @property
    def has_arrived(self) -> bool:
        """Return whether the window has ended."""
        return self._end is not None

    @property
    def end(self) -> tuple[State, int, bytes]:
        """Return the state at the end of the window, its last entry, and the ledger digest after that."""
        return self._end or (self.state, self.last_index, self.ledger_digest)

    def take(self, entry: LedgerEntry) -> None:
        """Fold the next entry, and report its changes."""
        batch = decode_batch(entry.data) if kind_of(entry.data) is EntryKind.BATCH else None
        before = self.state, self.last_index, self.ledger_digest
        if batch is not None and batch.at > self._window.to_us:
            self._end = before
        super().take(entry)
        if batch is None or self._end is not None:
            return
        # After an operator set the clock back, keep the time constant until the clock catches up.
        at_us = max(int(batch.at), self._now_us)
        if at_us < self._window.from_us:
            return
        self._now_us = at_us
        if not self._has_begun:
            self._has_begun = True
            self.begins(before[0])
        if self.state is not before[0]:
            self.saw(entry, batch, before[0], at_us)

    def begins(self, state: State) -> None:
        """Record the state at the start of the window."""
        raise NotImplementedError

    def saw(self, entry: LedgerEntry, batch: Batch, before: State, at_us: int) -> None:
        """Record an entry in the window, which led from `before` to the present state."""
        raise NotImplementedError


class _Walk(WindowReplay):
    """Figures of a window."""

    def __init__(self, start: ReplayFold, window: Window, jobs: frozenset[int]) -> None:
        super().__init__(start, window)
        self._jobs = jobs
        self._lives: dict[int, _JobTrack] = {}
        self._over: _Most[JobBars] = _Most(len(jobs) or JOBS_SHOWN_MAX)
        self._pools: dict[str, PoolColumns] = {}
        self._waiting: list[PendingJobs] = []
        self._unsampled_us: int | None = None
        """Time of the last entry, whose state is sampled when an entry of a later column arrives."""
        self._index: SchedulingIndex | None = None
        self._terms: list[Term] = []
        self._terms_left_out = 0
        self._commands = [0] * COLUMNS
        self._moved: dict[str, list[int]] = {}
        self._transfers: _Most[TransferFigures] = _Most(TRANSFERS_MAX)
        self._first_revision = 0
        self._totals = _JobTotals()

    def begins(self, state: State) -> None:
        """Record the state at the start of the window."""
        self._index = SchedulingIndex(state)
        self._first_revision = state.revision + 1
        for job in sorted(state.unfinished):
            self._follow(job, state, self._window.from_us)
        self._count_pools(state, self._window.from_us)

    def saw(self, entry: LedgerEntry, batch: Batch, before: State, at_us: int) -> None:
        """Record an entry in the window."""
        assert self._index is not None
        state = self.state
        events = [event for record in batch.entries for event in record.events]
        last_us = self._unsampled_us
        if last_us is not None and self._window.column(last_us) < self._window.column(at_us):
            self._sample_waits(before, last_us)
        self._unsampled_us = at_us
        self._index.advance(state, events)
        self._commands[self._window.column(at_us)] += len(batch.entries)
        self._note_term(entry, at_us)
        for job in dict.fromkeys(job for event in events for job in jobs_of(event)):
            self._follow(job, state, at_us)
        for event in events:
            if isinstance(event, TransferRecorded):
                self._note_transfer(event)
            elif isinstance(event, e.RunEnded) and event.result is JobState.NODE_FAIL:
                self._totals.interruptions += 1
        self._count_pools(state, at_us)

    def _note_term(self, entry: LedgerEntry, at_us: int) -> None:
        last = self._terms[-1] if self._terms else None
        if last is not None and last.term == entry.term:
            self._terms[-1] = Term(
                last.term, last.first_index, last.from_us, at_us, entry.index - last.first_index + 1, last.silent_us
            )
            return
        silent_us = None if last is None else at_us - last.to_us
        self._terms.append(Term(entry.term, entry.index, at_us, at_us, 1, silent_us))
        if len(self._terms) > TERMS_MAX:
            del self._terms[0]
            self._terms_left_out += 1

    def _follow(self, job_id: int, state: State, at_us: int) -> None:
        if self._jobs and job_id not in self._jobs:
            return
        job, buffer = state.jobs.get(job_id), state.buffers.get(job_id)
        life = self._lives.get(job_id)
        if life is None:
            if job is None or job_id not in state.unfinished:
                return
            pool, size_bytes = ("", 0) if buffer is None else (buffer.pool, buffer.granted_bytes)
            called = job_words(state, job_id) if job.external_job is None else job.display_name
            life = self._lives[job_id] = _JobTrack(called, job.request.name, job.request.user, pool, size_bytes)
        if job is not None and job_id in state.unfinished:
            life.becomes((job.state.name, buffer_word(state, job_id), job.attempt), at_us)
            return
        life.becomes(None, at_us)
        del self._lives[job_id]
        self._keep(life.ended(job_id, "" if job is None else job.state.name, at_us))

    def _keep(self, seen: JobBars) -> None:
        if seen.bars:
            self._totals.add(seen)
            self._over.add((seen.waited_us, -seen.job, seen.bars[0].from_us), seen)

    def _note_transfer(self, event: TransferRecorded) -> None:
        receipt = event.receipt
        self._totals.moved_bytes[receipt.stage] += receipt.size_bytes
        begun, ended = receipt.started_at, receipt.ended_at
        if begun == NEVER or ended == NEVER or ended < begun:
            return
        stage = receipt.stage.name.lower()
        made = TransferFigures(
            event.job,
            event.node,
            stage,
            receipt.attempt,
            receipt.complete,
            receipt.files,
            receipt.size_bytes,
            begun,
            ended,
        )
        self._transfers.add((made.size_bytes, -made.job, -made.attempt, receipt.stage), made)
        if made.node not in self._moved and len(self._moved) == NODES_MAX:
            return
        columns = self._moved.setdefault(made.node, [0] * COLUMNS)
        first, last = self._window.column(begun), self._window.column(ended)
        share, rest = divmod(made.size_bytes, last - first + 1)
        for column in range(first, last + 1):
            columns[column] += share
        columns[last] += rest

    def _count_pools(self, state: State, at_us: int) -> None:
        column = self._window.column(at_us)
        for name in state.pools:
            pool = state.pools[name]
            steps = self._pools.get(name)
            if steps is None:
                steps = self._pools[name] = PoolColumns(pool.unit.word)
            in_service = max(0, pool.quantity_bytes - pool.out_of_service_bytes)
            steps.add(column, at_us, (state.held_bytes.get(name, 0), in_service, pool.quantity_bytes))
        for name in self._pools:
            if name not in state.pools:
                self._pools[name].add(column, at_us, (0, 0, 0))

    def _sample_waits(self, state: State, at_us: int) -> None:
        """Record why jobs are pending in the last state of a column.

        The state lasts until the next column with an entry.
        """
        assert self._index is not None
        pending = [job for job in state.unfinished if state.jobs[job].state is JobState.PENDING]
        reasons = Counter[str]()
        for job, verdict in verdicts_of(self._index, pending, state.at).items():
            reason = str(verdict.reason)
            reasons[reason] += 1
            if (life := self._lives.get(job)) is not None and len(life.reasons) < 20:
                life.reasons[reason] = None
        self._waiting.append(PendingJobs(at_us, dict(sorted(reasons.items()))))

    def report(self, cluster_id: str) -> WindowReport:
        """Return the figures."""
        state, last_index, digest = self.end
        if self._unsampled_us is not None:
            self._sample_waits(state, self._unsampled_us)
        for job_id, life in sorted(self._lives.items()):
            self._keep(life.ended(job_id, "", self._window.to_us))
        source = ReportSource(
            cluster_id=cluster_id,
            cluster=state.name,
            from_us=self._window.from_us,
            to_us=self._window.to_us,
            first_revision=self._first_revision,
            last_revision=state.revision,
            last_index=last_index,
            ledger_digest=digest.hex(),
            state_digest=state_digest(state).hex(),
        )
        return WindowReport(
            source=source,
            totals=self._totals.totals(max(0, len(self._terms) + self._terms_left_out - 1)),
            pools=tuple(PoolUsage(name, steps.unit, steps.steps()) for name, steps in sorted(self._pools.items())),
            waiting=tuple(self._waiting),
            jobs=_by_job(self._over.items()),
            jobs_left_out=self._over.left_out,
            terms=tuple(self._terms),
            terms_left_out=self._terms_left_out,
            commands=tuple(self._commands),
            moved={node: tuple(columns) for node, columns in sorted(self._moved.items())},
            transfers=tuple(self._transfers.items()),
            transfers_left_out=self._transfers.left_out,
        )
