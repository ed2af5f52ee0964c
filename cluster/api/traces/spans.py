"""Spans of a job's trace, from submit to teardown, derived from its state after each command. Pure.

IDs are derived from cluster and job, so every leader produces the same trace. Spans contain no secrets and no file
names: no script, environment, path, comment or reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from forebay.cluster.schemas import kind_name
from forebay.replica.messages import Event, events
from forebay.replica.model import ENDED, BufferState, JobState, Stage
from forebay.replica.values import Instant

TRACE_BYTES: Final = 16
SPAN_BYTES: Final = 8
"""Bytes of a trace ID and of a span ID, as in W3C Trace Context."""

SUBMIT: Final = "submit"
PENDING: Final = "pending"
SETUP: Final = "setup"
STAGE_IN: Final = "stage-in"
QUEUED: Final = "queued"
PRE_RUN: Final = "pre-run"
RUN: Final = "run"
POST_RUN: Final = "post-run"
STAGE_OUT: Final = "stage-out"
TEARDOWN: Final = "teardown"

DONE: Final = "done"
FAILED: Final = "failed"

_OF_BUFFER: Final = {
    BufferState.PENDING: PENDING,
    BufferState.ALLOCATING: SETUP,
    BufferState.ALLOCATED: SETUP,
    BufferState.STAGING_IN: STAGE_IN,
    BufferState.STAGED_IN: QUEUED,
    BufferState.PRE_RUN: PRE_RUN,
    BufferState.RUNNING: RUN,
    BufferState.SUSPENDED: RUN,
    BufferState.POST_RUN: POST_RUN,
    BufferState.STAGING_OUT: STAGE_OUT,
    BufferState.ALLOC_REVOKE: TEARDOWN,
    BufferState.TEARDOWN: TEARDOWN,
    BufferState.TEARDOWN_FAIL: TEARDOWN,
}
"""Phase of each buffer state."""

_OF_JOB: Final = {
    JobState.PENDING: PENDING,
    JobState.CONFIGURING: PRE_RUN,
    JobState.RUNNING: RUN,
    JobState.SUSPENDED: RUN,
    JobState.STAGE_OUT: POST_RUN,
}
"""Phase of each job state, for a job without a buffer."""

_BY_STAGE: Final = {
    Stage.STAGE_IN: STAGE_IN,
    Stage.RUN: PRE_RUN,
    Stage.POST_RUN: POST_RUN,
    Stage.STAGE_OUT: STAGE_OUT,
    Stage.TEARDOWN: TEARDOWN,
}

_ON_NODE: Final = frozenset({PRE_RUN, RUN, POST_RUN})
"""Phases on the job's node instead of a mover."""


class JobStep(NamedTuple):
    """A command about a job: its events of the job, and the job's state after it."""

    revision: int
    at: Instant
    state: JobState | None
    """None: deleted."""
    buffer: BufferState | None
    attempt: int
    events: tuple[Event, ...]

    @property
    def is_over(self) -> bool:
        """Return whether the job has finished."""
        return self.state in ENDED and self.buffer in (None, BufferState.COMPLETE)

    @property
    def phase(self) -> str:
        """Phase of the job after this step; empty: none."""
        if self.is_over or self.state is None:
            return ""
        return _OF_BUFFER.get(self.buffer, "") if self.buffer is not None else _OF_JOB.get(self.state, "")


class SpanEvent(NamedTuple):
    """A ledger event within a span."""

    name: str
    at: Instant
    revision: int


class JobSpan(NamedTuple):
    """Span; times are those of the ledger."""

    span_id: bytes
    parent_id: bytes | None
    name: str
    began_at: Instant
    ended_at: Instant
    attributes: dict[str, str | int]
    events: tuple[SpanEvent, ...]
    has_failed: bool


def trace_id(cluster: str, job: int) -> bytes:
    """Return the ID of a job's trace."""
    return sha256(f"forebay trace {cluster} {job}".encode()).digest()[:TRACE_BYTES]


def ended_with(steps: Sequence[JobStep], revision: int) -> bool:
    """Return True if this command finished the job."""
    return any(steps[number].revision == revision for number in _ends(steps))


def spans_of(cluster: str, job: int, steps: Sequence[JobStep]) -> list[JobSpan]:
    """Return the spans of a finished job, the root span first; none if its submit is missing."""
    ends = _ends(steps)
    first = next((number for number, step in enumerate(steps) if _submit_event(step) is not None), None)
    if first is None or not ends:
        return []
    # Steps after the end, such as its deletion, do not belong to the trace.
    steps = steps[first : ends[-1] + 1]
    trace, common = trace_id(cluster, job), _common(cluster, job, steps[0])
    root_id = _span_id(trace, "job", steps[0].revision)
    last = steps[-1]
    attributes: dict[str, str | int] = {"forebay.outcome": _word(last.state), "forebay.revision": steps[0].revision}
    attributes["forebay.revision.last"] = last.revision
    has_failed = last.state not in (JobState.COMPLETED, JobState.CANCELLED)
    found = [
        JobSpan(
            root_id, None, f"job {job}", steps[0].at, max(steps[0].at, last.at), common | attributes, (), has_failed
        ),
        _span(trace, root_id, SUBMIT, steps[0], steps[:1], common, {}),
    ]
    places = _Places()
    for begin, end in _stage_ranges(steps):
        for step in steps[places.taken : begin + 1]:
            places.take(step)
        name = steps[begin].phase
        if name:
            more = places.of(name) | {"forebay.attempt": steps[begin].attempt}
            found.append(_span(trace, root_id, name, steps[begin], steps[begin + 1 : end + 1], common, more))
    return found


