"""Events as sentences for users and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.cluster.schemas import EventView, Json, LedgerEntryView, kind_name, made_of
from forebay.cluster.system import format_instant
from forebay.replica.messages import CONTROLLER, Actor, Batch, Entry
from forebay.replica.messages import events as e
from forebay.replica.model import (
    NATIVE,
    NO_OPTIONS,
    BufferRequest,
    Hold,
    JobChange,
    JobOptions,
    JobState,
    Stage,
    format_amount,
    format_tasks,
)
from forebay.replica.values import Instant, Revision, Verdict, format_size

if TYPE_CHECKING:
    from forebay.cluster.server import AppliedEntry
    from forebay.wal import Configuration, Member

_HELD = {Hold.USER: "by its user", Hold.ADMIN: "by an operator", Hold.SYSTEM: "because an operation failed for good"}


NO_OP = "no-op"
BATCH = "batch"
CONFIGURATION = "configuration"
"""Kind of a membership change: the members from this entry on, and the requester."""

VOID = "void"
"""Kind of a batch that every replica's fence rejected: decided on another revision, and without effect."""

LEFT_OUT_SAID = 3
"""Omitted files named in a sentence, count; the receipt names more."""

PRIVATE = frozenset({"script", "environment"})
"""Job fields that only operators read, because scripts and environments can contain secrets."""

NAMES = frozenset({"left_out_first"})
"""Fields with file names, which only the job's user and operators read."""

SECRET = frozenset({"disclosure_key"})
"""Fields that are never shown; values salted with them could otherwise be guessed."""

_INSTANTS = frozenset({"retry_at", "begin_at", "deadline", "promised_at", "started_at", "ended_at", "since"})


def event_name(event: e.Event) -> str:
    """Return the event's name, for example `job_submitted`."""
    return kind_name(type(event))


def actor_words(actor: Actor, command: str) -> str:
    """Return the sender of a command: `operator admin`, `user alice`, `agent n1`, `scheduler`, `leader`."""
    if actor == CONTROLLER:
        return "scheduler" if command == "run_scheduling_cycle" else "leader"
    role = actor.role.name.lower()
    return role if actor.name == role else f"{role} {actor.name}"


def as_json(record: Any, *, private: bool, names: bool = False) -> Any:
    """Return a record as JSON with field names and words. `private` includes scripts, environments and file names;
    `names` includes only the names of files in receipts.
    """
    if isinstance(record, msgspec.Struct):
        found: Json = {}
        for field in record.__struct_fields__:
            value = getattr(record, field)
            if field in SECRET:
                continue
            if (field in PRIVATE and not private) or (field in NAMES and not (names or private)):
                continue
            if value is None and type(record) is JobChange:
                continue  # unchanged field
            found[field] = format_instant(value) if field in _INSTANTS else as_json(value, private=private, names=names)
        return found
    if isinstance(record, IntEnum):
        return record.name.lower()
    if isinstance(record, Enum):
        return str(record.value)
    if isinstance(record, tuple | list):
        return [as_json(item, private=private, names=names) for item in record]
    if isinstance(record, bytes):
        return record.hex()
    return record


def event_view(batch: Batch, entry: Entry, revision: Revision, sequence: int) -> EventView:
    """Return one event of a settled command, the one at `sequence` (from 0)."""
    event = entry.events[sequence]
    return EventView(
        revision=revision,
        sequence=sequence,
        at=format_instant(batch.at) or "",
        actor=actor_words(entry.actor, entry.command),
        command=entry.command,
        event=event_name(event),
        job_id=e.job_of(event),
        detail=as_json(event, private=False),
    )


def record_head(entry: Entry, revision: Revision) -> Json:
    """Return one ledger command without its events, for operators."""
    return {
        "revision": revision,
        "command_id": entry.id.hex(),
        "actor": actor_words(entry.actor, entry.command),
        "command": entry.command,
        "rejection": as_json(entry.rejection, private=True),
    }


