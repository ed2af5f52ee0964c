"""Reconstruction of commands from an entry's events, its actor, and the state before it.

Theory of operation
===================

Commands are not in the ledger (law 1), only their actor, name and digest. So this module generates candidates, and
accepts a candidate only if its digest equals the recorded digest. Commands without fields, such as a scheduling cycle,
need no proof.

An event contains the decision, which may differ from the request: symbols in paths are replaced, and defaults are
filled in. Then there are several candidates, the likeliest first. `REBUILDERS` has a row for every kind of command. If
commands of a kind cannot always be rebuilt, the row names the data that the ledger lacks.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, permutations, product
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from forebay.cluster.audit.resubmit import external_job_requests, submits, updates
from forebay.cluster.server import jobs_under_way
from forebay.replica.decide import TargetConfiguration, differences
from forebay.replica.fold import SpeculativeState
from forebay.replica.grammar import ConfSetting
from forebay.replica.messages import Actor, Command, Entry, Event, Request, command_digest
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    ENDED,
    TRANSFERS,
    Job,
    JobRequest,
    JobState,
    ObservedFilesystem,
    PoolUnit,
    Stage,
    TransferReceipt,
    operation_of,
)
from forebay.replica.operations import active_stage
from forebay.replica.state import Facts, State
from forebay.replica.values import RESTARTED_MAX

CANDIDATES_MAX: Final = 8_192
"""Maximum number of candidates compared with a digest: 40 ms, and enough for the 4,000 possible ends of a script."""


class Led(NamedTuple):
    """Recorded data of a command: its events, and the state before them."""

    state: Facts
    """State before the command."""
    actor: Actor
    events: tuple[Event, ...]

    def of(self, kind: type[Event]) -> list[Any]:
        """Return the events of a kind."""
        return [event for event in self.events if type(event) is kind]


class Rebuilder(NamedTuple):
    """Function that rebuilds the commands of a kind. `lacks` names data that the ledger may lack for this."""

    candidates: Callable[[Led], Iterable[Command]] | None
    lacks: str = ""


def rebuilt(before: SpeculativeState, entry: Entry) -> Command | None:
    """Return the command of the entry that follows a state, proven by its digest; None if it cannot be rebuilt."""
    kind = c.KINDS.get(entry.command)
    candidates = None if kind is None else REBUILDERS[kind].candidates
    if kind is None or candidates is None:
        return None
    needs_proof = bool(kind.__struct_fields__)
    state = before.state() if kind in WALKING else before.facts
    try:
        for command in islice(candidates(Led(state, entry.actor, entry.events)), CANDIDATES_MAX):
            if not needs_proof or command_digest(Request(entry.id, entry.actor, command)) == entry.digest:
                return command
    except LookupError:
        return None  # the events name no object, or a missing object
    return None


# ---- shared by several kinds


def _as_event(command: Any, event: type[Event]) -> Callable[[Led], Iterator[Command]]:
    """Return the candidates of a command with the fields of its event, and defaults for other fields."""

    def candidates(led: Led) -> Iterator[Command]:
        for one in led.of(event):
            known = one.__struct_fields__
            yield command(**{field: getattr(one, field) for field in command.__struct_fields__ if field in known})

    return candidates


def _jobs(led: Led) -> list[int]:
    return list(dict.fromkeys(event.job for event in led.events if hasattr(event, "job")))


def _meant(led: Led) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Yield each (job, tasks) pair by which the command may have named its jobs."""
    jobs = _jobs(led)
    if len(jobs) == 1:
        yield jobs[0], None
    array = led.state.jobs[jobs[0]].request.array
    if array is None:
        return
    touched = [led.state.jobs[job].request.array for job in jobs]
    yield array.job, None
    yield array.job, tuple(one.task for one in touched if one is not None)
    yield array.job, tuple(sorted(led.state.arrays[array.job]))


def _of_jobs(command: Any, *flags: str) -> Callable[[Led], Iterator[Command]]:
    """Return the candidates of a command about jobs, with and without each of its flags."""

    def candidates(led: Led) -> Iterator[Command]:
        has_tasks = "tasks" in command.__struct_fields__
        for job, tasks in _meant(led):
            for said in product((False, True), repeat=len(flags)):
                fields: dict[str, Any] = dict(zip(flags, said, strict=True))
                yield command(job=job, **({"tasks": tasks} if has_tasks else {}), **fields)

    return candidates


# ---- pools and nodes


