"""Partitions: the nodes that a job may run on, with the users, limits and state of each set.

A partition is a gate and a set of nodes. Its record alone decides the gate (`partition_gate`); placement is decided at
the job's turn in a scheduling cycle (`replica.scheduler.admission`). A node may be in several partitions. If a site has
no partitions, a job's partition name is stored without effect. A job without a partition, where none is the default,
may run on any node. Source: slurm.conf(5); reasons are Slurm's, byte for byte.
"""

from __future__ import annotations

from bisect import bisect_left
from enum import IntEnum

import immutables
import msgspec

from forebay.replica.model.accounts import check_name
from forebay.replica.model.requests import JobRequest
from forebay.replica.values import (
    ACCOUNT_USERS_MAX,
    NODES_MAX,
    PARTITION_NODES_CHARACTERS_MAX,
    TIME_LIMIT_S_MAX,
    Reason,
    Rejection,
    RejectionCode,
    Verdict,
)


class PartitionState(IntEnum):
    """States of a partition. The numbers are wire numbers (law 12)."""

    UP = 1
    DOWN = 2
    """Accepts new jobs and starts none."""
    DRAIN = 3
    """Accepts no new jobs; waiting ones may start."""
    INACTIVE = 4
    """Accepts no new jobs and starts none."""

    @property
    def takes_jobs(self) -> bool:
        """Return whether jobs may be submitted to the partition."""
        return self in (PartitionState.UP, PartitionState.DOWN)

    @property
    def starts_jobs(self) -> bool:
        """Return whether the partition's jobs may get space and CPUs."""
        return self in (PartitionState.UP, PartitionState.DRAIN)


