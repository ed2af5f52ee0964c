"""Changing partitions, and resetting what was used of burst buffers; a function per command, as in `replica.decide`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from msgspec.structs import replace

from replica.messages import commands as c
from replica.messages import events as e
from replica.messages.features import TRANSFERS_AND_PARTITIONS, level_refusal
from replica.model.partitions import check_partition
from replica.state.state import Facts
from replica.values.errors import Refusal, RefusalCode
from replica.values.limits import PARTITIONS_MAX

Changed = tuple[e.Event, ...] | Refusal


def changed_partitions(state: Facts, command: c.Command) -> Changed:
    """Return the events that one of the commands of PARTITION_CHANGES leads to, or why it is refused."""
    refusal = level_refusal(state.feature_level, TRANSFERS_AND_PARTITIONS, c.kind_of(command).replace("_", " "))
    return PARTITION_CHANGES[type(command)](state, command) if refusal is None else refusal


def _set_partition(state: Facts, command: c.SetPartition) -> Changed:
    partition = command.partition
    refusal = check_partition(partition)
    if refusal is not None:
        return refusal
    if partition.name not in state.partitions and len(state.partitions) >= PARTITIONS_MAX:
        sentence = f"there are {PARTITIONS_MAX} partitions"
        return Refusal(RefusalCode.LIMIT_EXCEEDED, sentence, "delete one that nobody uses", "partition")
    if state.partitions.get(partition.name) == partition:
        return ()
    events: list[e.Event] = [e.PartitionSet(partition)]
    if partition.is_default:
        others = (one for name, one in sorted(state.partitions.items()) if one.is_default and name != partition.name)
        events = [*(e.PartitionSet(replace(other, is_default=False)) for other in others), *events]
    return tuple(events)


def _delete_partition(state: Facts, command: c.DeletePartition) -> Changed:
    if command.partition not in state.partitions:
        listed = ", ".join(sorted(state.partitions)[:20]) or "there are none"
        sentence = f"there is no partition {command.partition!r}"
        return Refusal(RefusalCode.INVALID_FIELD, sentence, f"known are: {listed}", "partition")
    return (e.PartitionDeleted(command.partition),)


def _reset_usage(state: Facts, command: c.ResetUsage) -> Changed:
    if command.whose not in ("a", "q"):
        sentence = f"{command.whose[:16]!r} is neither an account (a) nor a QOS (q)"
        return Refusal(RefusalCode.INVALID_FIELD, sentence, "say whose usage it is", "whose")
    what, known = ("account", state.accounts) if command.whose == "a" else ("qos", state.qos)
    if command.name not in known:
        listed = ", ".join(sorted(known)[:20]) or "there are none"
        return Refusal(RefusalCode.INVALID_FIELD, f"there is no {what} {command.name!r}", f"known are: {listed}", what)
    prefix = f"{command.whose}/{command.name}/"
    return (e.UsageReset(command.whose, command.name),) if any(key.startswith(prefix) for key in state.consumed) else ()


PARTITION_CHANGES: Mapping[type, Callable[[Facts, Any], Changed]] = {
    c.SetPartition: _set_partition,
    c.DeletePartition: _delete_partition,
    c.ResetUsage: _reset_usage,
}
"""How each of these commands is decided; all of them are for operators."""