def _found_cluster(led: Led) -> Iterator[Command]:
    key = next((event.disclosure_key for event in led.of(e.DisclosureKeyDrawn)), b"")
    for event in led.of(e.ClusterFounded):
        yield c.FoundCluster(event.cluster_id, event.name, event.site, event.pools, event.nodes, event.filesystems, key)


def _set_pool(led: Led) -> Iterator[Command]:
    for event in reversed(led.of(e.PoolSet)):
        pool = event.pool
        for unit, filesystem, is_reported, is_default in product(
            dict.fromkeys((PoolUnit.BYTES, pool.unit)),
            dict.fromkeys((pool.filesystem, "")),
            {pool.is_reported, False},
            {pool.is_default, False},
        ):
            yield c.SetPool(
                replace(pool, unit=unit, filesystem=filesystem, is_reported=is_reported, is_default=is_default)
            )


def _change_pool(led: Led) -> Iterator[Command]:
    for event in reversed(led.of(e.PoolSet)):
        pool, exists = event.pool, event.pool.name in led.state.pools
        drained = pool.out_of_service_bytes == pool.quantity_bytes
        for quantity, granularity, out, is_default, unit, drain_all, is_reported, filesystem in product(
            (pool.quantity_bytes, None),
            (None, pool.granularity_bytes),
            (None, pool.out_of_service_bytes, 0),
            (None, pool.is_default, False),
            (None, pool.unit),
            (False, True) if drained else (False,),
            {False, pool.is_reported},
            (None, pool.filesystem),
        ):
            yield c.ChangePool(
                pool.name, exists, quantity, granularity, out, is_default, unit, drain_all, is_reported, filesystem
            )


def _configure_site(led: Led) -> Iterator[Command]:
    """Yield changes of single keys as made on a command line, each in the notation of a file."""
    site, transfers, rules, default = led.state.site, led.state.transfer_rules, led.state.scheduling_rules, ""
    for event in led.events:
        match event:
            case e.SiteConfigured():
                site = event.site
            case e.TransferRulesSet():
                transfers = event.rules
            case e.SchedulingRulesSet():
                rules = event.rules
            case e.PoolSet() if event.pool.is_default:
                default = event.pool.name
            case _:
                pass
    changed = [
        ConfSetting(one.key, one.after)
        for one in differences(led.state, TargetConfiguration(site, transfers, rules, default))
    ]
    orders = permutations(changed) if len(changed) <= KEYS_ORDERED_MAX else [tuple(changed)]
    for settings, partial, revision in product(orders, (True, False), (None, led.state.site.revision)):
        yield c.ConfigureSite(settings, partial, revision)


KEYS_ORDERED_MAX: Final = 4
"""Maximum number of keys of which every order is tried."""


def _add_filesystem(led: Led) -> Iterator[Command]:
    for event in led.of(e.FilesystemSet):
        made = event.filesystem
        # An adapter that was kept, or is the default, may have been omitted.
        for quota, layout in product((None, made.quota), (None, made.layout)):
            yield c.AddFilesystem(made.name, made.path, quota, layout)


def _register_node(led: Led) -> Iterator[Command]:
    yield from _as_event(c.RegisterNode, e.NodeRegistered)(led)
    # A node that returns unchanged causes no event.
    known, filesystems = led.state.nodes[led.actor.name], led.state.filesystems
    seen = tuple(ObservedFilesystem(name, filesystems[name].identity) for name in known.filesystems)
    controls = known.process_control, known.capacity_control
    yield c.RegisterNode(
        known.name, known.cpus, known.instance, known.storage_id, known.buffers, *controls, filesystems=seen
    )


def _lose_node(led: Led) -> Iterator[Command]:
    for event in led.of(e.NodeLost):
        yield c.LoseNode(event.node, event.reason.partition(f"declared lost by {led.actor.name}")[2].removeprefix(": "))


def _revoke(led: Led) -> Iterator[Command]:
    for event in led.of(e.CertificateRevoked):
        yield c.RevokeCertificate(event.revocation.certificate, event.revocation.reason, event.revocation.until)


def _unrevoke(led: Led) -> Iterator[Command]:
    for event in led.of(e.CertificatesUnrevoked):
        yield from map(c.UnrevokeCertificate, event.certificates)


# ---- accounts and reservations


def _set_reservation(led: Led) -> Iterator[Command]:
    for event in led.of(e.ReservationSet):
        for active in (event.reservation.active, not event.reservation.active):
            yield c.SetReservation(replace(event.reservation, active=active))


