"""Events in words for people, and as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, IntEnum
from typing import Any

import msgspec

from cluster.client.views import EventView, Json
from cluster.clock import format_instant
from replica import events as e
from replica.arrays import compressed
from replica.commands import CONTROLLER, Actor
from replica.commit import Batch, Entry
from replica.jobs import Hold, JobState
from replica.pending import Verdict
from replica.units import Instant, Revision, format_size
from wal.configuration import Configuration, Member

_HELD = {Hold.USER: "by its user", Hold.ADMIN: "by an operator", Hold.SYSTEM: "because an operation failed for good"}

PRIVATE = frozenset({"script", "environment"})
"""Fields of a job that only operators read: scripts and environments hold what users would not show each other."""

_INSTANTS = frozenset({"retry_at", "begin_at", "deadline", "promised_at"})


def event_name(event: e.Event) -> str:
    """Return the event's name, for example `job_submitted`."""
    return kind_name(type(event))


def kind_name(kind: type[e.Event]) -> str:
    """Return the name of a kind of event."""
    name = kind.__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def actor_words(actor: Actor, command: str) -> str:
    """Return who sent a command: `operator admin`, `user alice`, `agent n1`, `scheduler`, `leader`."""
    if actor == CONTROLLER:
        return "scheduler" if command == "run_scheduling_pass" else "leader"
    role = actor.role.name.lower()
    return role if actor.name == role else f"{role} {actor.name}"


def as_json(record: Any, *, private: bool) -> Any:
    """Return a record as JSON with field names and words; `private` says whether scripts and environments are shown."""
    if isinstance(record, msgspec.Struct):
        found: Json = {}
        for field in record.__struct_fields__:
            value = getattr(record, field)
            if field in PRIVATE and not private:
                continue
            found[field] = format_instant(value) if field in _INSTANTS else as_json(value, private=private)
        return found
    if isinstance(record, IntEnum):
        return record.name.lower()
    if isinstance(record, Enum):
        return str(record.value)
    if isinstance(record, tuple | list):
        return [as_json(item, private=private) for item in record]
    if isinstance(record, bytes):
        return record.hex()
    return record


def event_views(batch: Batch, entry: Entry, revision: Revision, *, private: bool = False) -> list[EventView]:
    """Return the events of one settled command."""
    at = format_instant(batch.at) or ""
    actor = actor_words(entry.actor, entry.command)
    return [
        EventView(
            revision=revision,
            sequence=sequence,
            at=at,
            actor=actor,
            command=entry.command,
            event=event_name(event),
            job_id=e.job_of(event),
            detail=as_json(event, private=private),
        )
        for sequence, event in enumerate(entry.events)
    ]


def record_view(entry: Entry, revision: Revision) -> Json:
    """Return one command of the ledger with everything that it holds: for operators."""
    return {
        "revision": revision,
        "command_id": entry.id.hex(),
        "actor": actor_words(entry.actor, entry.command),
        "command": entry.command,
        "refusal": as_json(entry.refusal, private=True),
        "events": [{"event": event_name(event), "detail": as_json(event, private=True)} for event in entry.events],
    }


def configuration_record(configuration: Configuration) -> Json:
    """Return a configuration of the cluster as the ledger shows it: who is in it, what changed, and who asked."""
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


def _files(files: int, size_bytes: int) -> str:
    size = format_size(size_bytes)
    return f"{files} file{'' if files == 1 else 's'}, {size}{' bytes' if size.isdigit() else ''}"


def _array_submitted(event: e.ArraySubmitted) -> str:
    throttle = event.options.array_throttle
    at_once = f", at most {throttle} at once" if throttle else ""
    return f"as tasks {compressed(event.tasks)} of array {event.job}{at_once}: {_submitted(event)}"


def _submitted(event: e.JobSubmitted | e.ArraySubmitted) -> str:
    asks = "without a buffer"
    if event.request is not None:
        asks = (
            f"with {format_size(event.granted_bytes)} of pool {event.pool}"
            if event.pool
            else "with a buffer of no capacity"
        )
    held = "" if event.hold is Hold.NONE else ", held"
    return f"submitted {asks}{held}"


def _allocated(event: e.BufferAllocated) -> str:
    passed = f", past job {event.passed} that waits for more" if event.passed else ""
    return f"space is reserved and stage-in starts on {event.node}{passed}"


def _stage_failed(event: e.StageFailed) -> str:
    when = f"tried again at {format_instant(event.retry_at)}" if event.retry_at else "waiting for a release"
    return f"{_words(event.stage)} failed: {event.message}; {when}"


def _run_ended(event: e.RunEnded) -> str:
    if event.result is JobState.PENDING:
        return "the script ended, and the job waits again once its results are out"
    how = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
    return f"the script ended: {event.result.name}, {how}" + (f" ({event.message})" if event.message else "")


def _teardown(event: e.TeardownStarted) -> str:
    hurry = ", without stage-out" if event.hurry else ""
    return f"the job is {event.result.name}; its buffer is being removed{hurry}" + (
        f" ({event.reason})" if event.reason else ""
    )


def _mail(key: str) -> str:
    """Return what a mail is about, from its key."""
    return key.split(".")[1].replace("_", "-")


def _words(stage: e.Stage) -> str:
    return stage.word.replace("_", "-")


