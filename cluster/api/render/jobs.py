"""Views of a state for clients: one function per view, for current and past states alike."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from forebay.cluster.api.render.events import verdict_words
from forebay.cluster.api.render.reasons import JobVerdicts
from forebay.cluster.schemas import (
    NO_DETAILS,
    BufferView,
    JobDetailsView,
    JobView,
    LostJobView,
    NodeView,
    PoolView,
    WhyView,
    made_of,
    shared_fields,
)
from forebay.cluster.system import format_instant
from forebay.replica.decide import overcommitted_bytes
from forebay.replica.messages import SubmitJob
from forebay.replica.model import (
    NATIVE,
    NO_OPTIONS,
    Buffer,
    Dependency,
    Hold,
    Job,
    JobOptions,
    JobRequest,
    NodeState,
    PersistentBuffer,
    PoolUnit,
    destinations_of,
    error_path,
    input_path,
    output_path,
    pool_unit,
    takes_cpus,
)
from forebay.replica.operations import external_job_phase, loses_results, loss_of
from forebay.replica.scheduler import dependency_jobs, is_dependency_met
from forebay.replica.state import State
from forebay.replica.values import MICROSECONDS_PER_SECOND, Instant, Reason, Verdict
from forebay.replica.views import buffer_path, buffer_word, job_tres, pool_use

if TYPE_CHECKING:
    from forebay.cluster.server import AgentContacts

_HOLDS: dict[Hold, Literal["user", "admin", "system"] | None] = {
    Hold.NONE: None,
    Hold.USER: "user",
    Hold.ADMIN: "admin",
    Hold.SYSTEM: "system",
}


_OF_OPTIONS = shared_fields(JobOptions, JobDetailsView)

DRAINING = "DRAINING"
NODE_WORDS = frozenset({*(state.name for state in NodeState), DRAINING})
"""Displayed states of a node."""

BLOCKERS_MAX = 100
"""Blocking jobs listed, count; more do not help a user."""


def job_words(state: State, job_id: int) -> str:
    """Return a job's display name: `13`, or `10_3` for task 3 of array 10."""
    return task_words(state, job_id) or str(job_id)


def task_words(state: State, job_id: int) -> str | None:
    """Return the display name of an array task, such as `10_3`; None for other jobs."""
    array = state.jobs[job_id].request.array if job_id in state.jobs else None
    return None if array is None else f"{array.job}_{array.task}"


def left_out(command: SubmitJob, decided: JobRequest) -> tuple[str, ...]:
    """Return the warning that lists requested options the job does not have, if any."""
    asked, has = command.request.effective_options, decided.effective_options
    names = list(command.ignored)
    for field in command.if_defined:
        if field == "licenses":
            names += [f"--licenses={name}" for name, _ in asked.licenses if name not in dict(has.licenses)]
        elif (wanted := getattr(asked, field)) and wanted != getattr(has, field):
            names.append(f"--{field}={wanted}")
    return (f"options without effect here: {', '.join(names)}",) if names else ()


def details_of(state: State, job: Job) -> JobDetailsView | None:
    """Return a job's details at `state`; None if all are default."""
    request, before = job.request, job.effective_interruptions
    options, array = request.effective_options, request.array
    if options is NO_OPTIONS and array is None and job.interruptions is None and not request.deadline:
        return None
    own: dict[str, Any] = {name: value for name in _OF_OPTIONS if (value := getattr(options, name)) != ""}
    if array is not None:
        own |= {"array_job_id": array.job, "array_task_id": array.task, "array_throttle": array.throttle}
    own |= {
        "gid": options.gid or None,
        "licenses": tuple(f"{name}:{count}" for name, count in options.licenses),
        "dependency_any": options.any_of,
        "error": error_path(request, job.id, job.node) or None,
        "input": input_path(request, job.id, job.node) or None,
        "restarts": before.requeues,
        "deadline": format_instant(request.deadline),
        "suspend_time": format_instant(before.suspended_at),
        "suspended_s": before.suspended_us // MICROSECONDS_PER_SECOND,
    }
    details = JobDetailsView(**own)
    return None if details == NO_DETAILS else details


