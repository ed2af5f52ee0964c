"""Accounting rows of the jobs in a window, including jobs purged since."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from forebay.cluster.api.render import job_words
from forebay.cluster.audit.replay import Progress, ReplayFold
from forebay.cluster.audit.report.window import Window, WindowReplay, watch
from forebay.cluster.system import format_instant
from forebay.replica.messages import Batch, JobPurged
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, NEVER
from forebay.wal import Ledger, LedgerEntry


class JobRow(msgspec.Struct, frozen=True):
    """Job at the end of the window, or at its purge.

    Times are ISO 8601 in UTC, None for events that have not happened.
    """

    job: str
    name: str
    user: str
    account: str
    partition: str
    nodes: str
    state: str
    exit_code: str
    """CODE:SIGNAL"""
    submitted_at: str | None
    started_at: str | None
    ended_at: str | None
    """End of its script, even if stage-out continues."""
    pending_s: int
    """Seconds from submission to the start, to the end of a job that never started, or to the end of the window."""
    elapsed_s: int
    """Seconds from start to end, or to the end of the window for a running job."""
    pool: str
    size_bytes: int
    staged_in_bytes: int
    staged_out_bytes: int


def read_jobs(
    ledger: Ledger,
    snapshots: Sequence[tuple[int, Path]],
    *,
    from_us: int | None,
    to_us: int | None,
    progress: Progress | None = None,
) -> list[JobRow]:
    """Return the jobs submitted before the end of a window and not finished before its start.

    Ordered by ID. Arguments and exceptions as in `read_window`.
    """
    return watch(ledger, snapshots, _Jobs, from_us=from_us, to_us=to_us, progress=progress).rows()


class _Jobs(WindowReplay):
    """Jobs of a window."""

    def __init__(self, start: ReplayFold, window: Window) -> None:
        super().__init__(start, window)
        self._purged: dict[int, JobRow] = {}

    def begins(self, state: State) -> None:
        """Do nothing: a job present at the start is also present at the end, or its purge is recorded."""

    def saw(self, entry: LedgerEntry, batch: Batch, before: State, at_us: int) -> None:
        """Record the jobs that are purged."""
        for record in batch.entries:
            for event in record.events:
                # A job submitted and purged in one batch has no state here; no job is that fast.
                if isinstance(event, JobPurged) and self._is_of_window(before, event.job):
                    self._purged[event.job] = self._row(before, event.job)

    def rows(self) -> list[JobRow]:
        """Return the rows."""
        state = self.end[0]
        there = {job: self._row(state, job) for job in state.jobs if self._is_of_window(state, job)}
        found = self._purged | there
        return [found[job] for job in sorted(found)]

    def _is_of_window(self, state: State, job_id: int) -> bool:
        job = state.jobs.get(job_id)
        return job is not None and (job.ended_at == NEVER or job.ended_at >= self._window.from_us)

    def _row(self, state: State, job_id: int) -> JobRow:
        job, buffer = state.jobs[job_id], state.buffers.get(job_id)
        asked = job.request.effective_options
        end_us = job.ended_at if job.ended_at != NEVER else self._window.to_us
        begun_us = job.started_at if job.started_at != NEVER else end_us
        return JobRow(
            job=job_words(state, job_id) if job.external_job is None else job.display_name,
            name=job.request.name,
            user=job.request.user,
            account=asked.account,
            partition=asked.partition,
            nodes=job.node,
            state=job.state.name,
            exit_code=f"{job.exit_code}:{job.signal}",
            submitted_at=format_instant(job.submitted_at),
            started_at=format_instant(job.started_at),
            ended_at=format_instant(job.ended_at),
            pending_s=max(0, begun_us - job.submitted_at) // MICROSECONDS_PER_SECOND,
            elapsed_s=max(0, end_us - begun_us) // MICROSECONDS_PER_SECOND,
            pool="" if buffer is None else buffer.pool,
            size_bytes=0 if buffer is None else buffer.granted_bytes,
            staged_in_bytes=0 if buffer is None else buffer.staged_in_bytes,
            staged_out_bytes=0 if buffer is None else buffer.staged_out_bytes,
        )
