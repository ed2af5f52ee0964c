"""Handlers of transfers, receipts and unexported files: `/v1/transfers`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from forebay.cluster.api.history import decode_records, recorded_job, records_of
from forebay.cluster.api.privacy import check_may_see, may_see, owns
from forebay.cluster.api.render import task_words
from forebay.cluster.api.service import ApiCall, Reply, encode_view, handles
from forebay.cluster.api.web import bad_request, unknown_job
from forebay.cluster.schemas import (
    CheckpointView,
    JobTransfersView,
    JobView,
    LeftOutView,
    NotExportedView,
    ReceiptsAnswer,
    ReceiptView,
    TransfersAnswer,
    TransfersSummary,
    TransferState,
    TransferView,
    made_of,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import Role
from forebay.cluster.server import Transfer
from forebay.cluster.system import format_instant
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.messages import events as e
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

RECEIPTS_LISTED_MAX = 1_000
"""Newest receipts of one job in a response, count; a job that is retried forever has more."""

NO_SHARES = RateShares()

_SAID = {*Transfer.__struct_fields__} & {*TransferView.__struct_fields__} - {"attempt", "node", "stage"}
"""Progress fields with the same names in agents' reports and in views."""


@handles(ops.LIST_TRANSFERS)
async def list_transfers(call: ApiCall[None]) -> Reply[TransfersAnswer]:
    most = ops.TRANSFERS_LISTED_MAX
    limit, after = call.integer("limit", most, least=1, most=most), call.integer("after", 0, least=0, most=2**63 - 1)
    state, work = await call.state(), call.work
    said = _reported_transfers(call, state)
    transfers = frozenset(await _transferring(call, state, work))
    rest = [row.job for row in said.values() if row.job not in transfers and may_see(call, state, row.job)]
    everything = (*transfers, *rest)
    later = [job async for job in iterate_paced(everything, work, parts=1) if job > after]
    listed = await work.sort(later)
    rows: list[TransferView] = []
    seen = list(islice(listed, limit + 1))
    async for job_id in iterate_paced(seen[:limit], work):
        if job_id in transfers:
            rows.append(encode_view(transfer_view(call, state, job_id, said.get(job_id))))
        else:
            # Progress of other operations, such as a removal.
            rows.append(encode_view(_said_view(call, state, said[job_id])))
    answer = TransfersAnswer(
        revision=state.revision,
        transfers=tuple(rows),
        truncated=len(seen) > limit,
        matching=len(everything),
        skipped=len(everything) - len(later),
    )
    return Reply(state.revision, answer)


async def _transferring(call: ApiCall[Any], state: State, work: SlicedWork) -> list[int]:
    """Return the visible jobs with a transfer."""
    # Few jobs have transfers, so look them up by node.
    found: dict[int, bool] = {}
    for jobs in state.on_node.values():
        async for job_id in iterate_paced(jobs, work, parts=2):
            if is_transfer(state, job_id) and may_see(call, state, job_id):
                found[job_id] = True
    return list(found)


async def summary_of(call: ApiCall[Any], state: State, work: SlicedWork) -> TransfersSummary:
    """Count the visible transfers by state, and add up their rates."""
    said = _reported_transfers(call, state)
    words: Counter[str] = Counter()
    rate_bytes_s = 0.0
    async for job_id in iterate_paced(await _transferring(call, state, work), work, parts=2):
        job = state.jobs[job_id]
        word = _word(job, queued=awaited_slot(job, state.buffers.get(job_id)) is not None)
        words[word] += 1
        if word == "moving" and job_id in said:
            rate_bytes_s += said[job_id].rate_bytes_s
    return TransfersSummary(**dict(words), rate_bytes_s=rate_bytes_s)


@handles(ops.SHOW_JOB_TRANSFERS)
async def show_job_transfers(call: ApiCall[None]) -> Reply[JobTransfersView]:
    state = await call.service.current()
    job_id = call.job_in(state)
    if job_id not in state.jobs:
        raise unknown_job(f"job {job_id} is not in the current state", f"see /v1/transfers/{job_id}/receipts", "")
    check_may_see(call, state, job_id)
    return Reply(state.revision, transfers_of(call, state, job_id))


@handles(ops.LIST_RECEIPTS)
async def list_receipts(call: ApiCall[None]) -> Reply[ReceiptsAnswer]:
    stage = call.query.get("stage")
    if stage is not None and stage not in (one.word for one in TRANSFERS):
        raise bad_request(f"the stage {stage[:32]!r} moves no data", "use stage_in or stage_out", "query stage")
    attempt = call.integer("attempt", 0, least=1, most=2**63 - 1)
    state = await call.state()
    recorded = recorded_job(call, state)
    receipts: list[ReceiptView] = []
    complete = False
    found, work = records_of(call, recorded, newest=True), call.work
    async for record, batch in decode_records(recorded, found, work):
        for event in batch.entries[0].events:
            if isinstance(event, e.JobSubmitted | e.ExternalJobSetUp):
                complete = found.whole  # its submit is included
            elif isinstance(event, e.TransferRecorded):
                if stage in (None, event.receipt.stage.word) and attempt in (0, event.receipt.attempt):
                    await work.take()
                    view = receipt_view(event.job, event.node, event.receipt, names=recorded.names)
                    receipts.append(msgspec.structs.replace(view, revision=record.revision))
    complete = complete and len(receipts) <= RECEIPTS_LISTED_MAX
    recorded.check()
    rows = tuple([encode_view(row) async for row in iterate_paced(receipts[-RECEIPTS_LISTED_MAX:], work)])
    return Reply(
        state.revision,
        ReceiptsAnswer(revision=state.revision, job_id=recorded.job_id, receipts=rows, complete=complete),
    )


def is_transfer(state: State, job_id: int) -> bool:
    """Return True if a stage-in or stage-out of the job is running, queued, or failed and awaiting release."""
    return stage_of(state.jobs[job_id], state.buffers.get(job_id)) in TRANSFERS


def transfers_of(call: ApiCall[Any], state: State, job_id: int) -> JobTransfersView:
    """Return all transfer information of a job in the state."""
    job, known = state.jobs[job_id], state.transfers.get(job_id, NO_TRANSFERS)
    said = _reported_transfers(call, state).get(job_id)
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
    words = _word(job, queued=awaited_slot(job, buffer) is not None)
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


def _word(job: Job, *, queued: bool) -> TransferState:
    if job.stuck:
        return "failed"
    if job.retry_at != NEVER:
        return "retrying"
    return "queued" if queued else "moving"


def _said_view(call: ApiCall[Any], state: State, said: Transfer) -> TransferView:
    user = state.jobs[said.job].request.user
    task = task_words(state, said.job)
    view = TransferView(job_id=said.job, task=task, attempt=said.attempt, node=said.node, stage=said.stage, user=user)
    return _with_said(call, state, view, said)


def _with_said(call: ApiCall[Any], state: State, view: TransferView, said: Transfer) -> TransferView:
    left = said.bytes_total - said.bytes_done
    known = left >= 0 and said.bytes_total and said.rate_bytes_s > 0
    changed = {
        **{name: getattr(said, name) for name in _SAID},
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


def _reported_transfers(call: ApiCall[Any], state: State) -> dict[int, Transfer]:
    controller = call.service.controller
    rows: Iterable[Transfer] = controller.liveness.transfers(state) if controller.leads else ()
    return {row.job: row for row in rows}