def job_view(state: State, job_id: int, known: JobVerdicts, *, warnings: tuple[str, ...] = ()) -> JobView:
    """Return one job at `state`. `known`: reasons jobs wait.

    Raises:
        KeyError: The job does not exist.
    """
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    request = job.request
    return JobView(
        job_id=job.id,
        name=request.name,
        user=request.user,
        state=job.state.name,
        reason=known.reason(job_id),
        burst_buffer=None if request.buffer is None else request.buffer.text,
        burst_buffer_state=buffer_word(state, job_id),
        pool=None if buffer is None or not buffer.pool else buffer.pool,
        capacity_bytes=0 if buffer is None else buffer.granted_bytes,
        node=job.node or None,
        mover=job.mover or None,
        priority=request.priority,
        attempt=job.attempt,
        cpus=request.cpus,
        time_limit_s=request.time_limit_s,
        submit_time=format_instant(job.submitted_at),
        eligible_time=format_instant(Instant(max(job.submitted_at, request.begin_at))),
        start_time=format_instant(job.started_at),
        end_time=format_instant(job.ended_at),
        exit_code=job.exit_code,
        signal=job.signal,
        hold=_HOLDS[job.hold],
        system_comment=job.comment,
        workdir=request.workdir,
        output=output_path(request, job.node),
        dependencies=tuple(f"{dependency.kind.word}:{dependency.job}" for dependency in request.dependencies),
        cancelled=job.cancelled,
        warnings=warnings,
        tres=job_tres(state, job_id),
        **external_job_fields(state, job_id),
        epoch=None if job.external_job is None else job.external_job.epoch,
        details=details_of(state, job),
        revision=state.revision,
    )


def capacity_controls(state: State) -> tuple[str, ...]:
    """Return the capacity control methods of nodes that are not down; none with a site's provider."""
    if state.site.provider != NATIVE:
        return ()
    return tuple(sorted({node.capacity_control for node in state.nodes.values() if not node.down} - {""}))


def pool_view(state: State, name: str, buffers: int, controls: tuple[str, ...]) -> PoolView:
    """Return one pool at `state`.

    `buffers` is the number of buffers with space in it, `controls` the result of `capacity_controls`.

    Raises:
        KeyError: The pool does not exist.
    """
    use = pool_use(state, name)
    unit = pool_unit(state.pools, name)
    return made_of(
        use.pool,
        PoolView,
        held_bytes=use.held_bytes,
        free_bytes=use.free_bytes,
        buffers=buffers,
        unit=unit.word,
        capacity_control=controls if unit is PoolUnit.BYTES else (),
        overcommitted_bytes=overcommitted_bytes(use.pool, use.held_bytes),
        revision=state.revision,
    )


def holders(state: State) -> dict[str, int]:
    """Return the number of job buffers and persistent buffers with space in each pool."""
    persistent = Counter(buffer.pool for buffer in state.persistent.values())
    return {name: len(state.holders.get(name, ())) + persistent[name] for name in state.pools}


def buffer_view(state: State, job_id: int, *, path: bool = False) -> BufferView:
    """Return the buffer of one job at `state`, with its path if `path`.

    Raises:
        KeyError: The job has no buffer.
    """
    buffer, request = state.buffers[job_id], state.jobs[job_id].request
    asked = request.buffer
    assert asked is not None  # a job with a buffer requested one
    return _buffer_view(
        state,
        buffer,
        job_id=buffer.job,
        task=task_words(state, job_id),
        user=request.user,
        requested_bytes=asked.capacity_bytes,
        access=tuple(way.name.lower() for way in asked.access),
        type=asked.type,
        request=asked.text,
        path=buffer_path(state, job_id) if path else None,
        **external_job_fields(state, job_id),
    )


def external_job_fields(state: State, job_id: int) -> dict[str, Any]:
    """Return the additional fields of an external job; none for Forebay's own jobs."""
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    if job.external_job is None or buffer is None:
        return {}
    return {"external_job": job.external_job.name, "phase": external_job_phase(job, buffer).value}