class Partition(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A partition. A change never takes space or CPUs from jobs that have them."""

    name: str
    nodes: tuple[str, ...] = ()
    """Its nodes, ascending, which need not exist yet; empty if `every_node` is set."""
    every_node: bool = False
    state: PartitionState = PartitionState.UP
    is_default: bool = False
    """True if it is the partition of jobs that name none."""
    max_time_s: int = 0
    """Maximum time limit of a job, seconds; 0: unlimited."""
    min_nodes: int = 0
    max_nodes: int | None = None
    """`min_nodes` and `max_nodes` limit the nodes of one job; None: unlimited."""
    users: tuple[str, ...] = ()
    accounts: tuple[str, ...] = ()
    """Users and accounts that may use the partition; an empty list allows all. Both must match, as in Slurm."""

    def admits(self, user: str, account: str) -> bool:
        """Return whether a job of the user in the account may use the partition."""
        return (not self.users or user in self.users) and (not self.accounts or account in self.accounts)

    def has(self, node: str) -> bool:
        """Return whether the node is in the partition."""
        if self.every_node:
            return True
        place = bisect_left(self.nodes, node)
        return place < len(self.nodes) and self.nodes[place] == node


Partitions = immutables.Map[str, Partition]


def node_set_name(partitions: Partitions, partition: str) -> str:
    """Return the name under which the scheduler keeps the nodes of a partition; empty: all nodes."""
    found = partitions.get(partition) if partition else None
    return "" if not partitions or not partition or (found is not None and found.every_node) else partition


def is_node_in(partitions: Partitions, place: str, node: str) -> bool:
    """Return whether a node is in the set with a `node_set_name`."""
    if not place:
        return True
    found = partitions.get(place)
    return found is not None and found.has(node)


class NodeSetWaiters:
    """Jobs that wait for CPUs of any node of a partition in one scheduling cycle.

    Lower-priority jobs get no CPUs of those nodes.
    """

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._waiting: dict[str, int] = {}

    def wait(self, place: str, job: int) -> None:
        """Record a job that waits for a node set; only the first counts."""
        self._waiting.setdefault(place, job)

    def first_in(self, place: str) -> int:
        """Return the first job that waits for the whole node set, 0 for none."""
        return (self._waiting.get("") or self._waiting.get(place, 0)) if self._waiting else 0

    def first_for(self, node: str) -> int:
        """Return the first job that waits for a node set with this node, 0 for none."""
        for place, job in self._waiting.items():
            if is_node_in(self._partitions, place, node):
                return job
        return 0


def partition_gate(partitions: Partitions, request: JobRequest) -> Verdict | None:
    """Return the verdict of the partition on a pending job, from its record alone; None: it may proceed."""
    options = request.effective_options
    name = options.partition
    if not partitions or not name:
        return None
    partition = partitions.get(name)
    figures: tuple[tuple[str, str], ...] = (("partition", name),)
    if partition is None:
        sentence = f"partition {name} was deleted; update the job to another partition"
        return Verdict(Reason.PARTITION_CONFIG, sentence, figures)
    state = partition.state
    if not state.starts_jobs:
        reason = Reason.PARTITION_DOWN if state is PartitionState.DOWN else Reason.PARTITION_INACTIVE
        return Verdict(reason, f"partition {name} is {state.name}, and starts no jobs", figures)
    if not partition.admits(request.user, options.account):
        figures += (("user", request.user), ("account", options.account))
        return Verdict(Reason.PARTITION_CONFIG, f"user or account may no longer use partition {name}", figures)
    nodes, most = options.nodes, partition.max_nodes
    if nodes < partition.min_nodes or (most is not None and nodes > most):
        figures += (("nodes", str(nodes)), ("least", str(partition.min_nodes)))
        figures += () if most is None else (("most", str(most)),)
        return Verdict(Reason.PARTITION_NODE_LIMIT, f"partition {name} does not allow so many nodes", figures)
    if partition.max_time_s and request.time_limit_s > partition.max_time_s:
        figures += (("time_limit_s", str(request.time_limit_s)), ("most_s", str(partition.max_time_s)))
        return Verdict(Reason.PARTITION_TIME_LIMIT, f"partition {name} does not allow such a long time limit", figures)
    return None


def choose_partition(partitions: Partitions, partition: str, user: str, account: str) -> str | Rejection:
    """Return the partition of a submitted job, or a rejection; empty without a named or default partition.

    Jobs that exceed the partition's limits wait and are not rejected (Slurm: EnforcePartLimits=NO).
    """
    if not partitions:
        return partition
    if not partition:
        default = next((one for one in partitions.values() if one.is_default), None)
        if default is None:
            return ""
        partition = default.name
    found = partitions.get(partition)
    if found is None:
        listed = ", ".join(sorted(partitions)[:20])
        sentence = f"partition {partition!r} does not exist"
        return Rejection(RejectionCode.INVALID_FIELD, sentence, f"use one of: {listed}", "partition")
    if not found.admits(user, account):
        who = f"user {user} may not use partition {partition}" + (f" in account {account}" if account else "")
        remedy = "use another partition or account, or ask an operator"
        return Rejection(RejectionCode.PERMISSION_DENIED, who, remedy, "partition")
    if not found.state.takes_jobs:
        sentence = f"partition {partition} is {found.state.name}, and accepts no new jobs"
        return Rejection(
            RejectionCode.WRONG_STATE, sentence, "use another partition, or wait until it is up", "partition"
        )
    return partition


# Validation of records -----------------------------------------------------------------------------------------------


def check_partition(partition: Partition) -> Rejection | None:
    """Return a rejection if the partition is invalid, or None."""
    rejection = check_name(partition.name, "partition.name")
    if rejection is not None:
        return rejection
    if partition.name.upper() == "ALL":
        return _invalid("name", "ALL cannot name a partition", "choose another name")
    for place, names, most in (
        ("nodes", partition.nodes, NODES_MAX),
        ("users", partition.users, ACCOUNT_USERS_MAX),
        ("accounts", partition.accounts, ACCOUNT_USERS_MAX),
    ):
        if len(names) > most or sum(map(len, names)) > PARTITION_NODES_CHARACTERS_MAX:
            return _invalid(place, f"{len(names)} names are listed", f"list at most {most}, or shorter names")
        if len(set(names)) != len(names):
            return _invalid(place, "a name is listed twice", "list each once")
        for name in names:
            rejection = check_name(name, f"partition.{place}")
            if rejection is not None:
                return rejection
    if partition.nodes != tuple(sorted(partition.nodes)) or (partition.every_node and partition.nodes):
        return _invalid("nodes", "its nodes are not sorted, or are listed in addition to ALL", "write names, or ALL")
    if not 0 <= partition.max_time_s <= TIME_LIMIT_S_MAX:
        sentence = f"the longest time limit is {partition.max_time_s} s"
        return _invalid("max_time", sentence, f"use a time up to {TIME_LIMIT_S_MAX} s, or none")
    most_nodes = NODES_MAX if partition.max_nodes is None else partition.max_nodes
    if not 0 <= partition.min_nodes <= NODES_MAX or not 0 <= most_nodes <= NODES_MAX:
        return _invalid("max_nodes", "a number of nodes is out of range", f"use numbers from 0 to {NODES_MAX}")
    return None


def _invalid(place: str, sentence: str, remedy: str) -> Rejection:
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy, f"partition.{place}")
