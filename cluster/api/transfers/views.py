"""Views of transfers, their receipts and unexported files."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from forebay.cluster.api.privacy import owns
from forebay.cluster.api.render import task_words
from forebay.cluster.schemas import (
    CheckpointView,
    JobTransfersView,
    JobView,
    LeftOutView,
    NotExportedView,
    ReceiptView,
    TransferState,
    TransferView,
    made_of,
)
from forebay.cluster.security import Role
from forebay.cluster.system import format_instant
from forebay.replica.model import (
    TRANSFERS,
    Job,
    RateShares,
    TransferCheckpoint,
    TransferReceipt,
    awaited_slot,
    stage_of,
)
from forebay.replica.operations import active_rules, node_bytes_s, rate_shares
from forebay.replica.state import State
from forebay.replica.values import NEVER
from forebay.replica.views import NO_TRANSFERS, not_exported

if TYPE_CHECKING:
    from forebay.cluster.api.service import ApiCall
    from forebay.cluster.server import Transfer

NO_SHARES = RateShares()

_SHOWN = frozenset(TransferView.__struct_fields__) - {"attempt", "node", "stage"}
"""Fields of a view that an agent's report may have under the same name."""


def is_transfer(state: State, job_id: int) -> bool:
    """Return True if a stage-in or stage-out of the job is running, queued, or failed and awaiting release."""
    return stage_of(state.jobs[job_id], state.buffers.get(job_id)) in TRANSFERS


def transfers_of(call: ApiCall[Any], state: State, job_id: int) -> JobTransfersView:
    """Return all transfer information of a job in the state."""
    job, known = state.jobs[job_id], state.transfers.get(job_id, NO_TRANSFERS)
    said = reported_transfers(call, state).get(job_id)
    names = owns(call, state, job_id)
    return JobTransfersView(
        revision=state.revision,
        job_id=job_id,
        task=task_words(state, job_id),
        transfer=transfer_view(call, state, job_id, said) if is_transfer(state, job_id) else None,
        checkpoint=None if known.checkpoint is None else _checkpoint_view(known.checkpoint),
        receipts=tuple(receipt_view(job_id, job.staged_by, receipt, names=names) for receipt in known.receipts),
        not_exported=tuple(
            made_of(one, NotExportedView, path=one.path if names else "(private)")
            for one in not_exported(state, job_id)
        ),
    )


def with_transfers(call: ApiCall[Any], state: State, view: JobView) -> JobView:
    """Add transfer information to a job's view, if there is any."""
    found = transfers_of(call, state, view.job_id)
    known = found.transfer or found.checkpoint or found.receipts or found.not_exported
    return msgspec.structs.replace(view, transfers=found) if known else view


def transfer_view(call: ApiCall[Any], state: State, job_id: int, said: Transfer | None) -> TransferView:
    """Return a transfer's replicated state, with its agent's progress of this attempt, if reported."""
    job, buffer = state.jobs[job_id], state.buffers.get(job_id)
    stage = stage_of(job, buffer)
    assert stage is not None
    rules = active_rules(state)
    of_node = None if rules is None else node_bytes_s(state, rules, job.staged_by)
    shares = NO_SHARES if rules is None else rate_shares(state, rules, job.request.user, job.staged_by, of_node)
    limits = (shares.transfer_bytes_s, shares.user_bytes_s, shares.node_bytes_s)
    words = transfer_word(job, queued=awaited_slot(job, buffer) is not None)
    view = TransferView(
        job_id=job_id,
        task=task_words(state, job_id),
        attempt=job.attempt,
        node=job.staged_by,
        stage=stage.word,
        user=job.request.user,
        state=words,
        # A failure message can name files; the role drill sees only the state.
        message=job.message if words in ("retrying", "failed") and call.identity.role is not Role.DRILL else "",
        order_time=format_instant(job.order_at),
        transfer_limit_bytes_s=limits[0],
        user_limit_bytes_s=limits[1],
        node_limit_bytes_s=limits[2],
        paused=0 in limits,
    )
    return view if said is None or words != "moving" else _with_said(call, state, view, said)


def transfer_word(job: Job, *, queued: bool) -> TransferState:
    if job.stuck:
        return "failed"
    if job.retry_at != NEVER:
        return "retrying"
    return "queued" if queued else "moving"


def reported_view(call: ApiCall[Any], state: State, said: Transfer) -> TransferView:
    user = state.jobs[said.job].request.user
    task = task_words(state, said.job)
    view = TransferView(job_id=said.job, task=task, attempt=said.attempt, node=said.node, stage=said.stage, user=user)
    return _with_said(call, state, view, said)


def _with_said(call: ApiCall[Any], state: State, view: TransferView, said: Transfer) -> TransferView:
    left = said.bytes_total - said.bytes_done
    known = left >= 0 and said.bytes_total and said.rate_bytes_s > 0
    changed = {
        **{name: getattr(said, name) for name in said.__struct_fields__ if name in _SHOWN},
        "updated_time": format_instant(said.updated_at),
        "file": said.file if owns(call, state, said.job) else "",
        "time_left_s": round(left / said.rate_bytes_s, 3) if known else None,
    }
    return msgspec.structs.replace(view, **changed)


def receipt_view(job_id: int, node: str, receipt: TransferReceipt, *, names: bool) -> ReceiptView:
    """Return a receipt; `names` includes the names of omitted files."""
    return made_of(
        receipt,
        ReceiptView,
        job_id=job_id,
        node=node,
        stage=receipt.stage.word,
        left_out_first=tuple(made_of(one, LeftOutView) for one in receipt.left_out_first) if names else (),
        start_time=format_instant(receipt.started_at),
        end_time=format_instant(receipt.ended_at),
    )


def _checkpoint_view(checkpoint: TransferCheckpoint) -> CheckpointView:
    stage, time = checkpoint.stage.word, format_instant(checkpoint.at)
    return made_of(checkpoint, CheckpointView, stage=stage, time=time)


def reported_transfers(call: ApiCall[Any], state: State) -> dict[int, Transfer]:
    controller = call.service.controller
    rows: Iterable[Transfer] = controller.liveness.transfers(state) if controller.leads else ()
    return {row.job: row for row in rows}