def _set_partition(led: Led) -> Iterator[Command]:
    # The last event is the requested change; earlier events only clear another partition's default flag.
    for event in reversed(led.of(e.PartitionSet)):
        yield c.SetPartition(event.partition)


# ---- jobs


def _submit_job(led: Led) -> Iterator[Command]:
    for event in led.of(e.JobSubmitted):
        yield from submits(led.state, event)


def _update_job(led: Led) -> Iterator[Command]:
    events = led.of(e.JobUpdated)
    for command in updates(led.state, events[0], [event.change for event in events]):
        for job, tasks in _meant(led):
            yield replace(command, job=job, tasks=tasks)


def _clear_buffer(led: Led) -> Iterator[Command]:
    for discard in (False, True):
        for name in dict.fromkeys(event.name for event in led.of(e.PersistentDeleted)):
            yield c.ClearBuffer(name=name, discard=discard)
        for job in _jobs(led):
            yield c.ClearBuffer(job, discard=discard)


def _restart_operations(led: Led) -> Iterator[Command]:
    touched = _jobs(led)
    yield c.RestartOperations(tuple(touched))
    assert isinstance(led.state, State)  # required by `WALKING`
    # At the start of its term, the leader restarts running operations in several commands.
    jobs = jobs_under_way(led.state)
    for first in range(len(jobs) if touched else 0):
        yield c.RestartOperations(tuple(jobs[first : first + RESTARTED_MAX]))


def _settle_mails(led: Led) -> Iterator[Command]:
    dropped = tuple((event.mail, event.reason) for event in led.of(e.MailDropped))
    yield c.SettleMails(tuple(event.mail for event in led.of(e.MailSent)), dropped)


def _advance_sinks(led: Led) -> Iterator[Command]:
    marks = tuple((event.sink, event.revision) for event in led.of(e.SinkAdvanced))
    yield c.AdvanceSinks(marks, tuple(event.sink for event in led.of(e.SinkRemoved)))


# ---- reports of agents


def _report_operation(led: Led) -> Iterator[Command]:
    for event in led.of(e.AbandonedBufferRemoved):
        yield c.ReportOperation(led.actor.name, event.job, event.attempt, Stage.TEARDOWN, c.OperationDone())
        return
    job = led.state.jobs[_jobs(led)[0]]
    stage = active_stage(job, led.state.buffers.get(job.id))
    if stage is not None:
        for result in _results(led, job, stage):
            yield c.ReportOperation(led.actor.name, job.id, job.attempt, stage, result)


def _results(led: Led, job: Job, stage: Stage) -> Iterator[c.OperationResult]:
    for receipt in _receipts(led):
        yield from _results_with(led, job, stage, receipt)


def _receipts(led: Led) -> Iterator[TransferReceipt | None]:
    """Yield the receipt of a report, or None; its stage and attempt are those of the order."""
    recorded = next((event.receipt for event in led.of(e.TransferRecorded)), None)
    yield recorded
    if recorded is not None:
        for stage, attempt in product(TRANSFERS, (recorded.attempt, recorded.attempt - 1)):
            yield replace(recorded, stage=stage, attempt=attempt)


def _results_with(led: Led, job: Job, stage: Stage, receipt: TransferReceipt | None) -> Iterator[c.OperationResult]:
    for event in led.events:
        match event:
            case e.RunStarted():
                yield c.ScriptStarted()
            case e.StagedIn() | e.StagedOut():
                yield c.OperationDone(event.files, event.size_bytes, event.digest, receipt)
            case e.StageFailed() | e.PreRunFailed():
                yield from _failures(event, stage, receipt)
            case e.TransferCheckpointed():
                yield from (c.TransferProgressed(replace(event.checkpoint, stage=said)) for said in (stage, *TRANSFERS))
            case e.PersistentCreated() | e.PersistentDeleted():
                yield c.PersistentChanged(event.name)
            case _:
                pass
    if stage is Stage.RUN:
        yield from _ends(led)
    else:
        # The ledger lacks the counts of a post-run or teardown: agents report no counts, or those of the stage-in.
        yield c.OperationDone(receipt=receipt)
        if (buffer := led.state.buffers.get(job.id)) is not None:
            yield c.OperationDone(buffer.staged_in_files, buffer.staged_in_bytes, receipt=receipt)
            yield c.OperationDone(buffer.staged_out_files, buffer.staged_out_bytes, receipt=receipt)


