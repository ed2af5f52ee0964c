"""Deciding what agents say of transfers besides whether they are done: receipts and checkpoints."""

from __future__ import annotations

from replica.messages import commands as c
from replica.messages import events as e
from replica.messages.features import TRANSFERS_AND_PARTITIONS
from replica.model.jobs import Job
from replica.model.operations import TRANSFERS, Stage
from replica.model.transfers import JobTransfers, TransferReceipt, clipped_checkpoint, clipped_receipt, is_due
from replica.state.state import Facts
from replica.values.units import Instant

NO_TRANSFERS = JobTransfers()


def recorded(state: Facts, job: Job, stage: Stage, receipt: TransferReceipt | None) -> tuple[e.TransferRecorded, ...]:
    """Return the event that keeps a receipt, before what follows from the end of its transfer."""
    if receipt is None or stage not in TRANSFERS or state.feature_level < TRANSFERS_AND_PARTITIONS:
        return ()
    return (e.TransferRecorded(job.id, job.node, clipped_receipt(receipt, stage, job.attempt)),)


def reached(
    state: Facts, job: Job, stage: Stage, result: c.OperationReached, at: Instant
) -> tuple[e.TransferCheckpointed, ...]:
    """Return the event that keeps a checkpoint, nothing where the last one is enough."""
    if stage not in TRANSFERS or state.feature_level < TRANSFERS_AND_PARTITIONS:
        return ()
    checkpoint = clipped_checkpoint(result.checkpoint, stage, job.attempt)
    former = state.transfers.get(job.id, NO_TRANSFERS).checkpoint
    return (e.TransferCheckpointed(job.id, job.node, checkpoint),) if is_due(former, checkpoint, at) else ()
