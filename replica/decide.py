"""Deciding: what a request leads to. It changes nothing (law 2): the answer is events, or a refusal.

One function per command. Each checks who asks, then what is asked, then whether the state allows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from replica import commands as c
from replica import events as e
from replica import features
from replica.buffers import BufferState
from replica.jobs import ENDED, Hold, Job, JobState
from replica.limits import CPUS_MAX, MESSAGE_CHARACTERS_MAX, NODES_MAX, POOLS_MAX
from replica.names import name_fault
from replica.policy import check_policy
from replica.pools import Pool
from replica.refusals import Refusal, RefusalCode
from replica.scheduling import events_of_pass
from replica.staging import active_stage, failed, script_ended, succeeded, waiting_stage
from replica.state import Facts, State
from replica.submission import job_submitted
from replica.units import NEVER, Instant


class Accepted(msgspec.Struct, frozen=True):
    """A request that is carried out: what happens because of it, possibly nothing."""

    events: tuple[e.Event, ...]


Decision = Accepted | Refusal

_NOTHING = Accepted(())


def decide(state: Facts, request: c.Request, at: Instant) -> Decision:
    """Return what `request` leads to at `state` and `at`. TypeError where it takes a whole State: see `is_by_key`."""
    command, actor = request.command, request.actor
    kind = type(command)
    if actor.role not in _WHO_MAY[kind] or (kind in _AGENT_ONLY and not _is_own_node(actor, command)):
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            f"{actor} may not {c.kind_of(command).replace('_', ' ')}",
            "use the identity of somebody who may",
        )
    if not state.feature_level and not isinstance(command, c.FoundCluster):
        return Refusal(RefusalCode.NOT_FOUNDED, "the cluster has not been founded yet", "try again in a moment")
    by_key = _BY_KEY.get(kind)
    if by_key is not None:
        return by_key(state, actor, command, at)
    if not isinstance(state, State):
        raise TypeError(f"deciding {c.kind_of(command)} walks over jobs and takes a whole State")
    return _BY_WALKING[kind](state, actor, command, at)


def is_by_key(command: c.Command) -> bool:
    """Whether deciding `command` only looks things up, so that Facts such as a Draft are enough for it."""
    return type(command) in _BY_KEY


def _is_own_node(actor: c.Actor, command: c.Command) -> bool:
    return not isinstance(command, c.RegisterNode | c.ReportOperation) or command.node == actor.name


_AGENT_ONLY = frozenset({c.RegisterNode, c.ReportOperation})
_PEOPLE = frozenset({c.ActorRole.USER, c.ActorRole.OPERATOR})
_OPERATOR = frozenset({c.ActorRole.OPERATOR})
_CONTROLLER = frozenset({c.ActorRole.CONTROLLER})
_AGENT = frozenset({c.ActorRole.AGENT})

_WHO_MAY: dict[type, frozenset[c.ActorRole]] = {
    c.FoundCluster: _CONTROLLER,
    c.MarkNodeDown: _CONTROLLER,
    c.MarkNodeBack: _CONTROLLER,
    c.RunSchedulingPass: _CONTROLLER,
    c.SetPool: _OPERATOR,
    c.SetPolicy: _OPERATOR,
    c.DrainNode: _OPERATOR,
    c.ResumeNode: _OPERATOR,
    c.RaiseFeatureLevel: _OPERATOR,
    c.RegisterNode: _AGENT,
    c.ReportOperation: _AGENT,
    c.SubmitJob: _PEOPLE,
    c.CancelJob: _PEOPLE,
    c.HoldJob: _PEOPLE,
    c.ReleaseJob: _PEOPLE,
}
"""Who may send which command; an agent for its own node only."""


# Cluster, pools, nodes -------------------------------------------------------------------------------------------


def _found_cluster(state: Facts, actor: c.Actor, command: c.FoundCluster, at: Instant) -> Decision:
    if state.feature_level:
        return Refusal(RefusalCode.ALREADY_FOUNDED, f"the cluster {state.name!r} is founded", "join it instead")
    refusal = check_policy(command.policy)
    for pool in command.pools:
        refusal = refusal or _pool_refusal(pool)
    if refusal is None and sum(pool.is_default for pool in command.pools) > 1:
        refusal = Refusal(
            RefusalCode.INVALID_FIELD, "more than one pool is the default", "leave default on one", "pool.default"
        )
    if refusal is not None:
        return refusal
    return Accepted((e.ClusterFounded(command.cluster_id, command.name, command.policy, command.pools),))


def _pool_refusal(pool: Pool) -> Refusal | None:
    fault = name_fault(pool.name)
    if fault is not None:
        return Refusal(RefusalCode.INVALID_FIELD, f"the pool name {fault}", "choose another name", "pool.name")
    if pool.granularity_bytes <= 0:
        return Refusal(
            RefusalCode.INVALID_FIELD,
            f"granularity is {pool.granularity_bytes}",
            "use at least 1 byte",
            "pool.granularity",
        )
    if pool.quantity_bytes < 0 or pool.out_of_service_bytes < 0:
        return Refusal(RefusalCode.INVALID_FIELD, "quantity is negative", "use 0 or more bytes", "pool.quantity")
    return None


def _set_pool(state: Facts, actor: c.Actor, command: c.SetPool, at: Instant) -> Decision:
    pool = command.pool
    refusal = _pool_refusal(pool)
    if refusal is not None:
        return refusal
    if pool.name not in state.pools and len(state.pools) >= POOLS_MAX:
        return Refusal(
            RefusalCode.LIMIT_EXCEEDED, f"there are {POOLS_MAX} pools", "change one that exists", "pool.name"
        )
    events: list[e.Event] = []
    if pool.is_default:
        events.extend(
            e.PoolSet(msgspec.structs.replace(other, is_default=False))
            for name, other in sorted(state.pools.items())
            if other.is_default and name != pool.name
        )
    if state.pools.get(pool.name) != pool:
        events.append(e.PoolSet(pool))
    return Accepted(tuple(events))


def _set_policy(state: Facts, actor: c.Actor, command: c.SetPolicy, at: Instant) -> Decision:
    refusal = check_policy(command.policy)
    if refusal is not None:
        return refusal
    return Accepted((e.PolicySet(command.policy),)) if command.policy != state.policy else _NOTHING


def _raise_feature_level(state: Facts, actor: c.Actor, command: c.RaiseFeatureLevel, at: Instant) -> Decision:
    # Only codes that level 1 knows: a refusal is in the ledger, too.
    if command.level != state.feature_level + 1:
        return Refusal(
            RefusalCode.WRONG_STATE,
            f"the cluster has feature level {state.feature_level}, which goes up by one, not to {command.level}",
            "nothing is left to raise"
            if state.feature_level == features.FEATURE_LEVEL_KNOWN
            else f"raise it to {state.feature_level + 1}",
            "level",
        )
    without = [(member, known) for member, known in command.known if known < command.level]
    if without:
        who = ", ".join(f"{member} knows {known}" if known else f"{member} did not answer" for member, known in without)
        return Refusal(
            RefusalCode.WRONG_STATE,
            f"not every member is known to support feature level {command.level}: {who}"[:MESSAGE_CHARACTERS_MAX],
            "start a release that knows it on each of them; remove a member that does not come back",
            "level",
        )
    release = features.release_of(command.level)
    if not release or not command.known:
        return Refusal(
            RefusalCode.INVALID_FIELD, f"feature level {command.level} is unknown", "let a leader gather who knows it"
        )
    return Accepted((e.FeatureLevelRaised(command.level, release),))


def _register_node(state: State, actor: c.Actor, command: c.RegisterNode, at: Instant) -> Decision:
    fault = name_fault(command.node)
    if fault is not None:
        return Refusal(RefusalCode.INVALID_FIELD, f"the node name {fault}", "choose another name", "node")
    if not 1 <= command.cpus <= CPUS_MAX:
        return Refusal(
            RefusalCode.INVALID_FIELD, f"cpus is {command.cpus}", f"use a number from 1 to {CPUS_MAX}", "cpus"
        )
    known = state.nodes.get(command.node)
    if known is None and len(state.nodes) >= NODES_MAX:
        return Refusal(RefusalCode.LIMIT_EXCEEDED, f"there are {NODES_MAX} nodes", "use one that exists", "node")
    jobs = [state.jobs[job_id] for job_id in sorted(state.unfinished) if state.jobs[job_id].node == command.node]
    if known is not None and known.storage_id != command.storage_id and jobs:
        return Refusal(
            RefusalCode.STORAGE_CHANGED,
            f"node {command.node} came with another directory, but {len(jobs)} jobs have data in its former one",
            "start the agent with its former directory, or cancel those jobs first",
            "storage_id",
        )
    if known is not None and not known.down and (known.instance, known.cpus) == (command.instance, command.cpus):
        return _NOTHING
    events: list[e.Event] = [e.NodeRegistered(command.node, command.cpus, command.instance, command.storage_id)]
    if known is not None and known.instance != command.instance:
        # The agent before this one is gone: its unfinished staging starts again, and its late reports no longer count.
        # A script outlives its agent, so its order stays as it is.
        for job in jobs:
            stage = active_stage(job, state.buffers.get(job.id))
            if stage is not None and stage is not e.Stage.RUN:
                events.append(e.StageRetried(job.id, stage, job.attempt + 1, "the agent was restarted"))
    return Accepted(tuple(events))


def _known_node(state: Facts, node: str) -> Refusal | None:
    if node in state.nodes:
        return None
    return Refusal(RefusalCode.UNKNOWN_NODE, f"there is no node {node!r}", "forebay node list shows the nodes", "node")


def _drain_node(state: Facts, actor: c.Actor, command: c.DrainNode, at: Instant) -> Decision:
    refusal = _known_node(state, command.node)
    if refusal is not None:
        return refusal
    return Accepted((e.NodeDrained(command.node, command.reason[:MESSAGE_CHARACTERS_MAX]),))


def _resume_node(state: Facts, actor: c.Actor, command: c.ResumeNode, at: Instant) -> Decision:
    refusal = _known_node(state, command.node)
    if refusal is not None:
        return refusal
    return Accepted((e.NodeResumed(command.node),)) if state.nodes[command.node].drained else _NOTHING


def _mark_node_down(state: Facts, actor: c.Actor, command: c.MarkNodeDown, at: Instant) -> Decision:
    refusal = _known_node(state, command.node)
    if refusal is not None:
        return refusal
    return _NOTHING if state.nodes[command.node].down else Accepted((e.NodeWentDown(command.node, command.reason),))


def _mark_node_back(state: State, actor: c.Actor, command: c.MarkNodeBack, at: Instant) -> Decision:
    refusal = _known_node(state, command.node)
    if refusal is not None:
        return refusal
    if not state.nodes[command.node].down:
        return _NOTHING
    jobs = (state.jobs[job_id] for job_id in sorted(state.unfinished))
    waiting = tuple(job.id for job in jobs if job.node == command.node and job.order_at != NEVER)
    return Accepted((e.NodeCameBack(command.node, waiting),))


# Jobs --------------------------------------------------------------------------------------------------------------


def _submit_job(state: Facts, actor: c.Actor, command: c.SubmitJob, at: Instant) -> Decision:
    submitted = job_submitted(state, actor, command)
    return submitted if isinstance(submitted, Refusal) else Accepted((submitted,))


def _find_job(state: Facts, actor: c.Actor, job_id: int) -> Job | Refusal:
    """Return the job, if it exists and the actor may act on it."""
    job = state.jobs.get(job_id)
    if job is None:
        gone = 0 < job_id < state.next_job
        return Refusal(
            RefusalCode.UNKNOWN_JOB,
            f"job {job_id} is no longer in the state" if gone else f"there is no job {job_id}",
            f"forebay job history {job_id} shows what became of it" if gone else "forebay job list shows the jobs",
            "job",
        )
    if actor.role is c.ActorRole.USER and actor.name != job.spec.user:
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            f"job {job_id} is of user {job.spec.user}",
            "ask its user or an operator",
            "job",
        )
    return job


def _cancel_job(state: Facts, actor: c.Actor, command: c.CancelJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Refusal):
        return job
    buffer = state.buffers.get(job.id)
    if job.state is JobState.PENDING:
        if buffer is None or buffer.state is BufferState.PENDING:
            return Accepted((e.JobCancelled(job.id),))
        if buffer.state in (BufferState.STAGING_IN, BufferState.STAGED_IN):
            return Accepted(
                (
                    e.CancelRequested(job.id, command.hurry),
                    e.TeardownStarted(job.id, job.attempt + 1, JobState.CANCELLED, command.hurry, "cancelled"),
                )
            )
        return Accepted((e.CancelRequested(job.id, command.hurry),))
    if job.state in ENDED:
        if job.id not in state.unfinished:
            return Refusal(
                RefusalCode.WRONG_STATE, f"job {job.id} is already {job.state.name}", "nothing is left to cancel", "job"
            )
        return _NOTHING
    if job.state is JobState.STAGE_OUT:
        if not command.hurry:
            return _NOTHING
        return Accepted(
            (
                e.CancelRequested(job.id, True),
                e.TeardownStarted(
                    job.id, job.attempt + 1, job.result, True, "stage-out skipped: cancelled with --hurry"
                ),
            )
        )
    if job.cancelled and (job.hurry or not command.hurry):
        return _NOTHING
    return Accepted((e.CancelRequested(job.id, command.hurry),))


def _hold_job(state: Facts, actor: c.Actor, command: c.HoldJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Refusal):
        return job
    if job.state is not JobState.PENDING:
        return Refusal(
            RefusalCode.WRONG_STATE, f"job {job.id} is {job.state.name}", "only pending jobs can be held", "job"
        )
    hold = Hold.ADMIN if actor.role is c.ActorRole.OPERATOR and actor.name != job.spec.user else Hold.USER
    return _NOTHING if job.hold >= hold else Accepted((e.JobHeld(job.id, hold),))


def _release_job(state: Facts, actor: c.Actor, command: c.ReleaseJob, at: Instant) -> Decision:
    job = _find_job(state, actor, command.job)
    if isinstance(job, Refusal):
        return job
    if job.hold is Hold.ADMIN and actor.role is c.ActorRole.USER:
        return Refusal(
            RefusalCode.PERMISSION_DENIED,
            f"job {job.id} is held by an operator",
            "ask an operator to release it",
            "job",
        )
    events: list[e.Event] = []
    if job.hold is not Hold.NONE:
        events.append(e.JobReleased(job.id))
    buffer = state.buffers.get(job.id)
    stage = None if buffer is None else waiting_stage(job, buffer)
    if stage is not None:
        events.append(e.StageRetried(job.id, stage, job.attempt + 1, "released"))
    if not events:
        return Refusal(
            RefusalCode.WRONG_STATE,
            f"job {job.id} is not held and no operation of it has failed",
            "nothing is left to release",
            "job",
        )
    return Accepted(tuple(events))


# Reports -----------------------------------------------------------------------------------------------------------


def _report_operation(state: Facts, actor: c.Actor, command: c.ReportOperation, at: Instant) -> Decision:
    job = state.jobs.get(command.job)
    if job is None:
        return Refusal(RefusalCode.UNKNOWN_JOB, f"there is no job {command.job}", "drop the report", "job")
    buffer = state.buffers.get(job.id)
    stage = active_stage(job, buffer)
    if job.node != command.node or job.attempt != command.attempt or stage is not command.stage:
        ordered = "nothing" if stage is None else f"{stage.word} as attempt {job.attempt} on {job.node}"
        return Refusal(
            RefusalCode.STALE_ATTEMPT,
            f"job {job.id}: {command.stage.word} as attempt {command.attempt} on {command.node} is not ordered now, "
            f"but {ordered}",
            "drop the report",
            "attempt",
        )
    result = command.result
    if stage is e.Stage.RUN:
        if isinstance(result, c.ScriptStarted):
            if job.state is JobState.CONFIGURING:
                return Accepted((e.RunStarted(job.id),))
            return Refusal(
                RefusalCode.STALE_ATTEMPT, f"the start of job {job.id} is known", "drop the report", "result"
            )
        if isinstance(result, c.ScriptEnded) and result.result in ENDED:
            return Accepted(script_ended(job, buffer, result.result, result.exit_code, result.signal, result.message))
    elif buffer is not None:
        if isinstance(result, c.OperationDone):
            return Accepted(succeeded(job, buffer, stage, result.files, result.size_bytes, result.digest))
        if isinstance(result, c.OperationFailed):
            return Accepted(failed(state, job, stage, result.message, at, final=result.final))
    return Refusal(
        RefusalCode.INVALID_FIELD,
        f"a {type(result).__name__} is no answer to {stage.word}",
        "report what the order asks for",
        "result",
    )


def _run_scheduling_pass(state: State, actor: c.Actor, command: c.RunSchedulingPass, at: Instant) -> Decision:
    return Accepted(events_of_pass(state, at))


_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.FoundCluster: _found_cluster,
    c.SetPool: _set_pool,
    c.SetPolicy: _set_policy,
    c.DrainNode: _drain_node,
    c.ResumeNode: _resume_node,
    c.MarkNodeDown: _mark_node_down,
    c.SubmitJob: _submit_job,
    c.CancelJob: _cancel_job,
    c.HoldJob: _hold_job,
    c.ReleaseJob: _release_job,
    c.ReportOperation: _report_operation,
    c.RaiseFeatureLevel: _raise_feature_level,
}
_BY_WALKING: dict[type, Callable[[State, c.Actor, Any, Instant], Decision]] = {
    c.RegisterNode: _register_node,
    c.MarkNodeBack: _mark_node_back,
    c.RunSchedulingPass: _run_scheduling_pass,
}