def _failures(
    event: e.StageFailed | e.PreRunFailed, stage: Stage, receipt: TransferReceipt | None
) -> Iterator[c.OperationResult]:
    """Yield the reports of a failure. The comment is `PLUGIN: OPERATION: MESSAGE`, and plugin names have no colon."""
    message = event.comment.split(": ", 2)[-1] if event.comment.count(": ") > 1 else ""
    operation = event.operation if isinstance(event, e.StageFailed) else operation_of(stage, "")
    named = [operation, ""] if operation == operation_of(stage, "") else [operation]
    for said, final in product(named, (False, True)):
        yield c.OperationFailed(message, final, said, receipt)


def _ends(led: Led) -> Iterator[c.OperationResult]:
    """Yield the possible results of a script; the ledger lacks the result of a cancelled or requeued job."""
    message = ""
    for event in led.of(e.RunEnded):
        yield c.ScriptEnded(event.result, event.exit_code, event.signal, event.message)
        message = event.message
    ways = [(0, 0), *((code, 0) for code in range(1, 256)), *((0, signal) for signal in range(1, 65))]
    for result in (JobState.CANCELLED, *sorted(ENDED - {JobState.CANCELLED})):
        yield from (c.ScriptEnded(result, code, signal, message) for code, signal in ways)


# ---- requests of another scheduler


def _cluster_of(led: Led) -> str:
    return led.state.schedulers[led.actor.name].cluster


def _register_scheduler(led: Led) -> Iterator[Command]:
    for event in led.of(e.SchedulerBound):
        yield c.RegisterScheduler(event.scheduler.cluster, event.scheduler.address)


def _set_up_external_job(led: Led) -> Iterator[Command]:
    cluster = _cluster_of(led)
    for event in led.events:
        if isinstance(event, e.ExternalJobSetUp):
            external_job, decided = event.external_job, event.request
        elif (
            isinstance(event, e.ExternalJobReactivated)
            and (known := led.state.jobs[event.job]).external_job is not None
        ):
            external_job, decided = replace(known.external_job, epoch=event.epoch), known.request
        else:
            continue
        for request in external_job_requests(led.state, external_job.job, decided):
            for epoch in dict.fromkeys((0, external_job.epoch, external_job.epoch - 1)):
                yield c.SetUpExternalJob(cluster, external_job.job, external_job.uid, request, epoch)


def _of_external_job(command: Any, *flags: str) -> Callable[[Led], Iterator[Command]]:
    """Return the candidates of a command about an external job, with and without each of its flags."""

    def candidates(led: Led) -> Iterator[Command]:
        cluster = _cluster_of(led)
        for job in _jobs(led):
            external_job = led.state.jobs[job].external_job
            if external_job is None:
                continue
            for epoch, *said in product((0, external_job.epoch), *([(False, True)] * len(flags))):
                fields = dict(zip(flags, said, strict=True))
                yield command(cluster=cluster, job=external_job.job, epoch=epoch, **fields)

    return candidates


def _tear_down_external_job(led: Led) -> Iterator[Command]:
    reasons = dict.fromkeys(("", *(event.reason for event in led.events if hasattr(event, "reason"))))
    for command in _of_external_job(c.TearDownExternalJob, "hurry")(led):
        yield from (replace(command, reason=reason) for reason in reasons)


def _miss_external_job(led: Led) -> Iterator[Command]:
    for event in led.of(e.ExternalJobMissing):
        yield c.ReportMissingExternalJob(
            _cluster_of(led), event.external_job.removeprefix(f"{led.actor.name}:"), event.state
        )


def _recover_cluster(led: Led) -> Iterator[Command]:
    for event in led.of(e.ClusterRecovered):
        yield c.RecoverCluster(*(getattr(event.recovery, field) for field in c.RecoverCluster.__struct_fields__))


def _abort_drill(led: Led) -> Iterator[Command]:
    for event in led.of(e.DrillAbortRequested):
        yield c.AbortDrill(event.drill, event.reason.removeprefix(f"{led.actor.name}: "))


EXTERNAL_JOBS_ASKED_MAX: Final = 1_024
"""Maximum number of external jobs searched for their user's ID: a millisecond."""


