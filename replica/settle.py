"""Settling: the fence, and what one agreed batch does to the state (laws 1, 4, 6)."""

from __future__ import annotations

from replica.commit import Batch, Entry, Receipt
from replica.events import job_of
from replica.fold import Draft, LedgerViolation, fold_into
from replica.limits import RECEIPTS_MAX
from replica.refusals import Refusal, RefusalCode
from replica.state import State
from replica.units import Instant, Revision


def settle(state: State, batch: Batch) -> State | None:
    """Return the state after the batch, or None where the fence refuses it: it was decided on another revision.

    Every replica refuses the same batches, so two would-be leaders are harmless. Raises LedgerViolation for a batch
    whose clock goes backwards or whose events no ledger can hold.
    """
    if batch.base != state.revision:
        return None
    if batch.at < state.at:
        raise LedgerViolation(f"the clock of revision {batch.base} goes back from {state.at} to {batch.at}")
    draft = Draft(state)
    for entry in batch.entries:
        _settle_entry(draft, entry, batch.at)
    return draft.finish()


def settle_entry(state: State, entry: Entry, at: Instant) -> State:
    """Return the state after one entry: what a proposer's tentative state goes through while it builds a batch."""
    draft = Draft(state)
    _settle_entry(draft, entry, at)
    return draft.finish()


def _settle_entry(draft: Draft, entry: Entry, at: Instant) -> None:
    draft.at = at
    draft.revision += 1
    fold_into(draft, entry.events)
    if entry.id:
        receipt = Receipt(Revision(draft.revision), _job_concerned(entry), entry.refusal)
        draft.settle(entry.id, receipt, RECEIPTS_MAX)


def _job_concerned(entry: Entry) -> int:
    for event in entry.events:
        job = job_of(event)
        if job is not None:
            return job
    return 0


def receipt_for(state: State, command_id: bytes) -> Receipt | Refusal | None:
    """Return the first answer to a command id; a Refusal where it may have been answered and forgotten; None where it
    is new.
    """
    receipt = state.receipts.get(command_id)
    if receipt is not None:
        return receipt
    if int.from_bytes(command_id[:6], "big") <= state.receipts_horizon_ms:
        return Refusal(
            RefusalCode.COMMAND_TOO_OLD,
            "the command id is older than the answers that are kept, so it may have been carried out already",
            "look whether it was, and send it again with a new command id if not",
            "command_id",
        )
    return None
