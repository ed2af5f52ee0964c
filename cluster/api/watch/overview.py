"""Handlers of `/v1/overview` and `/v1/history/pools`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from forebay.cluster.api.history import history_busy
from forebay.cluster.api.history_service import HistoryServiceBusy, HistoryServiceTimeout, PoolUseReply
from forebay.cluster.api.render import capacity_controls, holders, node_word, pool_view
from forebay.cluster.api.service import ApiCall, Reply, handles
from forebay.cluster.api.transfers import summary_of
from forebay.cluster.api.watch.attention import (
    AttentionItems,
    find_jobs,
    find_ledger,
    find_nodes,
    find_pools,
    find_replicas,
)
from forebay.cluster.api.watch.live import replicas_of, sink_needs
from forebay.cluster.schemas import (
    OverviewAnswer,
    PoolStepView,
    PoolUseAnswer,
    PoolUseView,
    made_of,
)
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import format_instant
from forebay.cluster.system.eventloop import SlicedWork, iterate_paced
from forebay.replica.model import JobState, PoolUnit
from forebay.replica.state import State

REASONS_COUNTED_MAX = 20
"""Reasons counted separately, count; all others are counted together."""

OTHER_REASONS = "others"
FAILED = "a failed operation"
"""Replaces the reason of a failed operation, which can name files."""


@handles(ops.SHOW_OVERVIEW)
async def show_overview(call: ApiCall[None]) -> Reply[OverviewAnswer]:
    state, work = await call.state(), call.work
    status, members = await replicas_of(call, state)
    needs = AttentionItems()
    find_replicas(members, needs, call.service.clock.now())
    find_ledger(status, needs)
    for need in sink_needs(call):
        needs.append(need)
    counts, controls = holders(state), capacity_controls(state)
    find_pools((pool_view(state, name, counts[name], controls) for name in sorted(state.pools)), needs)
    await find_nodes(state, needs, work)
    await find_jobs(call, state, needs, work)
    jobs, pending = await _jobs(state, work)
    nodes: Counter[str] = Counter()
    async for name in iterate_paced(state.nodes, work, parts=2):
        nodes[node_word(state, name)] += 1
    answer = made_of(
        status,
        OverviewAnswer,
        revision=state.revision,
        at=format_instant(state.at),
        members=members,
        jobs=jobs,
        waiting=await _waiting(call, state, pending, work),
        nodes=dict(sorted(nodes.items())),
        transfers=await summary_of(call, state, work),
        needs=tuple(needs.rows),
        needs_count=needs.count,
    )
    return Reply(state.revision, answer)


async def _jobs(state: State, work: SlicedWork) -> tuple[dict[str, int], list[int]]:
    """Count unfinished jobs by state, and return the pending ones."""
    counts: Counter[JobState] = Counter()
    pending: list[int] = []
    async for job_id in iterate_paced(state.unfinished, work, parts=1):
        job = state.jobs[job_id]
        counts[job.state] += 1
        if job.state is JobState.PENDING:
            pending.append(job_id)
    return {job_state.name: counts[job_state] for job_state in JobState if counts[job_state]}, pending


async def _waiting(call: ApiCall[Any], state: State, pending: list[int], work: SlicedWork) -> dict[str, int]:
    """Count waiting jobs by reason, most frequent first."""
    known = await call.service.verdicts.verdicts_of(state, pending, work, reasons=True)
    counts: Counter[str] = Counter()
    async for job_id in iterate_paced(pending, work, parts=4):
        job, reason = state.jobs[job_id], known.reason(job_id)
        own = reason in (job.message, job.effective_interruptions.held_because)
        counts[FAILED if own else reason] += 1
    found = dict(counts.most_common(REASONS_COUNTED_MAX))
    rest = counts.total() - sum(found.values())
    return {**found, OTHER_REASONS: rest} if rest else found


@handles(ops.LIST_POOL_USE)
async def list_pool_use(call: ApiCall[None]) -> Reply[PoolUseAnswer]:
    state = await call.state()
    try:
        found = await call.service.past.pools(call.identity, call.query.get("name", ""))
    except (HistoryServiceBusy, HistoryServiceTimeout) as error:
        raise history_busy(error) from error
    await call.work.take(0, parts=sum(2 * len(pool.steps) for pool in found.pools))
    return Reply(state.revision, _use(found, state.revision))


def _use(found: PoolUseReply, revision: int) -> PoolUseAnswer:
    rows = []
    for pool in found.pools:
        steps = tuple(
            PoolStepView(at=format_instant(at) or "", held_bytes=held, served_bytes=served, quantity_bytes=quantity)
            for at, held, served, quantity in pool.steps
        )
        unit = PoolUnit(pool.unit) if pool.unit else PoolUnit.BYTES
        rows.append(PoolUseView(name=pool.name, unit=unit.word, steps=steps))
    return PoolUseAnswer(
        revision=revision,
        from_time=format_instant(found.since),
        to_time=format_instant(found.until),
        step_s=found.step_s,
        pools=tuple(rows),
        truncated=found.truncated,
    )