def record_event(event: e.Event) -> Json:
    """Return one ledger event with all its fields, for operators."""
    return {"event": event_name(event), "detail": as_json(event, private=True)}


def record_view(entry: Entry, revision: Revision) -> Json:
    """Return one ledger command with all its fields, for operators."""
    return {**record_head(entry, revision), "events": [record_event(event) for event in entry.events]}


def entry_view(applied: AppliedEntry, records: Iterable[Any]) -> LedgerEntryView:
    """Return one ledger entry; `records`: its commands as from `record_view`, none for a void batch."""
    batch, configuration = applied.batch, applied.configuration
    at = None if batch is None else format_instant(batch.at)
    kind = NO_OP if batch is None else VOID if applied.void else BATCH
    if configuration is not None:
        at = format_instant(Instant(configuration.change.at))
        kind, records = CONFIGURATION, [configuration_record(configuration)]
    return made_of(
        applied,
        LedgerEntryView,
        kind=kind,
        digest=applied.digest.hex(),
        base_revision=applied.base,
        at=at,
        records=tuple(records),
    )


def configuration_record(configuration: Configuration) -> Json:
    """Return a membership configuration in the ledger's form: members, change, and requester."""
    change = configuration.change

    def rows(members: tuple[Member, ...]) -> list[Json]:
        return [{"id": member.id, "name": member.name, "peer": member.peer, "api": member.api} for member in members]

    return {
        "version": configuration.version,
        "change": change.action.word,
        "member": change.member,
        "actor": change.actor,
        "command_id": change.id.hex(),
        "voters": rows(configuration.voters),
        "learners": rows(configuration.learners),
    }


def _option_words(options: JobOptions) -> list[str]:
    """Describe a job's non-default options."""
    words = [f"{name} {value}" for name, value in (
        ("account", options.account), ("QOS", options.qos), ("reservation", options.reservation),
        ("partition", options.partition), ("nice", options.nice),
        ("licences", ",".join(f"{name}:{count}" for name, count in options.licenses)),
        ("mail", ",".join(options.mail_types)),
    ) if value]  # fmt: skip
    if options.nodes != NO_OPTIONS.nodes:
        words.append(f"{options.nodes} nodes" if options.nodes else "no nodes")
    words += ["only one job of this name at a time"] * options.singleton + ["not to be requeued"] * (
        not options.requeue
    )
    return words + ["any one dependency suffices"] * options.any_of


def _buffer_option_words(buffer: BufferRequest) -> list[str]:
    words = []
    for made in buffer.creates:
        size = format_size(made.capacity_bytes) if made.units == "bytes" else str(made.capacity_bytes)
        words.append(f"persistent buffer {made.name} to be created ({size} of {made.pool or 'the default pool'})")
    words += [f"persistent buffer {gone.name} to be removed" for gone in buffer.destroys]
    words += [f"persistent buffer {name}" for name in buffer.uses]
    words += [f"{format_size(buffer.swap_bytes)} of swap on each node"] if buffer.swap_bytes else []
    for text, what in ((buffer.stage_in_command, "stage-in"), (buffer.stage_out_command, "stage-out")):
        words += [f"{what} by its own command"] if text else []
    for listed in buffer.lists:
        words.append(f"{'stage-out' if listed.outgoing else 'stage-in'} of the files listed in {listed.source}")
    return words + [f"{', '.join(buffer.options)} for the provider"] * bool(buffer.options)


def _stage_sentence(what: str, event: e.StagedIn | e.StagedOut, provider: str) -> str:
    """Describe a finished stage; a site's own provider reports no amounts."""
    if event.files or event.size_bytes:
        return f"{what}: {_files(event.files, event.size_bytes)}"
    if provider == NATIVE:
        return f"{what}: nothing had to be moved"
    return f"{what} by burst_buffer/{provider}, which reports no amounts"


def _files(files: int, size_bytes: int) -> str:
    size = format_size(size_bytes)
    return f"{files} file{'' if files == 1 else 's'}, {size}{' bytes' if size.isdigit() else ''}"


