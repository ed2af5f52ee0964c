"""Everything that can be asked of, or reported about, a job in each of its buffer's states: the whole product, with
what comes of it. Made by asking `decide` and `fold` themselves, for `docs/reference/buffer-states.md` and its test.

Each pair has exactly one outcome: a transition, nothing (with the reason why nothing is right), or a rejection, which
says itself why.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

import immutables
import msgspec

from forebay.replica.decide.decide import decide
from forebay.replica.fold.fold import fold
from forebay.replica.messages import commands as c
from forebay.replica.messages.features import FEATURE_LEVEL_KNOWN
from forebay.replica.model.buffers import Buffer, BufferState
from forebay.replica.model.job_states import ENDED, JobState
from forebay.replica.model.jobs import Hold, Job
from forebay.replica.model.nodes import Node
from forebay.replica.model.pools import Pool
from forebay.replica.model.requests import BufferRequest, JobChange, JobRequest
from forebay.replica.model.stages import Stage, stage_of
from forebay.replica.state.derived import derive
from forebay.replica.state.state import State
from forebay.replica.values.errors import Rejection
from forebay.replica.values.units import Instant

_AT = Instant(1_000_000_000_000_000)
_OPERATOR = c.Actor(c.ActorRole.OPERATOR, "operator")
_AGENT = c.Actor(c.ActorRole.AGENT, "n1")
_NODE = "n1"

_B, _J = BufferState, JobState

STATES: Mapping[BufferState, JobState] = {
    _B.PENDING: _J.PENDING,
    _B.STAGING_IN: _J.PENDING,
    _B.STAGED_IN: _J.PENDING,
    _B.PRE_RUN: _J.CONFIGURING,
    _B.ALLOC_REVOKE: _J.PENDING,
    _B.RUNNING: _J.RUNNING,
    _B.SUSPENDED: _J.SUSPENDED,
    _B.POST_RUN: _J.STAGE_OUT,
    _B.STAGING_OUT: _J.STAGE_OUT,
    _B.TEARDOWN: _J.COMPLETED,
    _B.TEARDOWN_FAIL: _J.COMPLETED,
    _B.COMPLETE: _J.COMPLETED,
}
"""The states of a job's buffer, each with the state of the job. Those of persistent buffers have a table of their own:
nobody asks anything of them but by jobs and `clear`."""


class Outcome(msgspec.Struct, frozen=True):
    """What comes of one happening in one state: exactly one of the three is set."""

    becomes: str = ""
    ignored: str = ""
    refused: str = ""


_IGNORED: Mapping[str, str] = {
    "cancel": "it is on its way to its end, and keeps its own final state",
    "cancel --hurry": "its buffer is being removed already",
    "suspend": "it is suspended already",
    "requeue": "its buffer is being taken back already",
}
"""Why nothing is the right answer where a command changes nothing."""


def happenings(job: Job, buffer: Buffer) -> dict[str, tuple[c.Actor, c.Command]]:
    """Return all that can be asked or reported, by name. A report names the operation that stands ordered."""
    stage = stage_of(job, buffer) or Stage.STAGE_IN
    attempt = job.attempt

    def report(result: c.OperationResult, of: int = attempt) -> tuple[c.Actor, c.Command]:
        return _AGENT, c.ReportOperation(_NODE, job.id, of, stage, result)

    people: dict[str, c.Command] = {
        "cancel": c.CancelJob(job.id),
        "cancel --hurry": c.CancelJob(job.id, hurry=True),
        "hold": c.HoldJob(job.id),
        "release": c.ReleaseJob(job.id),
        "suspend": c.SuspendJob(job.id),
        "resume": c.ResumeJob(job.id),
        "requeue": c.RequeueJob(job.id),
        "update": c.UpdateJob(job.id, JobChange(comment="another")),
        "update --bb": c.UpdateJob(job.id, buffer=BufferRequest("fast", 9, (), "", (), (), "capacity=9")),
        "buffer export": c.ExportBuffer(job.id),
        "buffer clear": c.ClearBuffer(job.id),
        "buffer clear --discard": c.ClearBuffer(job.id, discard=True),
    }
    return {name: (_OPERATOR, command) for name, command in people.items()} | {
        "operation done": report(c.OperationDone(1, 1)),
        "operation failed": report(c.OperationFailed("why", True)),
        "script started": report(c.ScriptStarted()),
        "script ended": report(c.ScriptEnded(JobState.FAILED, 1)),
        "report of an old attempt": report(c.OperationDone(), attempt - 1),
    }


ASKED = BufferRequest("fast", 8, (), "", (), (), "#DW jobdw capacity=8 pool=fast")


def specimen(buffer_state: BufferState) -> State:
    """Return a State with one job whose buffer is in `buffer_state`, as honest agents would have brought it there."""
    job_state = STATES[buffer_state]
    waits, result = buffer_state is _B.PENDING, _J.COMPLETED if job_state is _J.STAGE_OUT else job_state
    failed = buffer_state is _B.TEARDOWN_FAIL
    job = Job(
        id=1,
        request=JobRequest("job", "user", "#!/bin/sh\n", "/work", 60, buffer=ASKED),
        state=job_state,
        node="" if waits else _NODE,
        attempt=0 if waits else 3,
        stuck=failed,
        failures=int(failed),
        message="why" if failed else "",
        order_at=Instant(0) if waits or failed or buffer_state in (_B.STAGED_IN, _B.COMPLETE) else _AT,
        result=result if result in ENDED else _J.PENDING,
        submitted_at=_AT,
        eligible_at=_AT,
        started_at=_AT,
    )
    buffer = Buffer(
        job=1,
        state=buffer_state,
        pool="fast",
        granted_bytes=8,
        node="" if waits else _NODE,
        created_at=_AT,
        changed_at=_AT,
    )
    return derive(
        State(
            cluster_id="id",
            name="table",
            feature_level=FEATURE_LEVEL_KNOWN,
            at=_AT,
            next_job=2,
            pools=immutables.Map({"fast": Pool("fast", 64, 1)}),
            nodes=immutables.Map({_NODE: Node(_NODE, 8, "i1", "s1", _AT)}),
            jobs=immutables.Map({1: job}),
            buffers=immutables.Map({1: buffer}),
        )
    )


def outcome(state: State, name: str, actor: c.Actor, command: c.Command) -> Outcome:
    """Return what comes of one happening."""
    decided = decide(state, c.Request(b"", actor, command), state.at)
    if isinstance(decided, Rejection):
        return Outcome(refused=f"{decided.sentence}; {decided.remedy}")
    if not decided.events:
        return Outcome(ignored=_IGNORED[name])
    after = fold(state, decided.events, state.at)
    return Outcome(becomes=_shown(state, after))


def _shown(before: State, after: State) -> str:
    """Return the states of buffer and job after, and what else has changed where those have not."""
    job, buffer = after.jobs[1], after.buffers[1]
    words = buffer.state.word
    if (buffer.state, job.state) != (before.buffers[1].state, before.jobs[1].state):
        return f"{words}, {job.state.name}" + (", held" if job.hold is not Hold.NONE else "")
    was = before.jobs[1]
    notes = [
        word
        for word, true in (
            ("changed", job.request != was.request),
            ("held", job.hold is not was.hold and job.hold is not Hold.NONE),
            ("failed", job.stuck and not was.stuck),
            ("ending", (job.cancelled or job.effective_interruptions.requeueing) and not was.cancelled),
            ("a new attempt", job.attempt != was.attempt),
        )
        if true
    ]
    return f"{words} ({', '.join(notes)})"


def table() -> dict[tuple[str, BufferState], Outcome]:
    """Return the whole product."""
    found: dict[tuple[str, BufferState], Outcome] = {}
    for buffer_state in STATES:
        state = specimen(buffer_state)
        for name, (actor, command) in happenings(state.jobs[1], state.buffers[1]).items():
            found[name, buffer_state] = outcome(state, name, actor, command)
    return found


def render() -> str:
    """Return the product as a Markdown table, and below it why what is ignored is ignored and what is refused."""
    found = table()
    lines = ["| happening | " + " | ".join(state.word for state in STATES) + " |", "|---" * (len(STATES) + 1) + "|"]
    names = list(dict.fromkeys(name for name, _ in found))
    for name in names:
        cells = []
        for state in STATES:
            one = found[name, state]
            cells.append(one.becomes or ("*ignored*" if one.ignored else "rejected"))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += ["", "Why it is ignored:", ""]
    for name in names:
        where = [state.word for state in STATES if found[name, state].ignored]
        if where:
            lines.append(_filled(f"- {name}, {', '.join(where)}: {_IGNORED[name]}"))
    lines += ["", "Examples of rejections:", ""]
    for name in names:
        first = next((state for state in STATES if found[name, state].refused), None)
        if first is not None:
            lines.append(_filled(f"- {name}, {first.word}: {found[name, first].refused}"))
    return "\n".join(lines) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
