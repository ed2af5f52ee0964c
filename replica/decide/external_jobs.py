"""Decide a scheduler's commands about its external jobs: a table with an outcome for each phase and command.

A scheduler repeats calls whose result it does not know: after its restart, or from another host; a killed call may
still arrive. Whether a command is a repeat or a no-op therefore depends on the phase of its external job, never on a
cached reply. Three rules make the table:

1. A command that asks for less than there is succeeds: a stage-in of staged data, the end of an ended run, a teardown
   during teardown. For an external job that does not exist, the end of a run, a stage-out and a teardown succeed.
2. A command that asks for more than the external job ever had is rejected: a run without staged data, a stage-in after
   teardown.
3. No command except a teardown with hurry deletes the only copy of results, not even a setup.

A teardown without hurry retains the buffer of a job that ran and requested a stage-out. The buffer of a job that never
ran lingers; if the teardown has a reason, as from the bridge's reconciliation, it is removed at once.

Sources: SLURM-OBSERVED.md, 2 (failures, cancel, restart) and 5 (the functions of burst_buffer.lua).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from forebay.replica.decide.accounts import admit_request, check_own_limits
from forebay.replica.decide.buffer_request import find_pool, persistent_fault, resolve_buffer, resolve_space
from forebay.replica.decide.checks import RejectionError, check_name, names_remedy, require
from forebay.replica.messages import NOTHING, Acceptance, Decision, decision_of
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    NATIVE,
    Access,
    BufferRequest,
    BufferState,
    ExternalJob,
    Job,
    JobOptions,
    JobRequest,
    JobState,
    Scheduler,
    Stage,
    check_user_lists,
    external_job_id_fault,
    external_job_name,
    scheduler_fault,
    with_options,
)
from forebay.replica.operations import (
    ExternalJobLookup,
    ExternalJobPhase,
    choose_external_job_mover,
    external_job_phase,
    filesystems_of,
    find_external_job,
    has_results,
    stage_out_event,
)
from forebay.replica.state import Facts
from forebay.replica.values import (
    SCHEDULERS_MAX,
    Instant,
    Rejection,
    RejectionCode,
    has_control_character,
    limits,
    name_fault,
)

Events = tuple[e.Event, ...]


class ExternalJobOutcome(Enum):
    """Outcome of a scheduler's command."""

    DONE = auto()
    """Accept and change nothing: the requested state holds, or is under way."""
    REJECT = auto()
    BEGIN_EPOCH = auto()
    """Begin the next epoch, and leave the previous one alone."""
    REPLACE = auto()
    """Remove the previous epoch, which never ran, and begin the next one."""
    SUPERSEDE = auto()
    """Retain the results of the previous epoch, or remove it if it has none, and begin the next one."""
    REACTIVATE = auto()
    """Begin the next epoch with the space and the data of the lingering one."""
    STAGE_IN = auto()
    RETRY = auto()
    """Order the failed operation again."""
    RUN = auto()
    END_RUN = auto()
    EXPORT = auto()
    """Stage out the results, then tear the buffer down."""
    CANCEL_SETUP = auto()
    """Stop waiting for space."""
    LINGER = auto()
    """Keep the data for a while if there is any, else release the space."""
    RETAIN = auto()
    """Retain the results if there are any, else tear the buffer down."""
    DISCARD = auto()
    """Tear the buffer down with its results."""


class SchedulerCommand(Enum):
    """Commands of a scheduler that the table distinguishes. The values are shown in messages."""

    SETUP = "setup"
    SETUP_OF_ANOTHER = "setup of another"
    """A setup with other directives or another user than the latest epoch's."""
    STAGE_IN = "stage-in"
    BEGIN_RUN = "begin of the run"
    END_RUN = "end of the run"
    STAGE_OUT = "stage-out"
    TEAR_DOWN = "teardown"
    TEAR_DOWN_HURRY = "teardown --hurry"