def _submit_sentence(event: e.JobSubmitted) -> str:
    request, array = event.request, event.array
    asks, also = "without a buffer", _option_words(request.effective_options)
    if request.buffer is not None:
        also += _buffer_option_words(request.buffer)
        asks = (
            f"with {format_size(event.granted_bytes)} of pool {event.pool}"
            if event.pool
            else "with a buffer of no capacity"
        )
    held = "" if event.hold is Hold.NONE else ", held"
    sentence = "; ".join((f"submitted {asks}{held}", *also))
    if array is None:
        return sentence
    at_once = f", at most {array.throttle} at once" if array.throttle else ""
    return f"as tasks {format_tasks(array.tasks)} of array {event.job}{at_once}: {sentence}"


def _allocation_sentence(event: e.BufferAllocated) -> str:
    passed = f", past job {event.passed} that waits for more" if event.passed else ""
    return f"space is reserved and stage-in starts on {event.mover or event.node}{passed}"


def _stage_failure_sentence(event: e.StageFailed) -> str:
    when = f"tried again at {format_instant(event.retry_at)}" if event.retry_at else "waiting for a release"
    return f"{_words(event.stage)} failed: {event.reason}; {when}"


def _hold_sentence(event: e.JobHeld) -> str:
    return f"held: {event.reason}" if event.reason else f"held {_HELD[event.hold]}"


def _revocation_sentence(event: e.AllocationRevoked) -> str:
    sooner = f", so that job {event.beneficiary} may start sooner" if event.beneficiary else ""
    return f"the buffer was revoked before the job ran{sooner}: {event.reason}"


def _run_end_sentence(event: e.RunEnded) -> str:
    if event.result is JobState.PENDING:
        return "the script ended; the job waits again once its results are staged out"
    how = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
    return f"the script ended: {event.result.name}, {how}" + (f" ({event.message})" if event.message else "")


def _record_sentence(event: e.TransferRecorded, *, names: bool = False) -> str:
    receipt = event.receipt
    how = "moved" if receipt.complete else "moved before it failed"
    words = [f"{_words(receipt.stage)} {how}: {_files(receipt.files, receipt.size_bytes)}"]
    if receipt.resumed_bytes:
        words.append(f"{_files(receipt.resumed_files, receipt.resumed_bytes)} of it by an earlier attempt")
    if receipt.retries:
        words.append(f"{receipt.retries} moved again")
    if receipt.left_out:
        first = receipt.left_out_first[:LEFT_OUT_SAID] if names else ()
        named = ", ".join(f"{one.path} ({one.reason})" for one in first)
        more = f" and {receipt.left_out - len(first)} more" if first and receipt.left_out > len(first) else ""
        words.append(f"{receipt.left_out} left out" + (f": {named}{more}" if named else ""))
    if receipt.digest:
        words.append(f"receipt {receipt.digest}")
    return "; ".join(words)


def _checkpoint_sentence(event: e.TransferCheckpointed) -> str:
    checkpoint = event.checkpoint
    return f"{_words(checkpoint.stage)} continues: {_files(checkpoint.files, checkpoint.size_bytes)} are durable"


def _teardown_sentence(event: e.TeardownStarted) -> str:
    hurry = ", without stage-out" if event.hurry else ""
    return f"the job is {event.result.name}; its buffer is being removed{hurry}" + (
        f" ({event.reason})" if event.reason else ""
    )


def _update_sentence(event: e.JobUpdated) -> str:
    changes = []
    for field in event.change.__struct_fields__:
        value = getattr(event.change, field)
        if value is None:
            continue
        if field in _INSTANTS:
            value = format_instant(value)
        elif field == "dependencies":
            value = ",".join(f"{one.kind.word}:{one.job}" for one in value)
        elif isinstance(value, tuple):
            value = ",".join(":".join(map(str, one)) if isinstance(one, tuple) else str(one) for one in value)
        changes.append(f"{field} {value if value not in ('', None) else 'none'}")
    words = [f"changed: {'; '.join(changes)}"] if changes else []
    if event.buffer is not None:
        size = f"{format_size(event.granted_bytes)} of pool {event.pool}" if event.pool else "a buffer of no capacity"
        words.append(f"its request is now {size}")
    return "; ".join(words)


