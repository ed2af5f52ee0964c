"""Decide reports of agents about operations and transfers, and of the mailer about mails."""

from __future__ import annotations

import immutables

from forebay.replica.messages import NOTHING, Acceptance, Decision
from forebay.replica.messages import commands as c
from forebay.replica.messages import events as e
from forebay.replica.model import (
    ENDED,
    TRANSFERS,
    Job,
    JobState,
    JobTransfers,
    Mail,
    Stage,
    TransferReceipt,
    agent_of,
    clip_checkpoint,
    clip_receipt,
    is_checkpoint_due,
)
from forebay.replica.operations import (
    active_stage,
    failure_events,
    persistent_change_events,
    pre_run_failure_events,
    script_end_events,
    success_events,
)
from forebay.replica.state import Facts
from forebay.replica.values import MAILS_SETTLED_MAX, NAME_CHARACTERS_MAX, Instant, Rejection, RejectionCode

NO_TRANSFERS = JobTransfers()


def receipt_events(
    state: Facts, job: Job, stage: Stage, receipt: TransferReceipt | None
) -> tuple[e.TransferRecorded, ...]:
    """Return the event that records a transfer receipt, if there is one."""
    if receipt is None or stage not in TRANSFERS:
        return ()
    return (e.TransferRecorded(job.id, job.staged_by, clip_receipt(receipt, stage, job.attempt)),)


def checkpoint_events(
    state: Facts, job: Job, stage: Stage, result: c.TransferProgressed, at: Instant
) -> tuple[e.TransferCheckpointed, ...]:
    """Return the event that records a checkpoint; none if the last one is recent enough."""
    if stage not in TRANSFERS:
        return ()
    checkpoint = clip_checkpoint(result.checkpoint, stage, job.attempt)
    former = state.transfers.get(job.id, NO_TRANSFERS).checkpoint
    return (
        (e.TransferCheckpointed(job.id, job.staged_by, checkpoint),)
        if is_checkpoint_due(former, checkpoint, at)
        else ()
    )


def mail_events(
    owed: immutables.Map[str, Mail], sent: tuple[str, ...], dropped: tuple[tuple[str, str], ...]
) -> tuple[e.Event, ...]:
    """Return the events that settle mails. Keys of mails that are not pending are ignored."""
    found: list[e.Event] = [e.MailSent(owed[key].job, key) for key in dict.fromkeys(sent) if key in owed]
    gone = set(sent)
    for key, reason in dropped:
        if key in owed and key not in gone:
            gone.add(key)
            found.append(e.MailDropped(owed[key].job, key, reason))
    return tuple(found)


def _report_operation(state: Facts, actor: c.Actor, command: c.ReportOperation, at: Instant) -> Decision:
    given_up = state.abandoned.get(command.node)
    if given_up is not None and command.stage is Stage.TEARDOWN and given_up.find(command.job, command.attempt):
        # After a failure the buffer stays listed, and the agent retries at its next start.
        if isinstance(command.result, c.OperationDone):
            return Acceptance((e.AbandonedBufferRemoved(command.job, command.node, command.attempt),))
        return NOTHING
    job = state.jobs.get(command.job)
    if job is None:
        return Rejection(RejectionCode.UNKNOWN_JOB, f"job {command.job} does not exist", "drop the report", "job")
    buffer = state.buffers.get(job.id)
    stage = active_stage(job, buffer)
    performs = agent_of(job, buffer)
    if performs != command.node or job.attempt != command.attempt or stage is not command.stage:
        ordered = "nothing" if stage is None else f"{stage.word} as attempt {job.attempt} on {performs}"
        return Rejection(
            RejectionCode.STALE_ATTEMPT,
            f"job {job.id}: {command.stage.word} as attempt {command.attempt} on {command.node} is not ordered, "
            f"but {ordered}",
            "drop the report",
            "attempt",
        )
    result = command.result
    if stage is Stage.RUN:
        if isinstance(result, c.ScriptStarted):
            if job.state is JobState.CONFIGURING:
                return Acceptance((e.RunStarted(job.id),))
            return Rejection(
                RejectionCode.STALE_ATTEMPT, f"job {job.id} has already started", "drop the report", "result"
            )
        if isinstance(result, c.ScriptEnded) and result.result in ENDED:
            return Acceptance(
                script_end_events(state, job, buffer, result.result, result.exit_code, result.signal, result.message)
            )
        starting = job.state is JobState.CONFIGURING and buffer is not None
        if starting and isinstance(result, c.OperationFailed):
            return Acceptance(pre_run_failure_events(state, job, result.message))
    elif buffer is not None:
        if isinstance(result, c.TransferProgressed):
            return Acceptance(checkpoint_events(state, job, stage, result, at))
        if isinstance(result, c.PersistentChanged):
            changed = persistent_change_events(state, job, stage, result.name)
            if changed:
                return Acceptance(changed)
            return Rejection(
                RejectionCode.STALE_ATTEMPT,
                f"job {job.id} has no persistent buffer {result.name[:NAME_CHARACTERS_MAX]!r} to create or destroy",
                "drop the report",
                "result",
            )
        if isinstance(result, c.OperationDone):
            follows = success_events(state, job, buffer, stage, result.files, result.size_bytes, result.digest)
            return Acceptance((*receipt_events(state, job, stage, result.receipt), *follows))
        if isinstance(result, c.OperationFailed):
            follows = failure_events(
                state, job, stage, result.message, at, final=result.final, operation=result.operation
            )
            return Acceptance((*receipt_events(state, job, stage, result.receipt), *follows))
    return Rejection(
        RejectionCode.INVALID_FIELD,
        f"result {type(result).__name__} does not fit stage {stage.word}",
        "report a result of the ordered stage",
        "result",
    )


def _settle_mails(state: Facts, actor: c.Actor, command: c.SettleMails, at: Instant) -> Decision:
    if len(command.sent) + len(command.dropped) > MAILS_SETTLED_MAX:
        return Rejection(
            RejectionCode.LIMIT_EXCEEDED,
            f"{len(command.sent) + len(command.dropped)} mails exceed the limit",
            f"settle at most {MAILS_SETTLED_MAX} at once",
            "sent",
        )
    return Acceptance(mail_events(state.mails, command.sent, command.dropped))