_P, _O = ExternalJobPhase, ExternalJobOutcome
_NO_EPOCH = (_O.BEGIN_EPOCH, _O.BEGIN_EPOCH, _O.REJECT, _O.REJECT, _O.DONE, _O.DONE, _O.DONE, _O.DONE)
_EXPORTED = (_O.SUPERSEDE, _O.SUPERSEDE, _O.DONE, _O.REJECT, _O.DONE)
_NOT_RUN = (_O.DONE, _O.DONE)
_HELD = (_O.LINGER, _O.LINGER)
_RAN = (_O.RETAIN, _O.DISCARD)

_ROWS: Final = {
    _P.NONE: _NO_EPOCH,
    _P.WAITING: (_O.DONE, _O.REPLACE, _O.REJECT, _O.REJECT, *_NOT_RUN, _O.CANCEL_SETUP, _O.CANCEL_SETUP),
    _P.SET_UP: (_O.DONE, _O.REPLACE, _O.STAGE_IN, _O.REJECT, *_NOT_RUN, *_HELD),
    _P.STAGING_IN: (_O.DONE, _O.REPLACE, _O.DONE, _O.REJECT, *_NOT_RUN, *_HELD),
    _P.STAGE_IN_FAILED: (_O.DONE, _O.REPLACE, _O.RETRY, _O.REJECT, *_NOT_RUN, *_HELD),
    _P.STAGED_IN: (_O.DONE, _O.REPLACE, _O.DONE, _O.RUN, *_NOT_RUN, *_HELD),
    _P.RUNNING: (_O.SUPERSEDE, _O.SUPERSEDE, _O.DONE, _O.DONE, _O.END_RUN, _O.EXPORT, *_RAN),
    # A scheduler that lost the end of the run in a crash may run the job again.
    _P.POST_RUN: (*_EXPORTED[:3], _O.DONE, _O.DONE, _O.EXPORT, *_RAN),
    _P.STAGING_OUT: (*_EXPORTED, _O.DONE, *_RAN),
    _P.STAGE_OUT_FAILED: (*_EXPORTED, _O.RETRY, *_RAN),
    _P.LINGERING: (_O.REACTIVATE, _O.REPLACE, _O.REJECT, _O.REJECT, *_NOT_RUN, _O.DONE, _O.DONE),
    _P.RETAINED: (_O.BEGIN_EPOCH, _O.BEGIN_EPOCH, _O.REJECT, _O.REJECT, _O.DONE, _O.EXPORT, _O.DONE, _O.DONE),
    _P.TEARDOWN: _NO_EPOCH,
    _P.TEARDOWN_FAILED: (*_NO_EPOCH[:6], _O.RETRY, _O.RETRY),
    _P.OVER: _NO_EPOCH,
}

EXTERNAL_JOB_OUTCOMES: Final = {
    (phase, command): outcome
    for phase, row in _ROWS.items()
    for command, outcome in zip(SchedulerCommand, row, strict=True)
}
"""(phase of an external job, command of its scheduler) -> outcome."""


# ---- schedulers


def _register_scheduler(state: Facts, actor: c.Actor, command: c.RegisterScheduler, at: Instant) -> Decision:
    for field, fault in (
        ("scheduler", scheduler_fault(actor.name)),
        ("cluster", name_fault(command.cluster)),
        ("address", name_fault(command.address.replace(":", "_").strip("[]"))),
    ):
        if fault is not None:
            return Rejection(RejectionCode.INVALID_FIELD, f"the {field} {fault}", "choose another", field)
    known = state.schedulers.get(actor.name)
    if known is None and len(state.schedulers) >= SCHEDULERS_MAX:
        sentence = f"the limit of {SCHEDULERS_MAX} schedulers is reached"
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED, sentence, "release an unused one: forebay slurm release NAME", "scheduler"
        )
    rejection = None if known is None else _other_cluster_rejection(known, command.cluster)
    if rejection is not None:
        return rejection
    if known is not None and known.address == command.address:
        return NOTHING
    # Record the latest address, so that operators can find the scheduler.
    return Acceptance((e.SchedulerBound(Scheduler(actor.name, command.cluster, command.address)),))


