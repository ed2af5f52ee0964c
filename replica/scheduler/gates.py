"""Gates of pending jobs, and the reason of each gate.

The same call blocks a job and names its reason (SPUR.md), so the reason shown cannot differ from the decision. Order of
the gates: hold, deadline, begin time, partition, dependency, reservation, account and QOS limits, licences, burst
buffer, placement. Gates that depend on the usage of other jobs are in `admission`, with a `QuotaCheck`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import immutables

from forebay.replica.model import (
    ENDED,
    Buffer,
    BufferState,
    Dependency,
    DependencyKind,
    Hold,
    Job,
    JobOptions,
    JobState,
    agent_of,
    awaited_slot,
    first_job,
    partition_gate,
)
from forebay.replica.operations import ExternalJobPhase, external_job_phase, lingers_until, persistent_obstacle
from forebay.replica.scheduler.quotas import class_gate
from forebay.replica.state import Facts, State, is_finished
from forebay.replica.values import NEVER, Reason, Verdict, format_size

_SLOTS_TAKEN = "the limit of operations, in total or of this user, is reached"


def early_gate(state: State, job: Job) -> Verdict | None:
    """Return the verdict of the first gate before the burst buffer that blocks a pending job, or None."""
    options = job.request.options
    early = _hold(state, job) or _deadline(job) or _begin(job)
    if early is None and options is not None:
        early = partition_gate(state.partitions, job.request)
    early = early or _dependency(state, job)
    if early is not None or options is None:
        return early
    buffer = state.buffers.get(job.id)
    return _reservation(state, job, options) or class_gate(state, job, buffer)


def _reservation(state: Facts, job: Job, options: JobOptions) -> Verdict | None:
    name = options.reservation
    if not name:
        return None
    figures: tuple[tuple[str, str], ...] = (("reservation", name),)
    reservation = state.reservations.get(name)
    if reservation is None:
        return Verdict(
            Reason.RESERVATION_DELETED, f"reservation {name} was deleted; submit the job without it", figures
        )
    if not reservation.admits(job.request.user, options.account):
        return Verdict(Reason.RESERVATION, f"reservation {name} no longer admits the job's user or account", figures)
    if reservation.active:
        return None
    figures += (("begins_at_us", str(reservation.start_at)),)
    return Verdict(Reason.RESERVATION, f"reservation {name} has not started", figures)


def _hold(state: State, job: Job) -> Verdict | None:
    if job.hold is Hold.NONE:
        return None
    because = job.effective_interruptions.held_because
    if because:
        return Verdict(because, "an operation failed; release the job to retry, or cancel it", ())
    if job.stuck and job.message:
        return Verdict(
            job.message,
            "an operation failed and is not retried automatically; release the job to retry, or cancel it",
            (("failures", str(job.failures)),),
        )
    reason = Reason.JOB_HELD_USER if job.hold is Hold.USER else Reason.JOB_HELD_ADMIN
    return Verdict(reason, _HOLD_SENTENCES[job.hold], ())


_HOLD_SENTENCES = {
    Hold.USER: "the job is held by its user",
    Hold.ADMIN: "the job is held by an operator",
    Hold.SYSTEM: "the job is held because an operation failed; release it to retry",
}
"""Sentence for each kind of hold, with the remedy where that is not obvious."""


def _deadline(job: Job) -> Verdict | None:
    if not job.late:
        return None
    figures = (("deadline_us", str(job.request.deadline)),)
    return Verdict(Reason.DEADLINE, "the job can no longer end before its deadline", figures)


def _begin(job: Job) -> Verdict | None:
    if job.eligible_at != NEVER:
        return None
    figures = (("begin_at_us", str(job.request.begin_at)),)
    return Verdict(Reason.BEGIN_TIME, "the job's begin time is not reached yet", figures)


def _dependency(state: Facts, job: Job) -> Verdict | None:
    request = job.request
    options = request.effective_options
    if not request.dependencies and not options.singleton:
        return None
    any_of = options.any_of
    unmet: list[str] = []
    never: list[str] = []
    for dependency in request.dependencies:
        met = is_dependency_met(state, dependency, request.buffer is not None)
        if met and any_of:
            return None
        if not met:
            (never if met is None else unmet).append(f"{dependency.kind.word}:{dependency.job}")
    earlier = _earlier_of_same_name(state, job)
    if earlier:
        unmet.append(f"singleton:{earlier}")
    elif any_of and options.singleton:
        return None
    if never and not (any_of and unmet):
        name = "?".join(never) if any_of else never[0]
        return Verdict(Reason.DEPENDENCY_NEVER_SATISFIED, f"{name} can no longer be met", (("dependency", name),))
    if not unmet:
        return None
    separator, sentence = ("?", "one of several jobs") if any_of else (",", "other jobs")
    return Verdict(Reason.DEPENDENCY, f"the job waits for {sentence}", (("waits_for", separator.join(unmet)),))


def _earlier_of_same_name(state: Facts, job: Job) -> int:
    """Return the first job of the same user and name that a `singleton` job waits for; 0 for none."""
    options = job.request.options
    if options is None or not options.singleton:
        return 0
    names = state.named.get(job.request.user)
    group = None if names is None else names.get(job.request.name)
    first = job.id if group is None else first_job(group)
    return first if first < job.id else 0


def dependency_jobs(state: Facts, dependency: Dependency) -> Iterable[int]:
    """Return the jobs of a dependency: one job, or the tasks of an array."""
    return state.arrays.get(dependency.job, _NO_TASKS).values() if dependency.kind.is_for_array else (dependency.job,)


_NO_TASKS: immutables.Map[int, int] = immutables.Map()


def is_dependency_met(state: Facts, dependency: Dependency, waiter_has_buffer: bool) -> bool | None:
    """Return whether a dependency is met; None if it can never be met."""
    kind = dependency.kind
    if not kind.is_for_array:
        return _is_met(kind, state.jobs.get(dependency.job), state.buffers.get(dependency.job), waiter_has_buffer)
    tasks = state.arrays.get(dependency.job)
    if tasks is None:
        return _is_met(kind.for_job, None, None, waiter_has_buffer)
    if not isinstance(state, State):
        return _is_met_by_tasks(state, kind.for_job, tasks, waiter_has_buffer)
    # A whole array may wait for a whole array. Caching per state evaluates the awaited tasks once, not for each task.
    asked = (dependency.job, kind, waiter_has_buffer)
    found = _results_for(state)
    if asked not in found:
        found[asked] = _is_met_by_tasks(state, kind.for_job, tasks, waiter_has_buffer)
    return found[asked]


_Question = tuple[int, DependencyKind, bool]

STATES_CACHED = 4
"""Number of states for which results about arrays are cached, count: those of cycles and of queries."""

_results: deque[tuple[State, dict[_Question, bool | None]]] = deque(maxlen=STATES_CACHED)


def _results_for(state: State) -> dict[_Question, bool | None]:
    """Return the cached results about arrays in a state."""
    for known, found in _results:
        if known is state:
            return found
    found = {}
    _results.appendleft((state, found))
    return found


def _is_met_by_tasks(
    state: Facts, kind: DependencyKind, tasks: immutables.Map[int, int], waiter_has_buffer: bool
) -> bool | None:
    """Return whether a dependency on a whole array is met; None if it can never be met."""
    # As in Slurm: first, all tasks must have reached the milestone; afternotok then requires that one failed.
    after = DependencyKind.AFTER_ANY if kind in _BY_RESULT else kind

    def all_met(kind: DependencyKind) -> bool:
        return all(
            _is_met(kind, state.jobs[task], state.buffers.get(task), waiter_has_buffer) for task in tasks.values()
        )

    if not all_met(after):
        return False
    if kind not in _BY_RESULT:
        return True
    return True if all_met(DependencyKind.AFTER_OK) == (kind is DependencyKind.AFTER_OK) else None


_BY_RESULT = (DependencyKind.AFTER_OK, DependencyKind.AFTER_NOT_OK)


def _is_met(kind: DependencyKind, other: Job | None, buffer: Buffer | None, waiter_has_buffer: bool) -> bool | None:
    """Return whether a dependency on one job is met; None if it can never be met."""
    # A purged job has finished, but its result is no longer in the state.
    if other is None:
        return (
            True
            if kind in (DependencyKind.AFTER, DependencyKind.AFTER_ANY, DependencyKind.AFTER_BURST_BUFFER)
            else None
        )
    if kind is DependencyKind.AFTER:
        return other.state not in (JobState.PENDING, JobState.CONFIGURING)
    if kind is DependencyKind.AFTER_BURST_BUFFER:
        return is_finished(other, buffer)
    # A job with a buffer that depends on a job with a buffer also waits for its stage-out (the guide).
    result = other.state if waiter_has_buffer or other.state in ENDED else other.result
    if result not in ENDED:
        return False
    if kind is DependencyKind.AFTER_ANY:
        return True
    return True if (result is JobState.COMPLETED) == (kind is DependencyKind.AFTER_OK) else None


def down_gate(state: Facts, job: Job, buffer: Buffer | None) -> Verdict | None:
    """Return the verdict on a job whose node or mover is down, or None.

    The job makes no progress until the node is back, but its script may still be running there.
    """
    performs = agent_of(job, buffer)
    node = state.nodes.get(performs) if performs else None
    if node is None or not node.down:
        return None
    if performs == job.mover:
        sentence = f"mover {job.mover} is down, and no other mover of its shared filesystem is up"
        return Verdict(Reason.NODE_DOWN, sentence, (("node", job.mover),))
    what = "the job" if job.state is JobState.RUNNING else "the job's data"
    return Verdict(Reason.NODE_DOWN, f"{what} is on node {job.node}, which is down", (("node", job.node),))


def buffer_gate(state: Facts, job: Job, buffer: Buffer | None) -> Verdict | None:
    """Return the verdict on a pending job whose buffer is not staged in, or None if it is, or if the job has none."""
    if buffer is None or buffer.state is BufferState.STAGED_IN:
        return None
    if buffer.state is BufferState.PENDING:
        return Verdict(Reason.BURST_BUFFER_RESOURCES, "the job waits for space in its pool")
    if (down := down_gate(state, job, buffer)) is not None:
        return down
    if buffer.state is BufferState.STAGING_IN:
        figures = (("attempt", str(job.attempt)), ("failures", str(job.failures)))
        sentence = "the job's data is being staged in"
        if awaited_slot(job, buffer) is not None:
            sentence = f"stage-in waits for a slot: {_SLOTS_TAKEN}"
        if job.retry_at:
            sentence = f"stage-in failed ({job.message}) and will be retried"
        return Verdict(Reason.BURST_BUFFER_STAGE_IN, sentence, figures)
    return Verdict(Reason.BURST_BUFFER_OPERATION, "the job's previous buffer is being torn down")


def later_reason(state: Facts, job: Job, buffer: Buffer | None) -> Verdict:
    """Return the reason of a job that is not pending, or of an external job."""
    if job.external_job is not None and buffer is not None:
        return external_job_verdict(state, job, buffer)
    return _later_reason(state, job, buffer)


def _later_reason(state: Facts, job: Job, buffer: Buffer | None) -> Verdict:
    over = job.state in ENDED and (buffer is None or buffer.state is BufferState.COMPLETE)
    if not job.stuck and not over and (down := down_gate(state, job, buffer)) is not None:
        return down
    if job.state is JobState.STAGE_OUT:
        if (job.stuck or job.retry_at) and job.message:
            return Verdict(
                job.message,
                "an operation after the run failed; release the job to retry"
                if job.stuck
                else "an operation after the run failed and will be retried",
            )
        sentence = "the job's results are being staged out"
        if awaited_slot(job, buffer) is not None:
            sentence = f"stage-out waits for a slot: {_SLOTS_TAKEN}"
        return Verdict(f"burst_buffer/{state.site.provider}: Stage-out in progress", sentence)
    if buffer is not None and buffer.state is BufferState.TEARDOWN_FAIL and job.message:
        return Verdict(job.message, "the buffer could not be removed; its space still counts as used")
    if job.state not in ENDED:
        return Verdict(Reason.NONE, "nothing blocks the job")
    if job.state is JobState.FAILED and not job.exit_code and job.comment:
        # The script was ended from outside, for example because its buffer is full, so the exit code explains nothing.
        return Verdict(job.comment.rsplit("\n", 1)[-1], "the job has finished: its script was ended")
    reason, sentence = _END_REASONS.get(job.state, (Reason.NONE, "the job has finished"))
    return Verdict(reason, sentence)


_END_REASONS = {
    JobState.FAILED: (Reason.NON_ZERO_EXIT_CODE, "the job has finished: its script failed"),
    JobState.TIMEOUT: (Reason.TIME_LIMIT, "the job has finished: it reached its time limit"),
    JobState.NODE_FAIL: (Reason.NODE_DOWN, "the job has finished: its node failed"),
}
"""Slurm's reasons of unsuccessful ends. A cancelled job needs no explanation."""