_SENTENCES: dict[type[Any], Callable[[Any], str]] = {
    e.ClusterFounded: lambda event: f"the cluster {event.name} was founded with {len(event.pools)} pools",
    e.PoolSet: lambda event: f"pool {event.pool.name} has {format_size(event.pool.quantity_bytes)}",
    e.PolicySet: lambda event: "the policy was changed",
    e.SiteConfigured: lambda event: "the configuration of the site was changed",
    e.PoolRemoved: lambda event: f"pool {event.pool} was removed",
    e.AccountSet: lambda event: f"account {event.account.name} was set, with {len(event.account.members)} users",
    e.AccountDeleted: lambda event: f"account {event.account} was deleted",
    e.QosSet: lambda event: f"QOS {event.qos.name} was set",
    e.QosDeleted: lambda event: f"QOS {event.qos} was deleted",
    e.LicenseSet: lambda event: f"there are {event.license.total} of licence {event.license.name}",
    e.LicenseDeleted: lambda event: f"licence {event.license} was deleted",
    e.ReservationSet: lambda event: f"reservation {event.reservation.name} was set",
    e.ReservationDeleted: lambda event: f"reservation {event.reservation} was deleted",
    e.ReservationStarted: lambda event: f"reservation {event.reservation} began",
    e.ReservationEnded: lambda event: f"reservation {event.reservation} ended",
    e.SchedulingRulesSet: lambda event: "the rules of scheduling were changed",
    e.RevokedFor: lambda event: f"its buffer is taken back so that job {event.beneficiary} may start sooner",
    e.PoolUnitSet: lambda event: f"pool {event.pool} counts {event.unit.word}",
    e.NodeRegistered: lambda event: f"the agent of {event.node} registered with {event.cpus} CPUs",
    e.NodeDrained: lambda event: f"{event.node} was drained: {event.reason}",
    e.NodeResumed: lambda event: f"{event.node} was resumed",
    e.NodeWentDown: lambda event: f"{event.node} is down: {event.reason}",
    e.NodeCameBack: lambda event: f"{event.node} is back",
    e.JobSubmitted: _submitted,
    e.ArraySubmitted: _array_submitted,
    e.OperationQueued: lambda event: f"{_words(event.stage)} waits for its turn",
    e.OperationOrdered: lambda event: f"it is the turn of {_words(event.stage)}",
    e.JobHeld: lambda event: f"held {_HELD[event.hold]}",
    e.JobReleased: lambda event: "released",
    e.BufferAllocated: _allocated,
    e.StagedIn: lambda event: f"staged in: {_files(event.files, event.size_bytes)}",
    e.StageFailed: _stage_failed,
    e.StageRetried: lambda event: f"{_words(event.stage)} is tried again as attempt {event.attempt}: {event.reason}",
    e.RunOrdered: lambda event: f"the script is to run on {event.node}",
    e.RunStarted: lambda event: "the script started",
    e.RunEnded: _run_ended,
    e.StageOutStarted: lambda event: "stage-out started",
    e.StagedOut: lambda event: f"staged out: {_files(event.files, event.size_bytes)}",
    e.TeardownStarted: _teardown,
    e.TornDown: lambda event: "the buffer is gone and its space is free",
    e.CancelRequested: lambda event: "cancelling" + (", in a hurry" if event.hurry else ""),
    e.JobCancelled: lambda event: "cancelled before it held anything",
    e.JobPurged: lambda event: "left the list of finished jobs; its history stays in the ledger",
    e.AllocationRevoked: lambda event: f"the buffer is taken back before the job ran: {event.reason}",
    e.JobRequeued: lambda event: "waits for a new buffer",
    e.JobBecameEligible: lambda event: "its begin time has come",
    e.MailSent: lambda event: f"mail was sent: {_mail(event.mail)}",
    e.MailDropped: lambda event: f"mail was not sent: {_mail(event.mail)}; {event.reason}",
    e.JobOptionsGiven: lambda event: "what else it asked for was noted",
    e.PersistentReserved: lambda event: (
        f"{format_size(event.granted_bytes)} of pool {event.pool} are reserved for persistent buffer {event.name}"
    ),
    e.PersistentCreated: lambda event: f"persistent buffer {event.name} is there",
    e.PersistentDeletionStarted: lambda event: f"persistent buffer {event.name} is being removed",
    e.PersistentDeleted: lambda event: (
        f"persistent buffer {event.name} is gone" + (f" ({event.reason})" if event.reason else "")
    ),
    e.HeldBecause: lambda event: f"held: {event.reason}",
    e.StageOperationFailed: lambda event: (
        f"{_words(event.stage)} failed: {event.reason}; "
        + (f"tried again at {format_instant(event.retry_at)}" if event.retry_at else "waiting for a release")
    ),
    e.PreRunFailed: lambda event: f"what comes before the script failed: {event.reason}",
    e.JobSuspended: lambda event: "suspended",
    e.JobResumed: lambda event: "resumed",
    e.RequeueRequested: lambda event: f"its run is being ended: {event.reason}",
    e.RunRequeued: lambda event: "it waits again as if it had never run",
    e.OperationsRestarted: lambda event: f"its operation begins again as attempt {event.attempt}: the leader changed",
    e.BufferCleared: lambda event: f"its buffer left the list though it could not be removed: {event.reason}",
    e.DeadlineMissed: lambda event: "it could no longer end before its deadline",
    e.FeatureLevelRaised: lambda event: (
        f"the feature level is {event.level}: release {event.release} or later is needed"
    ),
}


def sentence_of(event: e.Event) -> str:
    """Return what happened, for a person."""
    words = _SENTENCES.get(type(event))
    return event_name(event).replace("_", " ") if words is None else words(event)


def verdict_words(verdict: Verdict) -> str:
    """Return the verdict's sentence with its figures."""
    figures = ", ".join(_figure(name, value) for name, value in verdict.figures if value)
    return f"{verdict.sentence} ({figures})" if figures else verdict.sentence


def _figure(name: str, value: str) -> str:
    """Return a figure for a person: names that end in `_us` are instants."""
    if name.endswith("_us"):
        name, value = name.removesuffix("_us"), format_instant(Instant(int(value))) or "never"
    return f"{name.replace('_', ' ')} {value}"