def _ids(led: Led, request: JobRequest) -> list[int]:
    """Return candidates for a user ID: the group ID, equal on most systems, and the IDs in the user's external jobs."""
    assert isinstance(led.state, State)  # required by `WALKING`
    gid, jobs = request.effective_options.gid, led.state.jobs
    known = (jobs.get(one.job) for one in islice(led.state.external_jobs.values(), EXTERNAL_JOBS_ASKED_MAX))
    external_jobs = (
        job.external_job.uid
        for job in known
        if job is not None and job.external_job and job.request.user == request.user
    )
    return list(dict.fromkeys((gid, *external_jobs)))


def _make_persistent(led: Led) -> Iterator[Command]:
    cluster = _cluster_of(led)
    for event in led.of(e.JobSubmitted):
        request, gid = event.request, event.request.effective_options.gid
        for create, units in product(request.buffer.creates, ("bare", "bytes", "count")):
            for uid in _ids(led, request):
                yield c.MakePersistent(cluster, request.user, uid, gid, replace(create, units=units))


def _remove_persistent(led: Led) -> Iterator[Command]:
    cluster = _cluster_of(led)
    asked = [(event.request, event.request.buffer.destroys) for event in led.of(e.JobSubmitted)]
    if not asked:
        # A started creation is cancelled.
        requests = [led.state.jobs[job].request for job in _jobs(led)]
        asked = [(one, one.buffer.creates) for one in requests if one.buffer is not None]
    for request, named in asked:
        for one, uid, hurry in product(named, _ids(led, request), (False, True)):
            yield c.RemovePersistent(cluster, request.user, uid, request.effective_options.gid, one.name, hurry)


# ---- the table

_OTHER_ID: Final = "the user ID from the scheduler, if it differs from the group ID and occurs in no external job"

