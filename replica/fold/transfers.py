"""Fold events of transfers: the rules, and the receipts and checkpoints of each job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.model import RECEIPTS_PER_JOB_MAX, JobTransfers, TransferReceipt
from forebay.replica.state import StateBuilder
from forebay.replica.values import Instant

NO_TRANSFERS = JobTransfers()


def _fold_transfer_rules_set(builder: StateBuilder, event: e.TransferRulesSet) -> None:
    builder.transfer_rules = event.rules
    # The rules belong to the configuration, so a change based on an older revision is rejected.
    builder.site = replace(builder.site, revision=builder.revision)


def _fold_transfer_recorded(builder: StateBuilder, event: e.TransferRecorded) -> None:
    known = builder.transfers.get(builder.job(event.job).id, NO_TRANSFERS)
    builder.transfers[event.job] = JobTransfers(_limit_receipts((*known.receipts, event.receipt)))


def _limit_receipts(receipts: tuple[TransferReceipt, ...]) -> tuple[TransferReceipt, ...]:
    """Drop receipts beyond the limit: those of failed attempts first, then the oldest."""
    if len(receipts) <= RECEIPTS_PER_JOB_MAX:
        return receipts
    gone = next((number for number, receipt in enumerate(receipts) if not receipt.complete), 0)
    return receipts[:gone] + receipts[gone + 1 :]


def _fold_transfer_checkpointed(builder: StateBuilder, event: e.TransferCheckpointed) -> None:
    known = builder.transfers.get(builder.job(event.job).id, NO_TRANSFERS)
    checkpoint = replace(event.checkpoint, at=Instant(builder.at))
    builder.transfers[event.job] = replace(known, checkpoint=checkpoint)


TRANSFER_FOLDS: dict[type, Callable[[StateBuilder, Any], None]] = {
    e.TransferRulesSet: _fold_transfer_rules_set,
    e.TransferRecorded: _fold_transfer_recorded,
    e.TransferCheckpointed: _fold_transfer_checkpointed,
}
"""Event type -> fold, merged in `replica.fold.fold`."""