def _other_cluster_rejection(known: Scheduler, cluster: str) -> Rejection | None:
    if known.cluster == cluster:
        return None
    return Rejection(
        RejectionCode.PERMISSION_DENIED,
        f"scheduler name {known.name} is in use by another cluster, last seen at {known.address}",
        "rename one of the two clusters; if the other one no longer exists, ask an operator to run: "
        f"forebay slurm release {known.name}",
        "cluster",
    )


def _release_scheduler(state: Facts, actor: c.Actor, command: c.ReleaseScheduler, at: Instant) -> Decision:
    if command.scheduler not in state.schedulers:
        remedy = names_remedy(state.schedulers, "no scheduler has registered")
        sentence = f"scheduler {command.scheduler[: limits.NAME_CHARACTERS_MAX]!r} does not exist"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, "scheduler")
    return Acceptance((e.SchedulerReleased(command.scheduler),))


def _find_target(state: Facts, actor: c.Actor, cluster: str, job: str, epoch: int) -> ExternalJobLookup | Rejection:
    """Return the external job that a command targets, or a Rejection if the scheduler may not send it."""
    rejection = scheduler_rejection(state, actor, cluster)
    fault = external_job_id_fault(job)
    if fault is not None and (rejection is None or rejection.code is not RejectionCode.WRONG_STATE):
        return Rejection(RejectionCode.INVALID_FIELD, f"the job {fault}", "send the job's ID", "job")
    return rejection or find_external_job(state, external_job_name(actor.name, job), epoch)


def scheduler_rejection(state: Facts, actor: c.Actor, cluster: str) -> Rejection | None:
    """Return the rejection of a scheduler that is not registered, or is registered for another cluster, else None."""
    known = state.schedulers.get(actor.name)
    if known is None:
        sentence = f"scheduler {actor.name} is not registered"
        return Rejection(RejectionCode.WRONG_STATE, sentence, "register it first", "cluster")
    return _other_cluster_rejection(known, cluster)


# ---- setup


def _set_up_external_job(state: Facts, actor: c.Actor, command: c.SetUpExternalJob, at: Instant) -> Decision:
    found = _find_target(state, actor, command.cluster, command.job, 0)
    if isinstance(found, Rejection):
        return found
    if command.epoch and (command.epoch < found.epoch or (command.epoch == found.epoch and found.phase not in _ALIVE)):
        return NOTHING  # a late repeat of a setup that was carried out
    try:
        request = _setup_request(state, command)
        digest = _digest(command.uid, request)
        external_job = None if found.job is None else found.job.external_job
        same = external_job is None or external_job.digest == digest
        asked = SchedulerCommand.SETUP if same else SchedulerCommand.SETUP_OF_ANOTHER
        outcome = EXTERNAL_JOB_OUTCOMES[found.phase, asked]
        if outcome is ExternalJobOutcome.DONE:
            return NOTHING
        if outcome is ExternalJobOutcome.REACTIVATE:
            assert found.job is not None
            return Acceptance((e.ExternalJobReactivated(found.job.id, found.epoch + 1),))
        begun = ExternalJob(actor.name, command.job, found.epoch + 1, digest, command.uid, since=at)
        # A rejected setup changes nothing, so the previous epoch ends only together with the start of the new one.
        begins = _new_epoch(state, actor, request, begun)
    except RejectionError as error:
        return error.rejection
    return Acceptance((*_end_previous_epoch(state, found, outcome), begins))


_ALIVE = frozenset({_P.WAITING, _P.SET_UP, _P.STAGING_IN, _P.STAGE_IN_FAILED, _P.STAGED_IN})
"""Phases of an epoch that was set up and has not run."""

_ENDED = frozenset({_P.NONE, _P.RETAINED, _P.TEARDOWN, _P.TEARDOWN_FAILED, _P.OVER})
"""Phases of an epoch after its teardown by the scheduler."""