def _ends(steps: Sequence[JobStep]) -> list[int]:
    """Return the steps at which a job finished; more than one if it was requeued."""
    return [number for number, step in enumerate(steps) if step.is_over and not (number and steps[number - 1].is_over)]


def _stage_ranges(steps: Sequence[JobStep]) -> Iterator[tuple[int, int]]:
    """Yield the first and last step of each phase within one attempt; the last one ends it."""
    begin = 0
    for number in range(1, len(steps)):
        if (steps[number].phase, steps[number].attempt) != (steps[begin].phase, steps[begin].attempt):
            yield begin, number
            begin = number


class _Places:
    """Nodes of a job's phases, tracked step by step."""

    def __init__(self) -> None:
        self.taken = 0
        self._node = self._mover = ""

    def take(self, step: JobStep) -> None:
        """Process one step."""
        self.taken += 1
        for event in step.events:
            node, mover = getattr(event, "node", ""), getattr(event, "mover", "")
            if isinstance(event, _GIVES_NODE):
                self._node = node
            if isinstance(event, _GIVES_MOVER) and (mover or isinstance(event, events.BufferAllocated)):
                self._mover = mover

    def of(self, name: str) -> dict[str, str | int]:
        """Return the node attributes of a phase, if it has a node."""
        if name in (PENDING, QUEUED):
            return {}
        node = self._node if name in _ON_NODE else self._mover or self._node
        return {"forebay.node": node} if node else {}


_GIVES_NODE: Final = (events.BufferAllocated, events.RunOrdered)
_GIVES_MOVER: Final = (
    events.BufferAllocated,
    events.StageOutStarted,
    events.MoverChanged,
    events.ExternalJobStageInOrdered,
)


def _span(
    trace: bytes,
    parent_id: bytes,
    name: str,
    begin: JobStep,
    inside: Sequence[JobStep],
    common: dict[str, str | int],
    more: dict[str, str | int],
) -> JobSpan:
    """Return the span from a step to the last of the following steps."""
    outcome, moved = DONE, dict[str, str | int]()
    for event in (event for step in inside for event in step.events):
        outcome = _outcome(name, event) or outcome
        if isinstance(event, events.StagedIn | events.StagedOut):
            moved = {"forebay.bytes": event.size_bytes, "forebay.files": event.files}
    return JobSpan(
        _span_id(trace, name, begin.revision),
        parent_id,
        name,
        begin.at,
        # After an operator set the clock back, no span may end before it began.
        max(begin.at, inside[-1].at),
        common | more | moved | {"forebay.outcome": outcome, "forebay.revision": begin.revision},
        tuple(SpanEvent(kind_name(type(event)), step.at, step.revision) for step in inside for event in step.events),
        outcome in _FAILURES,
    )


def _outcome(name: str, event: Event) -> str:
    """Return the outcome of a phase from the event that ends it; empty: none."""
    match event:
        case events.StageFailed() if _BY_STAGE.get(event.stage) == name:
            return FAILED
        case events.PreRunFailed() if name == PRE_RUN:
            return FAILED
        case events.ExternalJobSetupFailed():
            return FAILED
        case events.RunEnded() if name == RUN:
            return _word(event.result)
        case events.AllocationRevoked():
            return "revoked"
        case events.JobCancelled() | events.DeadlineMissed():
            return "cancelled"
        case events.BufferCleared():
            return "cleared"
        case events.StagedIn() | events.StagedOut() | events.TornDown():
            return DONE
    return ""


_FAILURES: Final = {FAILED, *(_state.name.lower() for _state in ENDED - {JobState.COMPLETED, JobState.CANCELLED})}


def _submit_event(step: JobStep) -> events.JobSubmitted | events.ExternalJobSetUp | None:
    return next(
        (event for event in step.events if isinstance(event, events.JobSubmitted | events.ExternalJobSetUp)), None
    )


def _common(cluster: str, job: int, first: JobStep) -> dict[str, str | int]:
    """Return the attributes common to all spans of a job."""
    found: dict[str, str | int] = {"forebay.cluster.id": cluster, "forebay.job.id": job}
    submitted = _submit_event(first)
    if submitted is None:
        return found
    found["forebay.user"] = submitted.request.user
    if submitted.request.effective_options.account:
        found["forebay.account"] = submitted.request.effective_options.account
    if submitted.pool:
        found |= {"forebay.pool": submitted.pool, "forebay.buffer.bytes": submitted.granted_bytes}
    return found


def _span_id(trace: bytes, name: str, revision: int) -> bytes:
    return sha256(trace + f" {name} {revision}".encode()).digest()[:SPAN_BYTES]


def _word(state: JobState | None) -> str:
    return "" if state is None else state.name.lower()
