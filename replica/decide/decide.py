"""Decide commands: return the events of a request, or its rejection. Deciding changes nothing (law 2).

This module checks the sender's role, dispatches each command to its handler, and applies a command about an array to
its tasks. A handler checks permissions first, then the arguments, then the state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from forebay.replica.decide.accounts import ACCOUNTING_BY_KEY, PARTITIONS_BY_KEY
from forebay.replica.decide.arrays import jobs_of_tasks
from forebay.replica.decide.cluster import CLUSTER_BY_KEY, CLUSTER_BY_SCAN
from forebay.replica.decide.drills import DRILLS_BY_KEY
from forebay.replica.decide.external_jobs import EXTERNAL_JOBS_BY_KEY
from forebay.replica.decide.jobs import JOBS_BY_KEY, update_one
from forebay.replica.decide.persistent import PERSISTENT_BY_KEY
from forebay.replica.decide.sessions import SESSIONS_BY_KEY, SESSIONS_BY_SCAN, own_session_rejection
from forebay.replica.decide.sinks import SINKS_BY_KEY
from forebay.replica.decide.submit import submit_job
from forebay.replica.messages import Acceptance as Acceptance
from forebay.replica.messages import Decision as Decision
from forebay.replica.messages import Event
from forebay.replica.messages import commands as c
from forebay.replica.model import QUEUED_STAGES
from forebay.replica.operations import SLOT_EVENTS, OperationSlots, assign_slots, assign_slots_in_steps
from forebay.replica.scheduler import SchedulingIndex, run_cycle
from forebay.replica.state import Facts, State
from forebay.replica.values import Instant, Rejection, RejectionCode, Steps, run_to_end


def decide(state: Facts, request: c.Request, at: Instant) -> Decision:
    """Return the decision on `request` in `state` at the time `at`.

    Raises:
        TypeError: The command needs a complete State (see `is_by_key`).
    """
    command: Any = request.command
    actor, kind = request.actor, type(command)
    rejection = _permission_rejection(state, request)
    if rejection is not None:
        return rejection
    if _targets_array(state, command):
        return run_to_end(_decide_array(state, actor, command, at))
    by_key = _BY_KEY.get(kind)
    if by_key is not None:
        return _with_slots(state, by_key(state, actor, command, at))
    if not isinstance(state, State):
        raise TypeError(f"deciding {c.kind_of(command)} iterates over jobs and needs a complete State")
    return _BY_SCAN[kind](state, actor, command, at)


def decide_steps(state: Facts, request: c.Request, at: Instant) -> Steps[Decision]:
    """Decide as `decide` does, in steps if the command concerns several jobs (`jobs_of_command`)."""
    rejection = _permission_rejection(state, request)
    if rejection is not None or not _targets_array(state, request.command):
        return decide(state, request, at)
    return (yield from _decide_array(state, request.actor, request.command, at))


def jobs_of_command(state: Facts, command: Any) -> int:
    """Return the number of jobs that a command creates or concerns, at least 1. The cost of deciding grows with it."""
    if not _targets_array(state, command):
        return 1
    if type(command) is c.SubmitJob:
        return len(command.tasks)
    return max(1, len(state.arrays.get(command.job, ())) if command.tasks is None else len(command.tasks))


def _targets_array(state: Facts, command: Any) -> bool:
    """Return whether a command targets an array. Most commands target one job and skip the array path."""
    kind = type(command)
    if kind is c.SubmitJob:
        return bool(command.tasks)
    return kind in _ARRAY_COMMANDS and (command.tasks is not None or command.job in state.arrays)


def _decide_array(state: Facts, actor: c.Actor, command: Any, at: Instant) -> Steps[Decision]:
    """Decide a command about an array, with at least one step per task."""
    if isinstance(command, c.SubmitJob):
        submitted = yield from submit_job(state, actor, command)
        return submitted if isinstance(submitted, Rejection) else Acceptance((submitted,))
    decision = yield from _decide_tasks(state, actor, command, at)
    if isinstance(decision, Acceptance) and any(type(event) in SLOT_EVENTS for event in decision.events):
        slots = OperationSlots({stage: state.operations.get(stage, 0) for stage in QUEUED_STAGES})
        return Acceptance((yield from assign_slots_in_steps(state, slots, decision.events)))
    return decision


def _permission_rejection(state: Facts, request: c.Request) -> Rejection | None:
    """Return the rejection of a command that its sender may not send, or not yet; else None."""
    command, actor, kind = request.command, request.actor, type(request.command)
    if actor.role not in _ROLES_OF[kind]:
        roles = " or ".join(sorted(role.name.lower() for role in _ROLES_OF[kind]))
        return Rejection(
            RejectionCode.PERMISSION_DENIED,
            f"permission denied: {c.kind_of(command).replace('_', ' ')} requires the role {roles}",
            "use an identity with this role",
        )
    if kind in _AGENT_ONLY and not _is_own_node(actor, command):
        return Rejection(
            RejectionCode.PERMISSION_DENIED,
            f"permission denied: agent {actor.name} may act only for its own node",
            "use the certificate of that node",
        )
    if not state.feature_level and not isinstance(command, c.FoundCluster):
        return Rejection(RejectionCode.NOT_FOUNDED, "the cluster has not been founded yet", "try again in a moment")
    if isinstance(command, c.CloseSession):
        return own_session_rejection(request, command)
    return None


def _decide_tasks(state: Facts, actor: c.Actor, command: Any, at: Instant) -> Steps[Decision]:
    """Decide a command for each of the selected tasks of an array, all in one entry.

    The command is rejected if it is rejected for every task, with the rejection of the first one.
    """
    jobs = jobs_of_tasks(state, command.job, command.tasks)
    assert jobs is not None  # because `_targets_array` returned true
    if isinstance(jobs, Rejection):
        return jobs
    decide_one = _BY_KEY[type(command)]
    first: Rejection | None = None
    events: list[Event] = []
    refused = 0
    for job_id in jobs:
        if isinstance(command, c.UpdateJob):
            decision = update_one(state, actor, command, job_id, len(jobs))
            # The dependencies are checked for cycles for each task.
            cost = STEPS_OF_DEPENDENCIES if command.change.dependencies or command.after_tasks else STEPS_OF_UPDATE
        else:
            one = msgspec.structs.replace(command, job=job_id, tasks=None)
            decision, cost = decide_one(state, actor, one, at), 1
        if isinstance(decision, Rejection):
            first, refused = first or decision, refused + 1
        else:
            events.extend(decision.events)
        yield cost
    return first if first is not None and refused == len(jobs) else Acceptance(tuple(events))


STEPS_OF_UPDATE = 2
STEPS_OF_DEPENDENCIES = 64
"""Cost of deciding the update of one task, in steps, with and without a change of dependencies."""

_ARRAY_COMMANDS = frozenset(
    (c.SubmitJob, c.CancelJob, c.HoldJob, c.ReleaseJob, c.SuspendJob, c.ResumeJob, c.RequeueJob, c.UpdateJob)
)
"""Commands that may target an array or some of its tasks."""


def _with_slots(state: Facts, decision: Decision) -> Decision:
    """Queue the operations of a decision that find all slots of their stage taken."""
    if isinstance(decision, Rejection):
        return decision
    for event in decision.events:
        if type(event) in SLOT_EVENTS:
            break
    else:
        return decision
    slots = OperationSlots({stage: state.operations.get(stage, 0) for stage in QUEUED_STAGES})
    return Acceptance(assign_slots(state, slots, decision.events))


def is_by_key(command: c.Command) -> bool:
    """Return whether deciding `command` needs only lookups, so that a StateBuilder suffices."""
    return type(command) in _BY_KEY


def _is_own_node(actor: c.Actor, command: c.Command) -> bool:
    return not isinstance(command, c.RegisterNode | c.ReportOperation) or command.node == actor.name


_AGENT_ONLY = frozenset({c.RegisterNode, c.ReportOperation})
_USERS = frozenset({c.ActorRole.USER, c.ActorRole.OPERATOR})
_OPERATOR = frozenset({c.ActorRole.OPERATOR})
_CONTROLLER = frozenset({c.ActorRole.CONTROLLER})
_AGENT = frozenset({c.ActorRole.AGENT})
_SCHEDULER = frozenset({c.ActorRole.SCHEDULER})
_DRILL = frozenset({c.ActorRole.DRILL})

_ROLES_OF: dict[type, frozenset[c.ActorRole]] = {
    c.FoundCluster: _CONTROLLER,
    c.MarkNodeDown: _CONTROLLER,
    c.MarkNodeBack: _CONTROLLER,
    c.RunSchedulingCycle: _CONTROLLER,
    c.SettleMails: _CONTROLLER,
    **dict.fromkeys(SINKS_BY_KEY, _CONTROLLER),
    c.RecoverCluster: _OPERATOR,
    c.SetPool: _OPERATOR,
    c.ChangePool: _OPERATOR | _CONTROLLER,
    c.RemovePool: _OPERATOR,
    c.AddFilesystem: _OPERATOR,
    c.RemoveFilesystem: _OPERATOR,
    c.ConfigureSite: _OPERATOR,
    c.AdmitNode: _OPERATOR,
    c.DrainNode: _OPERATOR,
    c.ResumeNode: _OPERATOR,
    c.LoseNode: _OPERATOR,
    c.RaiseFeatureLevel: _OPERATOR | _CONTROLLER,
    c.RevokeCertificate: _OPERATOR,
    c.UnrevokeCertificate: _OPERATOR,
    c.SetClock: _OPERATOR,
    c.RegisterNode: _AGENT,
    c.ReportOperation: _AGENT,
    **dict.fromkeys(ACCOUNTING_BY_KEY, _OPERATOR),
    **dict.fromkeys(PARTITIONS_BY_KEY, _OPERATOR),
    c.SubmitJob: _USERS,
    c.CancelJob: _USERS,
    c.HoldJob: _USERS,
    c.ReleaseJob: _USERS,
    c.SuspendJob: _USERS,
    c.ResumeJob: _USERS,
    c.RequeueJob: _USERS,
    c.UpdateJob: _USERS,
    c.ClearBuffer: _OPERATOR,
    c.RestartOperations: _CONTROLLER,
    c.OpenSession: _USERS,
    c.CloseSession: _USERS,
    c.ExpireCachedReplies: _CONTROLLER,
    c.RecordStateDigest: _CONTROLLER,
    c.RecordHistories: _CONTROLLER,
    **dict.fromkeys(EXTERNAL_JOBS_BY_KEY, _SCHEDULER),
    **dict.fromkeys(PERSISTENT_BY_KEY, _SCHEDULER),
    c.ReleaseScheduler: _OPERATOR,
    **dict.fromkeys(DRILLS_BY_KEY, _OPERATOR),
    **dict.fromkeys((c.StartDrill, c.AbortDrill, c.EndDrill, c.ProbeDrill), _OPERATOR | _DRILL),
    c.ExportBuffer: _USERS,
}
"""Command type -> permitted roles. An agent acts for its own node only, a scheduler for its own external jobs only."""


def _run_scheduling_cycle(state: State, actor: c.Actor, command: c.RunSchedulingCycle, at: Instant) -> Decision:
    return Acceptance(run_cycle(SchedulingIndex(state), at))


_BY_KEY = {
    **CLUSTER_BY_KEY,
    **JOBS_BY_KEY,
    **EXTERNAL_JOBS_BY_KEY,
    **DRILLS_BY_KEY,
    **PERSISTENT_BY_KEY,
    **SESSIONS_BY_KEY,
    **SINKS_BY_KEY,
}
_BY_SCAN: dict[type, Callable[[State, c.Actor, Any, Instant], Decision]] = {
    c.RunSchedulingCycle: _run_scheduling_cycle,
    **CLUSTER_BY_SCAN,
    **SESSIONS_BY_SCAN,
}