def _setup_request(state: Facts, command: c.SetUpExternalJob) -> JobRequest:
    """Return the request of a setup, without the fields that external jobs do not have.

    Raises:
        RejectionError: The request is invalid, or not possible for external jobs.
    """
    asked, user = command.request.buffer, command.request.user
    if state.site.provider != NATIVE:
        sentence = f"external jobs require the provider {NATIVE}, but this site has {state.site.provider}"
        raise RejectionError(RejectionCode.WRONG_STATE, sentence, "ask an operator to change the provider", "")
    check_name("user", user)
    if not command.uid or user == "root":
        sentence = "User root can not allocate burst buffers"
        raise RejectionError(RejectionCode.ROOT_NOT_ALLOWED, sentence, "submit as another user", "user")
    if command.uid < 0:
        raise RejectionError(RejectionCode.INVALID_FIELD, f"uid is {command.uid}", "send the user's ID", "uid")
    require(check_user_lists(state.site, user, command.uid))
    if asked is None or not (asked.capacity_bytes or asked.uses):
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            "the job requests no space",
            "specify a capacity, and a pool in a shared filesystem",
            "capacity" if asked is None or len(asked.places) < 2 else asked.places[1],
        )
    _check_shared(asked)
    options = JobOptions(gid=command.request.effective_options.gid, groups=command.request.effective_options.groups)
    check_name("name", command.request.name)
    if has_control_character(command.request.workdir):
        raise RejectionError(RejectionCode.INVALID_FIELD, "workdir has a control character", "send a path", "workdir")
    plain = JobRequest(command.request.name, user, "", command.request.workdir, 0, cpus=0, buffer=asked)
    return with_options(plain, options)


def _check_shared(asked: BufferRequest) -> None:
    """Check that a buffer request does not depend on the job's nodes, which are unknown at setup.

    Raises:
        RejectionError: It does.
    """
    if Access.PRIVATE in asked.access:
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            "access_mode=private is not possible, because the job's nodes are not known yet",
            "use access_mode=striped",
            asked.places[1] if len(asked.places) > 1 else "access",
        )
    named = [record.place for record in asked.creates] + [record.place for record in asked.destroys]
    if named:
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            "an external job cannot create or destroy persistent buffers; its scheduler does that",
            "remove these directives",
            named[0],
        )
    require(persistent_fault(asked))


def _digest(uid: int, request: JobRequest) -> bytes:
    """Return the digest of a setup. A repeated setup has the same digest, wherever its script was."""
    assert request.buffer is not None
    asked = replace(request.buffer, places=())
    encoded = _ENCODER.encode((request.user, uid, request.effective_options.gid, request.workdir, asked))
    return hashlib.blake2b(encoded, digest_size=c.DIGEST_BYTES).digest()


_ENCODER = msgspec.msgpack.Encoder()


def _new_epoch(state: Facts, actor: c.Actor, request: JobRequest, external_job: ExternalJob) -> e.ExternalJobSetUp:
    """Return the event that begins an epoch.

    Raises:
        RejectionError: The request cannot be satisfied.
    """
    if len(state.unfinished) >= limits.JOBS_UNFINISHED_MAX:
        sentence = f"the limit of {limits.JOBS_UNFINISHED_MAX} unfinished jobs is reached"
        raise RejectionError(RejectionCode.LIMIT_EXCEEDED, sentence, "wait until some have finished", "")
    resolved = resolve_buffer(state, actor, request, of_array=False, number=external_job.job)
    asked = resolved.buffer
    assert asked is not None
    for used in asked.uses:
        known = state.persistent.get(used)
        if known is not None and not known.filesystem:
            raise RejectionError(
                RejectionCode.INVALID_DIRECTIVE,
                f"persistent buffer {used} is on node {known.node}, but the job's nodes are not known yet",
                "use one in a shared filesystem: `forebay buffer list` shows its path",
                f"persistentdw name={used}",
            )
    pool = None
    if asked.capacity_bytes:
        pool = find_pool(state, asked.pool, asked.places[0] if asked.places else "pool")
    if pool is not None and not pool.filesystem:
        shared = sorted(name for name, one in state.pools.items() if one.filesystem)
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            f"pool {pool.name} has its buffers on nodes, but the job's nodes are not known yet",
            f"use one of: {', '.join(shared)}" if shared else "ask an operator to create a pool in a shared filesystem",
            asked.places[0] if asked.places else "pool",
        )
    resolved = admit_request(state, resolved, 1)
    asked, name, granted = resolve_space(state, resolved, asked, external_job.job)
    # A setup waits for seconds only, so a request that exceeds a limit on its own is rejected at once.
    check_own_limits(state, resolved, name, granted, "request less, or ask an operator to change the limit")
    return e.ExternalJobSetUp(state.next_job, replace(resolved, buffer=asked), name, granted, external_job)