def persistent_view(state: State, name: str) -> BufferView:
    """Return one persistent buffer at `state`.

    Raises:
        KeyError: The buffer does not exist.
    """
    buffer = state.persistent[name]
    filesystem = state.filesystems.get(buffer.filesystem)
    return _buffer_view(
        state,
        buffer,
        job_id=None,
        requested_bytes=buffer.granted_bytes,
        access=tuple(way.name.lower() for way in buffer.access),
        made_by=buffer.job or None,
        path=None if filesystem is None else f"{filesystem.path}/{buffer.directory}",
    )


def _buffer_view(state: State, buffer: Buffer | PersistentBuffer, **differing: Any) -> BufferView:
    """Return the view of a buffer of either kind; `differing` are the fields that differ between the kinds."""
    return made_of(
        buffer,
        BufferView,
        state=buffer.state.word,
        pool=buffer.pool or None,
        capacity_bytes=buffer.granted_bytes,
        node=buffer.node or None,
        create_time=format_instant(buffer.created_at),
        change_time=format_instant(buffer.changed_at),
        unit=pool_unit(state.pools, buffer.pool).word,
        revision=state.revision,
        **differing,
    )


def node_word(state: State, name: str) -> str:
    """Return the displayed state of a node, one of NODE_WORDS.

    Raises:
        KeyError: The node does not exist.
    """
    found = state.nodes[name].state
    # Slurm's word for a drained node that is still busy.
    return DRAINING if found is NodeState.DRAINED and state.on_node.get(name) else found.name


def node_view(state: State, name: str, liveness: AgentContacts | None) -> NodeView:
    """Return one node at `state` with its jobs. `liveness`: None on a replica that does not lead.

    Raises:
        KeyError: The node does not exist.
    """
    node, jobs = state.nodes[name], sorted(state.on_node.get(name, ()))
    return made_of(
        node,
        NodeView,
        state=node_word(state, name),
        cpus_in_use=sum(
            state.jobs[job].request.cpus
            for job in jobs
            if state.jobs[job].node == name and takes_cpus(state.jobs[job], state.buffers.get(job))
        ),
        registered_time=format_instant(node.registered_at),
        jobs=tuple(jobs),
        tasks={job: task for job in jobs if (task := task_words(state, job)) is not None},
        last_contact_s=None if liveness is None else liveness.last_contact_s(name),
        abandoned=() if name not in state.abandoned else tuple(one.job for one in state.abandoned[name].buffers),
        revision=state.revision,
    )


def lost_job_view(state: State, job_id: int) -> LostJobView:
    """Return the outcome for a job if its node is lost.

    Raises:
        KeyError: The job does not exist.
    """
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    return LostJobView(
        job_id=job_id,
        task=task_words(state, job_id),
        user=job.request.user,
        name=job.request.name,
        state=job.state.name,
        burst_buffer_state=buffer_word(state, job_id),
        loss=loss_of(state, job, buffer).value,
        results=tuple(sorted(destinations_of(job.request))) if loses_results(job, buffer) else (),
    )


def why_view(state: State, job_id: int, verdict: Verdict) -> WhyView:
    """Explain the reason of a job's state."""
    job, blockers = state.jobs[job_id], _blockers(state, job_id, verdict)
    return WhyView(
        revision=state.revision,
        at=format_instant(state.at) or "",
        job_id=job_id,
        name=job_words(state, job_id),
        state=job.state.name,
        reason=str(verdict.reason),
        burst_buffer_state=buffer_word(state, job_id),
        sentence=verdict_words(verdict),
        blockers=blockers,
        blocking=tuple(
            f"{job_words(state, other)} (held)" if state.jobs[other].hold else job_words(state, other)
            for other in blockers
        ),
    )


def _blockers(state: State, job_id: int, verdict: Verdict) -> tuple[int, ...]:
    """Return the jobs that hold the pool space this job waits for, or must end first."""
    if verdict.reason == Reason.BURST_BUFFER_RESOURCES:
        pool = state.buffers[job_id].pool
        found = iter(sorted(job for job in state.holders.get(pool, ()) if job != job_id))
    elif verdict.reason == Reason.DEPENDENCY:
        request = state.jobs[job_id].request
        found = (
            other
            for dependency in request.dependencies
            for other in sorted(dependency_jobs(state, dependency))
            if not is_dependency_met(state, Dependency(dependency.kind.for_job, other), request.buffer is not None)
        )
    else:
        return ()
    return tuple(islice(found, BLOCKERS_MAX))
