"""Handlers of transfers, receipts and unexported files: `/v1/transfers`."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import msgspec

from forebay.cluster.api.history import decode_records, recorded_job, records_of
from forebay.cluster.api.privacy import check_may_see, may_see
from forebay.cluster.api.service import ApiCall, Reply, encode_view, handles
from forebay.cluster.api.transfers.views import (
    is_transfer,
    receipt_view,
    reported_transfers,
    reported_view,
    transfer_view,
    transfer_word,
    transfers_of,
)
from forebay.cluster.api.web import bad_request, unknown_job
from forebay.cluster.schemas import (
    JobTransfersView,
    ReceiptsAnswer,
    ReceiptView,
    TransfersAnswer,
    TransfersSummary,
    TransferView,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.messages import events as e
from forebay.replica.model import (
    TRANSFERS,
    awaited_slot,
)
from forebay.replica.state import State

RECEIPTS_LISTED_MAX = 1_000
"""Newest receipts of one job in a response, count; a job that is retried forever has more."""


@handles(ops.LIST_TRANSFERS)
async def list_transfers(call: ApiCall[None]) -> Reply[TransfersAnswer]:
    most = ops.TRANSFERS_LISTED_MAX
    limit, after = call.integer("limit", most, least=1, most=most), call.integer("after", 0, least=0, most=2**63 - 1)
    state, work = await call.state(), call.work
    said = reported_transfers(call, state)
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
            rows.append(encode_view(reported_view(call, state, said[job_id])))
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
    said = reported_transfers(call, state)
    words: Counter[str] = Counter()
    rate_bytes_s = 0.0
    async for job_id in iterate_paced(await _transferring(call, state, work), work, parts=2):
        job = state.jobs[job_id]
        word = transfer_word(job, queued=awaited_slot(job, state.buffers.get(job_id)) is not None)
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