def _end_previous_epoch(state: Facts, found: ExternalJobLookup, outcome: ExternalJobOutcome) -> Events:
    """Return the events that end the latest epoch of an external job when the next one begins."""
    if found.job is None or found.buffer is None or outcome is ExternalJobOutcome.BEGIN_EPOCH:
        return ()
    reason = "the job was set up again"
    if outcome is ExternalJobOutcome.SUPERSEDE:
        return _retain_results(found.job, found.phase, reason)
    if found.phase is ExternalJobPhase.WAITING:
        return (e.JobCancelled(found.job.id),)
    return _remove(found.job, JobState.CANCELLED, reason)


# ---- later commands


def _stage_in_external_job(state: Facts, actor: c.Actor, command: c.StageInExternalJob, at: Instant) -> Decision:
    return _decide_by_table(state, actor, command, SchedulerCommand.STAGE_IN)


def _begin_external_job_run(state: Facts, actor: c.Actor, command: c.BeginExternalJobRun, at: Instant) -> Decision:
    return _decide_by_table(state, actor, command, SchedulerCommand.BEGIN_RUN)


def _end_external_job_run(state: Facts, actor: c.Actor, command: c.EndExternalJobRun, at: Instant) -> Decision:
    return _decide_by_table(state, actor, command, SchedulerCommand.END_RUN)


def _stage_out_external_job(state: Facts, actor: c.Actor, command: c.StageOutExternalJob, at: Instant) -> Decision:
    return _decide_by_table(state, actor, command, SchedulerCommand.STAGE_OUT)


def _tear_down_external_job(state: Facts, actor: c.Actor, command: c.TearDownExternalJob, at: Instant) -> Decision:
    fault = _text_fault(command.reason, limits.MESSAGE_CHARACTERS_MAX)
    if fault is not None:
        return Rejection(RejectionCode.INVALID_FIELD, f"the reason {fault}", "write a sentence", "reason")
    asked = SchedulerCommand.TEAR_DOWN_HURRY if command.hurry else SchedulerCommand.TEAR_DOWN
    return _decide_by_table(state, actor, command, asked, command.reason)


def _report_missing_external_job(
    state: Facts, actor: c.Actor, command: c.ReportMissingExternalJob, at: Instant
) -> Decision:
    found = _find_target(state, actor, command.cluster, command.job, 0)
    if isinstance(found, Rejection):
        return found
    fault = _text_fault(command.state, limits.NAME_CHARACTERS_MAX)
    if fault is not None:
        return Rejection(RejectionCode.INVALID_FIELD, f"the state {fault}", "write a word", "state")
    return NOTHING if found.job is not None else Acceptance((e.ExternalJobMissing(found.name, command.state),))


def _text_fault(text: str, characters_max: int) -> str | None:
    """Return the error in a text for display, worded to follow `the reason `, or None."""
    if len(text) > characters_max:
        return f"has {len(text)} characters, more than {characters_max}"
    return "has a control character" if has_control_character(text) else None


