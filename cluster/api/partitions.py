"""Partitions, and what accounts, their users and QOS have used of burst buffers."""

from __future__ import annotations

from cluster.api.privacy import only_user
from cluster.api.problems import bad
from cluster.api.service import Call, Reply
from cluster.schemas import accounts as v
from replica.messages import commands as c
from replica.model.partitions import Partition, PartitionState
from replica.state.state import State
from replica.values.names import EVERY_NODE, NodeListFault, format_nodes, parse_nodes


async def partitions(call: Call) -> Reply:
    """List the partitions."""
    return _partitions(await call.state())


async def set_partition(call: Call) -> Reply:
    """Make a partition, or change all of it."""
    body: v.PartitionRequest = call.body
    every = body.nodes.upper() == EVERY_NODE
    record = Partition(
        name=call.params["name"],
        nodes=() if every or not body.nodes else _nodes(body.nodes),
        every_node=every,
        state=PartitionState[body.state],
        is_default=body.default,
        max_time_s=_max_time_s(body.max_time_s),
        min_nodes=body.min_nodes,
        max_nodes=body.max_nodes,
        users=body.users,
        accounts=body.accounts,
    )
    settled = await call.service.settle(call, c.SetPartition(record))
    return _partitions(settled.state)


async def delete_partition(call: Call) -> Reply:
    """Take a partition away; its jobs wait with PartitionConfig."""
    settled = await call.service.settle(call, c.DeletePartition(call.params["name"]))
    return _partitions(settled.state)


def _nodes(text: str) -> tuple[str, ...]:
    try:
        return parse_nodes(text)
    except NodeListFault as fault:
        sentence, _, remedy = str(fault).partition("; ")
        raise bad(sentence, remedy or f"write names, or {EVERY_NODE}", "nodes") from fault


def _max_time_s(max_time_s: int | None) -> int:
    if max_time_s is not None and max_time_s <= 0:
        raise bad(f"the longest time limit is {max_time_s} s", "use at least 1 s, or null for any", "max_time_s")
    return max_time_s or 0


def _partitions(state: State) -> Reply:
    rows = tuple(_view(state, partition) for _, partition in sorted(state.partitions.items()))
    return Reply(state.revision, v.PartitionsAnswer(revision=state.revision, partitions=rows))


def _view(state: State, partition: Partition) -> v.PartitionView:
    names = state.nodes if partition.every_node else partition.nodes
    up = [node for name in names if (node := state.nodes.get(name)) is not None and not node.down and not node.drained]
    return v.PartitionView(
        name=partition.name,
        state=partition.state.name,
        default=partition.is_default,
        nodes=EVERY_NODE if partition.every_node else format_nodes(partition.nodes),
        nodes_up=len(up),
        cpus=sum(node.cpus for node in up),
        max_time_s=partition.max_time_s or None,
        min_nodes=partition.min_nodes,
        max_nodes=partition.max_nodes,
        users=partition.users,
        accounts=partition.accounts,
    )


async def usage(call: Call) -> Reply:
    """List what accounts, their users and QOS have used of burst buffers."""
    return _usage(call, await call.state())


async def reset_usage(call: Call) -> Reply:
    """Have what an account, or a QOS, has used count as nothing from here on."""
    body: v.UsageResetRequest = call.body
    if (body.account is None) == (body.qos is None):
        raise bad("it is not said whose usage", "name an account, or a QOS", "account")
    command = c.ResetUsage("q", body.qos) if body.qos is not None else c.ResetUsage("a", body.account or "")
    settled = await call.service.settle(call, command)
    return _usage(call, settled.state)


def _usage(call: Call, state: State) -> Reply:
    rows: list[v.UsageView] = []
    only = only_user(call, state)
    for key in sorted(state.consumed):
        whose, name, user, pool = key.split("/")
        if only is not None and user != only:
            continue
        rows.append(
            v.UsageView(
                account=name if whose == "a" else None,
                qos=name if whose == "q" else None,
                user=user or None,
                pool=pool or None,
                byte_minutes=state.consumed[key],
            )
        )
    return Reply(state.revision, v.UsageAnswer(revision=state.revision, usage=tuple(rows)))