REBUILDERS: Final[Mapping[type[Command], Rebuilder]] = {
    c.FoundCluster: Rebuilder(_found_cluster),
    c.RecoverCluster: Rebuilder(_recover_cluster),
    c.SetPool: Rebuilder(_set_pool),
    c.ChangePool: Rebuilder(_change_pool),
    c.RemovePool: Rebuilder(_as_event(c.RemovePool, e.PoolRemoved)),
    c.AddFilesystem: Rebuilder(_add_filesystem),
    c.RemoveFilesystem: Rebuilder(_as_event(c.RemoveFilesystem, e.FilesystemRemoved)),
    c.ConfigureSite: Rebuilder(_configure_site, "the text of a file: it has only the resulting settings"),
    c.RaiseFeatureLevel: Rebuilder(None, "the feature levels that the members reported"),
    c.RegisterNode: Rebuilder(_register_node),
    c.AdmitNode: Rebuilder(_as_event(c.AdmitNode, e.NodeAdmitted)),
    c.DrainNode: Rebuilder(_as_event(c.DrainNode, e.NodeDrained), "the part of a reason beyond its maximum length"),
    c.ResumeNode: Rebuilder(_as_event(c.ResumeNode, e.NodeResumed)),
    c.LoseNode: Rebuilder(_lose_node, "the part of a reason beyond its maximum length"),
    c.MarkNodeDown: Rebuilder(_as_event(c.MarkNodeDown, e.NodeWentDown)),
    c.MarkNodeBack: Rebuilder(_as_event(c.MarkNodeBack, e.NodeCameBack)),
    c.SubmitJob: Rebuilder(_submit_job, "the symbols of some paths that mix symbols and their values"),
    c.UpdateJob: Rebuilder(_update_job, "requested fields that had the requested value already"),
    c.CancelJob: Rebuilder(_of_jobs(c.CancelJob, "hurry"), "requested tasks on which it had no effect"),
    c.HoldJob: Rebuilder(_of_jobs(c.HoldJob), "requested tasks on which it had no effect"),
    c.ReleaseJob: Rebuilder(_of_jobs(c.ReleaseJob, "partial"), "requested tasks on which it had no effect"),
    c.SuspendJob: Rebuilder(_of_jobs(c.SuspendJob), "requested tasks on which it had no effect"),
    c.ResumeJob: Rebuilder(_of_jobs(c.ResumeJob), "requested tasks on which it had no effect"),
    c.RequeueJob: Rebuilder(_of_jobs(c.RequeueJob), "requested tasks on which it had no effect"),
    c.ClearBuffer: Rebuilder(_clear_buffer),
    c.ExportBuffer: Rebuilder(_of_jobs(c.ExportBuffer, "partial")),
    c.RestartOperations: Rebuilder(_restart_operations, "jobs that had finished before they were restarted"),
    c.ReportOperation: Rebuilder(
        _report_operation,
        "counts of a post-run or teardown, text beyond its maximum length, and text about a script that never started",
    ),
    c.SettleMails: Rebuilder(_settle_mails, "mails that were no longer queued"),
    c.AdvanceSinks: Rebuilder(_advance_sinks, "marks of event sinks that were further ahead already"),
    c.SetAccount: Rebuilder(_as_event(c.SetAccount, e.AccountSet)),
    c.DeleteAccount: Rebuilder(_as_event(c.DeleteAccount, e.AccountDeleted)),
    c.SetQos: Rebuilder(_as_event(c.SetQos, e.QosSet)),
    c.DeleteQos: Rebuilder(_as_event(c.DeleteQos, e.QosDeleted)),
    c.SetLicense: Rebuilder(_as_event(c.SetLicense, e.LicenseSet)),
    c.DeleteLicense: Rebuilder(_as_event(c.DeleteLicense, e.LicenseDeleted)),
    c.SetReservation: Rebuilder(_set_reservation),
    c.DeleteReservation: Rebuilder(_as_event(c.DeleteReservation, e.ReservationDeleted)),
    c.SetPartition: Rebuilder(_set_partition),
    c.DeletePartition: Rebuilder(_as_event(c.DeletePartition, e.PartitionDeleted)),
    c.ResetUsage: Rebuilder(_as_event(c.ResetUsage, e.UsageReset)),
    c.RevokeCertificate: Rebuilder(_revoke, "the part of a reason beyond its maximum length"),
    c.UnrevokeCertificate: Rebuilder(_unrevoke),
    c.SetClock: Rebuilder(_as_event(c.SetClock, e.ClockSet)),
    c.OpenSession: Rebuilder(lambda led: (c.OpenSession(),)),
    c.CloseSession: Rebuilder(lambda led: (c.CloseSession(one.sessions[0]) for one in led.of(e.SessionsEnded))),
    c.ExpireCachedReplies: Rebuilder(lambda led: (c.ExpireCachedReplies(),)),
    c.RecordHistories: Rebuilder(_as_event(c.RecordHistories, e.HistoriesCounted)),
    c.RecordStateDigest: Rebuilder(_as_event(c.RecordStateDigest, e.StateDigested)),
    c.RunSchedulingCycle: Rebuilder(lambda led: (c.RunSchedulingCycle(),)),
    c.RegisterScheduler: Rebuilder(_register_scheduler),
    c.ReleaseScheduler: Rebuilder(_as_event(c.ReleaseScheduler, e.SchedulerReleased)),
    c.StartDrill: Rebuilder(_as_event(c.StartDrill, e.DrillStarted)),
    c.ConfirmDrill: Rebuilder(_as_event(c.ConfirmDrill, e.DrillConfirmed)),
    c.AbortDrill: Rebuilder(_abort_drill),
    c.EndDrill: Rebuilder(_as_event(c.EndDrill, e.DrillEnded)),
    c.ProbeDrill: Rebuilder(_as_event(c.ProbeDrill, e.DrillRenewed)),
    c.LockDrills: Rebuilder(_as_event(c.LockDrills, e.DrillsLocked)),
    c.UnlockDrills: Rebuilder(_as_event(c.UnlockDrills, e.DrillsUnlocked)),
    c.SetUpExternalJob: Rebuilder(
        _set_up_external_job, "directives that request more space than the scheduler accounted for"
    ),
    c.StageInExternalJob: Rebuilder(_of_external_job(c.StageInExternalJob)),
    c.BeginExternalJobRun: Rebuilder(_of_external_job(c.BeginExternalJobRun)),
    c.EndExternalJobRun: Rebuilder(_of_external_job(c.EndExternalJobRun)),
    c.StageOutExternalJob: Rebuilder(_of_external_job(c.StageOutExternalJob)),
    c.TearDownExternalJob: Rebuilder(_tear_down_external_job, "the reason, if no event contains it"),
    c.ReportMissingExternalJob: Rebuilder(_miss_external_job),
    c.MakePersistent: Rebuilder(_make_persistent, _OTHER_ID),
    c.RemovePersistent: Rebuilder(_remove_persistent, _OTHER_ID),
}
"""Kind of command -> its rebuilder."""

WALKING: Final = frozenset({c.MakePersistent, c.RemovePersistent, c.RestartOperations})
"""Kinds whose reconstruction needs a whole State."""