def _decide_by_table(state: Facts, actor: c.Actor, command: Any, asked: SchedulerCommand, reason: str = "") -> Decision:
    found = _find_target(state, actor, command.cluster, command.job, command.epoch)
    if isinstance(found, Rejection):
        return found
    outcome = EXTERNAL_JOB_OUTCOMES[found.phase, asked]
    if outcome is ExternalJobOutcome.DONE:
        return NOTHING
    if outcome is ExternalJobOutcome.REJECT or found.job is None or found.buffer is None:
        return _phase_rejection(found, asked)
    if reason and outcome is ExternalJobOutcome.LINGER:
        return decision_of(_remove(found.job, JobState.CANCELLED, reason))
    events = _EVENTS[outcome](state, found.job, found.phase)
    if reason and not isinstance(events, Rejection):
        events = tuple(
            replace(event, reason=reason) if isinstance(event, _EVENTS_WITH_REASON) else event for event in events
        )
    return decision_of(events)


_EVENTS_WITH_REASON = (e.ExternalJobRetained, e.TeardownStarted)
"""Events of a teardown that have a reason."""


def _phase_rejection(found: ExternalJobLookup, asked: SchedulerCommand) -> Rejection:
    if found.phase is ExternalJobPhase.NONE:
        last = f"this epoch of external job {found.name} has ended; the latest is {found.epoch}"
        sentence = last if found.epoch else f"external job {found.name} does not exist"
        return Rejection(RejectionCode.UNKNOWN_JOB, sentence, "set it up first", "job")
    sentence = f"external job {found.name} is {found.phase.value}: {asked.value} is not possible"
    if found.phase in _ENDED or found.phase is ExternalJobPhase.LINGERING:
        return Rejection(RejectionCode.WRONG_STATE, sentence, "it was torn down: set it up first", "job")
    remedy = "wait until it is staged in" if asked is SchedulerCommand.BEGIN_RUN else "wait until it has its space"
    if found.phase in (ExternalJobPhase.STAGING_OUT, ExternalJobPhase.STAGE_OUT_FAILED):
        remedy = "its run has ended, and its results are being exported"
    return Rejection(RejectionCode.WRONG_STATE, sentence, remedy, "job")


def _order_stage_in(state: Facts, job: Job, phase: ExternalJobPhase) -> Events | Rejection:
    filesystems = filesystems_of(state, state.buffers[job.id])
    if not filesystems:
        sentence = f"pool {state.buffers[job.id].pool} no longer has a shared filesystem"
        return Rejection(RejectionCode.WRONG_STATE, sentence, "tear the external job down, and use another pool", "job")
    mover = choose_external_job_mover(state, job, filesystems)
    if not mover:
        shown = " and ".join(filesystem.name for filesystem in filesystems)
        sentence, remedy = (
            f"shared filesystem {shown} has no mover that is up",
            "start one: forebay run agent --name NAME --mover",
        )
        return Rejection(RejectionCode.WRONG_STATE, sentence, remedy, "job")
    return (e.ExternalJobStageInOrdered(job.id, mover, job.attempt + 1),)