def external_job_verdict(state: Facts, job: Job, buffer: Buffer) -> Verdict:
    """Return the verdict on an external job. It follows from the job's phase, since no gate applies to it."""
    phase = external_job_phase(job, buffer)
    scheduler = "" if job.external_job is None else job.external_job.scheduler
    if phase in _WAITS_FOR_AGENT and (down := down_gate(state, job, buffer)) is not None:
        return down
    failed = bool(job.stuck or job.retry_at) and bool(job.message)
    match phase:
        case ExternalJobPhase.WAITING:
            asked = (("asked", format_size(buffer.granted_bytes)), ("pool", buffer.pool))
            missing = persistent_obstacle(state, job)
            if missing:
                return Verdict(Reason.BURST_BUFFER_RESOURCES, missing)
            return Verdict(Reason.BURST_BUFFER_RESOURCES, "the external job waits for space in its pool", asked)
        case ExternalJobPhase.SET_UP:
            return Verdict(
                Reason.NONE, f"the external job has its space, and {scheduler} has not requested its stage-in"
            )
        case ExternalJobPhase.STAGING_IN | ExternalJobPhase.STAGE_IN_FAILED:
            if phase is ExternalJobPhase.STAGE_IN_FAILED:
                return Verdict(job.message, f"stage-in failed, and is retried when {scheduler} requests it")
            verdict = buffer_gate(state, job, buffer)
            assert verdict is not None
            return verdict
        case ExternalJobPhase.STAGED_IN:
            return Verdict(Reason.NONE, f"the external job is staged in, and {scheduler} has not started it")
        case ExternalJobPhase.RUNNING:
            return Verdict(Reason.NONE, f"the job runs at {scheduler}")
        case ExternalJobPhase.POST_RUN:
            return Verdict(Reason.NONE, f"the job has ended, and {scheduler} has not requested its stage-out")
        case ExternalJobPhase.STAGE_OUT_FAILED:
            sentence = f"stage-out failed; it is retried when {scheduler} requests it, or with forebay buffer export"
            return Verdict(job.message, sentence)
        case ExternalJobPhase.LINGERING:
            figures = (("kept_until_us", str(lingers_until(state, job))),)
            sentence = (
                f"{scheduler} has torn down the external job before it ran; its data is kept until the space is needed"
            )
            return Verdict(Reason.NONE, sentence, figures)
        case ExternalJobPhase.RETAINED:
            what = "the export is under way" if _is_exporting(job, buffer) else "forebay buffer export retries it"
            sentence = f"{scheduler} has torn down the external job, and its results are not exported: {what}"
            return Verdict(job.message if failed else Reason.NONE, sentence)
        case ExternalJobPhase.OVER if job.message:
            return Verdict(job.message, "the external job has finished: it got no space")
    return _later_reason(state, job, buffer)


