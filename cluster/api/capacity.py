"""Pools, buffers and nodes."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.api import wire
from cluster.api.privacy import only_user
from cluster.api.render import buffer_view, holders, node_jobs, node_view, persistent_view, pool_view
from cluster.api.service import Call, Reply
from cluster.liveness import Liveness
from cluster.schemas.jobs import BuffersAnswer, NodesAnswer, PoolsAnswer
from replica.messages import commands as c

BUFFERS_LISTED_MAX = 10_000
"""Buffers in one list, count: the newest; what is left out is old and complete first."""


async def pools(call: Call) -> Reply:
    """List pools with their derived free capacity."""
    state = await call.state()
    counts = holders(state)
    rows = tuple(pool_view(state, name, counts.get(name, 0)) for name in sorted(state.pools))
    return Reply(state.revision, PoolsAnswer(revision=state.revision, pools=rows))


async def set_pool(call: Call) -> Reply:
    """Make or change a pool."""
    name = call.params["name"]
    settled = await call.service.settle(call, wire.set_pool(name, call.body))
    state = settled.state
    return Reply(state.revision, pool_view(state, name, holders(state).get(name, 0)))


async def buffers(call: Call) -> Reply:
    """List buffers: the persistent ones, those that hold or wait for something, and the newest others unless `live`."""
    state = await call.state()
    only = only_user(call, state)

    def listed(job_ids: Iterable[int]) -> list[int]:
        found = (job_id for job_id in job_ids if job_id in state.buffers)
        return [job_id for job_id in found if only is None or state.buffers[job_id].user == only]

    named = sorted(name for name, buffer in state.persistent.items() if only is None or buffer.user == only)
    persistent = tuple(persistent_view(state, name) for name in named)
    found = sorted(listed(state.unfinished))[:BUFFERS_LISTED_MAX]
    room = 0 if call.query.get("live") == "yes" else BUFFERS_LISTED_MAX - len(found)
    over = sorted(listed(state.finished), reverse=True)[:room]
    rows = tuple(buffer_view(state, job_id) for job_id in sorted(found + over))
    return Reply(state.revision, BuffersAnswer(revision=state.revision, buffers=(*persistent, *rows)))


async def nodes(call: Call) -> Reply:
    """List nodes with the jobs that have something there."""
    state = await call.state()
    jobs, liveness = node_jobs(state), _liveness(call)
    rows = tuple(node_view(state, name, jobs[name], liveness) for name in sorted(state.nodes))
    return Reply(state.revision, NodesAnswer(revision=state.revision, nodes=rows))


async def drain(call: Call) -> Reply:
    """Keep new work from a node."""
    return await _change(call, c.DrainNode(call.params["name"], call.body.reason))


async def resume(call: Call) -> Reply:
    """Give a drained node new work again."""
    return await _change(call, c.ResumeNode(call.params["name"]))


async def _change(call: Call, command: c.DrainNode | c.ResumeNode) -> Reply:
    settled = await call.service.settle(call, command)
    state = settled.state
    view = node_view(state, command.node, node_jobs(state)[command.node], _liveness(call))
    return Reply(state.revision, view)


def _liveness(call: Call) -> Liveness | None:
    controller = call.service.controller
    return controller.liveness if controller.leads else None