def _retry(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    stage = {ExternalJobPhase.STAGE_IN_FAILED: Stage.STAGE_IN, ExternalJobPhase.STAGE_OUT_FAILED: Stage.STAGE_OUT}.get(
        phase
    )
    return (e.StageRetried(job.id, stage or Stage.TEARDOWN, job.attempt + 1, "requested again"),)


def _begin_run(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    return (e.ExternalJobRunBegan(job.id, job.attempt + 1),)


def _end_run(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    return (e.ExternalJobRunEnded(job.id, job.attempt + 1),)


def _export(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    """Return the events that stage out the results of an external job, for the first time or after a failure."""
    buffer = state.buffers[job.id]
    if phase is ExternalJobPhase.RUNNING:
        return (*_end_run(state, job, phase), stage_out_event(state, job, buffer, job.attempt + 2))
    if buffer.state is BufferState.POST_RUN:
        return (stage_out_event(state, job, buffer, job.attempt + 1),)
    if job.stuck:
        return (e.StageRetried(job.id, Stage.STAGE_OUT, job.attempt + 1, "requested again"),)
    return ()


def export_again(state: Facts, job: Job, partial: bool) -> Events | Rejection:
    """Return the events that export retained results of an external job, or retry a failed stage-out of any job."""
    buffer = state.buffers.get(job.id)
    failed = buffer is not None and buffer.state is BufferState.STAGING_OUT and job.stuck
    retained = (
        job.external_job is not None
        and buffer is not None
        and external_job_phase(job, buffer) is ExternalJobPhase.RETAINED
    )
    if failed:
        why = "requested again, without missing files" if partial else "requested again"
        return (e.StageRetried(job.id, Stage.STAGE_OUT, job.attempt + 1, why, partial),)
    if retained and buffer is not None and buffer.state is BufferState.POST_RUN and not partial:
        return (stage_out_event(state, job, buffer, job.attempt + 1),)
    if retained and not partial:
        return ()  # under way
    return Rejection(
        RejectionCode.WRONG_STATE,
        f"job {job.display_name} has no results to export",
        "use partial only after a failed export"
        if retained
        else "`forebay buffer list --retained` lists jobs that have",
        "job",
    )


def _abandon(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    return (e.JobCancelled(job.id),)


def _give_back(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    asked = job.request.buffer
    # A lingering job would prevent the removal of the persistent buffers that it uses.
    if job.mover and state.site.external_job_linger_s and not (asked is not None and asked.uses):
        return (e.ExternalJobLingered(job.id, job.attempt + 1),)
    return _remove(job, JobState.CANCELLED, "torn down by its scheduler")


def _remove(job: Job, result: JobState, reason: str) -> Events:
    """Return the events that tear down an external job that never ran; at once if nothing was staged."""
    started = e.TeardownStarted(job.id, job.attempt + 1, result, True, reason)
    return (started,) if job.mover else (started, e.TornDown(job.id))


def _retain_for_scheduler(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    return _retain_results(job, phase, "torn down by its scheduler before its results were exported")


def _retain_results(job: Job, phase: ExternalJobPhase, reason: str) -> Events:
    ended: Events = ()
    if phase is ExternalJobPhase.RUNNING:
        ended = (e.ExternalJobRunEnded(job.id, job.attempt + 1),)
    if has_results(job):
        return (*ended, e.ExternalJobRetained(job.id, reason))
    return (*ended, e.TeardownStarted(job.id, job.attempt + 1 + len(ended), JobState.COMPLETED, True, reason))


def _discard(state: Facts, job: Job, phase: ExternalJobPhase) -> Events:
    reason = "torn down by its scheduler without stage-out"
    if phase is ExternalJobPhase.RUNNING:
        ended = e.ExternalJobRunEnded(job.id, job.attempt + 1)
        return (ended, e.TeardownStarted(job.id, job.attempt + 2, JobState.CANCELLED, True, reason))
    return (e.TeardownStarted(job.id, job.attempt + 1, job.result, True, reason),)


_EVENTS: dict[ExternalJobOutcome, Callable[[Facts, Job, ExternalJobPhase], Events | Rejection]] = {
    ExternalJobOutcome.STAGE_IN: _order_stage_in,
    ExternalJobOutcome.RETRY: _retry,
    ExternalJobOutcome.RUN: _begin_run,
    ExternalJobOutcome.END_RUN: _end_run,
    ExternalJobOutcome.EXPORT: _export,
    ExternalJobOutcome.CANCEL_SETUP: _abandon,
    ExternalJobOutcome.LINGER: _give_back,
    ExternalJobOutcome.RETAIN: _retain_for_scheduler,
    ExternalJobOutcome.DISCARD: _discard,
}


EXTERNAL_JOBS_BY_KEY: dict[type, Callable[[Facts, c.Actor, Any, Instant], Decision]] = {
    c.RegisterScheduler: _register_scheduler,
    c.ReleaseScheduler: _release_scheduler,
    c.SetUpExternalJob: _set_up_external_job,
    c.StageInExternalJob: _stage_in_external_job,
    c.BeginExternalJobRun: _begin_external_job_run,
    c.EndExternalJobRun: _end_external_job_run,
    c.StageOutExternalJob: _stage_out_external_job,
    c.TearDownExternalJob: _tear_down_external_job,
    c.ReportMissingExternalJob: _report_missing_external_job,
}
"""Command type -> handler that needs lookups by key only."""