_WAITS_FOR_AGENT = frozenset({ExternalJobPhase.STAGING_IN, ExternalJobPhase.STAGING_OUT, ExternalJobPhase.TEARDOWN})


def _is_exporting(job: Job, buffer: Buffer) -> bool:
    return buffer.state is BufferState.STAGING_OUT and not job.stuck


REPLAN_S = 30
"""Interval between scheduling cycles while a job waits for space, seconds: expected starts move with time alone."""


def waits_for_space(job: Job, buffer: Buffer | None) -> bool:
    """Return whether a job that no early gate blocks is a candidate for space of its pool.

    External jobs never are.
    """
    return (
        job.external_job is None
        and job.state is JobState.PENDING
        and buffer is not None
        and buffer.state is BufferState.PENDING
    )


def current_verdict(state: State, job: Job, buffer: Buffer | None) -> Verdict:
    """Return the verdict on a job without regard to the queues, for jobs that the cycle has no further decision on."""
    if job.external_job is not None and buffer is not None:
        return external_job_verdict(state, job, buffer)
    if job.state is not JobState.PENDING:
        return later_reason(state, job, buffer)
    return early_gate(state, job) or buffer_gate(state, job, buffer) or Verdict(Reason.NONE, "nothing blocks the job")


def reservation_of(state: State, job_id: int) -> str:
    """Return the reservation of a job, or an empty string."""
    options = state.jobs[job_id].request.options
    return "" if options is None else options.reservation