def _external_setup_sentence(event: e.ExternalJobSetUp) -> str:
    external_job = event.external_job
    asks = f"{format_size(event.granted_bytes)} of pool {event.pool}" if event.pool else "no space of its own"
    return (
        f"{external_job.name} was set up, epoch {external_job.epoch}, of user {event.request.user}: it requests {asks}"
    )


def _external_space_sentence(event: e.ExternalJobSpaceAllocated) -> str:
    return "space is reserved" + (f", past job {event.passed} that waits for more" if event.passed else "")


def _mail(key: str) -> str:
    """Return the subject of a mail from its key."""
    return key.split(".")[1].replace("_", "-")


def _words(stage: Stage) -> str:
    return stage.word.replace("_", "-")


_SENTENCES: dict[type[Any], Callable[[Any], str]] = {
    e.ClusterFounded: lambda event: f"the cluster {event.name} was founded with {len(event.pools)} pools",
    e.PoolSet: lambda event: f"pool {event.pool.name} has {format_amount(event.pool.quantity_bytes, event.pool.unit)}",
    e.SiteConfigured: lambda event: "the configuration of the site was changed",
    e.FilesystemSet: lambda event: f"shared filesystem {event.filesystem.name} is {event.filesystem.path}",
    e.FilesystemRemoved: lambda event: f"shared filesystem {event.filesystem} was removed",
    e.MoverChanged: lambda event: f"mover {event.mover} has the operation as attempt {event.attempt}: {event.reason}",
    e.PoolRemoved: lambda event: f"pool {event.pool} was removed",
    e.AccountSet: lambda event: f"account {event.account.name} was set, with {len(event.account.members)} users",
    e.AccountDeleted: lambda event: f"account {event.account} was deleted",
    e.QosSet: lambda event: f"QOS {event.qos.name} was set",
    e.QosDeleted: lambda event: f"QOS {event.qos} was deleted",
    e.LicenseSet: lambda event: f"licence {event.license.name} was set to {event.license.total}",
    e.LicenseDeleted: lambda event: f"licence {event.license} was deleted",
    e.NodeAdmitted: lambda event: f"node {event.node} was admitted",
    e.CertificateRevoked: lambda event: f"{event.revocation.certificate} was revoked",
    e.SessionOpened: lambda event: f"{event.actor} opened session {event.session}",
    e.SessionsEnded: lambda event: f"{len(event.sessions)} sessions {event.reason}, the first {event.sessions[0]}",
    e.CachedRepliesDropped: lambda event: (
        f"the cached replies to single commands up to revision {event.through} were dropped"
    ),
    e.DisclosureKeyDrawn: lambda event: "the key that salts proofs of the ledger was generated",
    e.HistoriesCounted: lambda event: (
        f"the records of {event.jobs} jobs up to entry {event.index} were counted: root {event.root.hex()[:16]}"
    ),
    e.StateDigested: lambda event: f"the state after revision {event.revision} has the digest {event.state.hex()[:16]}",
    e.CertificatesUnrevoked: lambda event: f"{', '.join(event.certificates[:20])} no longer revoked",
    e.ReservationSet: lambda event: f"reservation {event.reservation.name} was set",
    e.ReservationDeleted: lambda event: f"reservation {event.reservation} was deleted",
    e.ReservationStarted: lambda event: f"reservation {event.reservation} began",
    e.ReservationEnded: lambda event: f"reservation {event.reservation} ended",
    e.PartitionSet: lambda event: f"partition {event.partition.name} was set, {event.partition.state.name}",
    e.PartitionDeleted: lambda event: f"partition {event.partition} was deleted",
    e.UsageReset: lambda event: (
        f"the burst-buffer usage of {'account' if event.whose == 'a' else 'QOS'} {event.name} was reset"
    ),
    e.JobUpdated: _update_sentence,
    e.SchedulingRulesSet: lambda event: "the scheduling settings were changed",
    e.NodeRegistered: lambda event: f"the agent of {event.node} registered with {event.cpus} CPUs",
    e.NodeDrained: lambda event: f"{event.node} was drained: {event.reason}",
    e.NodeResumed: lambda event: f"{event.node} was resumed",
    e.NodeWentDown: lambda event: f"{event.node} is down: {event.reason}",
    e.NodeLost: lambda event: f"{event.node} was {event.reason}",
    e.BufferAbandoned: lambda event: (
        f"the buffer on {event.node}, which does not answer, was given up; the agent removes it later"
    ),
    e.AbandonedBufferRemoved: lambda event: (
        f"{event.node} returned, and its agent removed the buffer that was given up"
    ),
    e.NodeCameBack: lambda event: f"{event.node} is back",
    e.JobSubmitted: _submit_sentence,
    e.OperationQueued: lambda event: f"{_words(event.stage)} waits for earlier operations",
    e.OperationOrdered: lambda event: f"{_words(event.stage)} begins",
    e.JobHeld: _hold_sentence,
    e.JobReleased: lambda event: "released",
    e.BufferAllocated: _allocation_sentence,
    e.StagedIn: lambda event: _stage_sentence("staged in", event, NATIVE),
    e.StageFailed: _stage_failure_sentence,
    e.StageRetried: lambda event: f"{_words(event.stage)} is retried as attempt {event.attempt}: {event.reason}",
    e.RunOrdered: lambda event: f"the script is to run on {event.node}",
    e.RunStarted: lambda event: "the script started",
    e.RunEnded: _run_end_sentence,
    e.StageOutStarted: lambda event: "stage-out started",
    e.StagedOut: lambda event: _stage_sentence("staged out", event, NATIVE),
    e.TeardownStarted: _teardown_sentence,
    e.TornDown: lambda event: "the buffer is gone and its space is free",
    e.CancelRequested: lambda event: "cancelling" + (", without stage-out" if event.hurry else ""),
    e.JobCancelled: lambda event: "cancelled before it had any space",
    e.JobPurged: lambda event: "left the list of finished jobs; its history stays in the ledger",
    e.AllocationRevoked: _revocation_sentence,
    e.JobRequeued: lambda event: "waits for a new buffer",
    e.JobBecameEligible: lambda event: "its begin time has come",
    e.MailSent: lambda event: f"mail was sent: {_mail(event.mail)}",
    e.MailDropped: lambda event: f"mail was not sent: {_mail(event.mail)}; {event.reason}",
    e.SinkAdvanced: lambda event: f"event sink {event.sink} has all events up to revision {event.revision}",
    e.SinkRemoved: lambda event: f"the mark of event sink {event.sink} was removed",
    e.PersistentReserved: lambda event: (
        f"{format_size(event.granted_bytes)} of pool {event.pool} are reserved for persistent buffer {event.name}"
    ),
    e.PersistentCreated: lambda event: f"persistent buffer {event.name} was created",
    e.PersistentDeletionStarted: lambda event: f"persistent buffer {event.name} is being removed",
    e.PersistentDeleted: lambda event: (
        f"persistent buffer {event.name} was deleted" + (f" ({event.reason})" if event.reason else "")
    ),
    e.PreRunFailed: lambda event: f"an operation before the script failed: {event.reason}",
    e.JobSuspended: lambda event: "suspended",
    e.JobResumed: lambda event: "resumed",
    e.RequeueRequested: lambda event: f"its run is being ended: {event.reason}",
    e.RunRequeued: lambda event: "it waits again as if it had never run",
    e.OperationsRestarted: lambda event: f"its operation begins again as attempt {event.attempt}: the leader changed",
    e.BufferCleared: lambda event: f"its buffer left the list though it could not be removed: {event.reason}",
    e.DeadlineMissed: lambda event: "it could no longer end before its deadline",
    e.TransferRulesSet: lambda event: "the transfer settings were changed",
    e.TransferRecorded: _record_sentence,
    e.TransferCheckpointed: _checkpoint_sentence,
    e.ExternalJobSetUp: _external_setup_sentence,
    e.ExternalJobSpaceAllocated: _external_space_sentence,
    e.ExternalJobSetupFailed: lambda event: f"its setup failed: {event.reason}",
    e.ExternalJobStageInOrdered: lambda event: f"its scheduler requested stage-in, which starts on {event.mover}",
    e.ExternalJobRunBegan: lambda event: "its scheduler began the job",
    e.ExternalJobRunEnded: lambda event: "its scheduler reports that the job has ended",
    e.ExternalJobLingered: lambda event: "its scheduler tore it down before it ran: the data is kept for a while",
    e.ExternalJobReactivated: lambda event: (
        f"its scheduler set it up again, epoch {event.epoch}: it has its space as before"
    ),
    e.ExternalJobRetained: lambda event: f"its results are retained until they are exported: {event.reason}",
    e.SchedulerBound: lambda event: (
        f"external jobs of scheduler {event.scheduler.name} come from {event.scheduler.address}"
    ),
    e.SchedulerReleased: lambda event: f"another cluster may use the scheduler name {event.scheduler}",
    e.ExternalJobMissing: lambda event: (
        f"the scheduler reports {event.external_job} as {event.state}, but there is no such external job"
    ),
    e.DrillStarted: lambda event: (
        f"{event.by} began drill {event.drill}: {event.scenario} of {event.target}"
        + (f", although these did not hold: {', '.join(event.forced)}" if event.forced else "")
    ),
    e.DrillRenewed: lambda event: f"the coordinator of drill {event.drill} is still running",
    e.DrillConfirmed: lambda event: f"{event.by} approved drill {event.drill}",
    e.DrillAbortRequested: lambda event: f"drill {event.drill} is to be aborted: {event.reason}",
    e.DrillEnded: lambda event: f"drill {event.drill} {event.verdict.word}: {event.sentence}",
    e.DrillsLocked: lambda event: f"{event.by} locked drills: {event.reason}",
    e.DrillsUnlocked: lambda event: f"the lock of {event.by} on drills was removed",
    e.ClusterRecovered: lambda event: (
        f"{event.recovery.by} began incarnation {event.recovery.incarnation} of the cluster from the entries of "
        + ("a snapshot" if event.recovery.is_snapshot else event.recovery.replica)
        + f" up to {event.recovery.kept_index}; later entries are lost, and so may be jobs "
        f"{event.recovery.last_job + 1} to {event.recovery.first_job - 1}"
    ),
    e.ClockSet: lambda event: f"an operator set the clock back to {format_instant(event.at)}",
    e.FeatureLevelRaised: lambda event: (
        f"the feature level is {event.level}: release {event.release} or later is needed"
    ),
}


def sentence_of(event: e.Event, *, names: bool = False, provider: str = NATIVE) -> str:
    """Return the sentence of an event; `names` includes the names of files, for callers who may see them.

    `provider`: the provider that performed the operations.
    """
    if isinstance(event, e.StagedIn | e.StagedOut):
        return _stage_sentence("staged in" if isinstance(event, e.StagedIn) else "staged out", event, provider)
    if isinstance(event, e.TransferRecorded):
        return _record_sentence(event, names=names)
    words = _SENTENCES.get(type(event))
    return event_name(event).replace("_", " ") if words is None else words(event)


def verdict_words(verdict: Verdict) -> str:
    """Return the verdict's sentence with its figures."""
    figures = ", ".join(_figure(name, value) for name, value in verdict.figures if value)
    return f"{verdict.sentence} ({figures})" if figures else verdict.sentence


def _figure(name: str, value: str) -> str:
    """Format a figure; names that end in `_us` are instants."""
    if name.endswith("_us"):
        name, value = name.removesuffix("_us"), format_instant(Instant(int(value))) or "never"
    return f"{name.replace('_', ' ')} {value}"
