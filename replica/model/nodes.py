"""Nodes (hosts with an agent), buffers abandoned on them, and recoveries of the cluster."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from forebay.replica.values import NEVER, Instant


class NodeState(IntEnum):
    """States of a node. The numbers are wire numbers (law 12)."""

    UP = 1
    DOWN = 2
    """Its agent has been silent for the leader's liveness time. The node keeps what it holds and gets no new work."""
    DRAINED = 3
    """An operator keeps new work away."""


PROCESS_CONTROLS: Final = ("", "cgroup", "listing")
"""Methods by which an agent ends all processes of a job: a cgroup, or a process listing; empty: unknown."""

CAPACITY_CONTROLS: Final = ("", "image", "project_quota", "subvolume_quota", "watch")
"""Methods that enforce a buffer's capacity: the filesystem rejects excess writes, or a watch ends the job soon after;
empty: unknown.
"""


class AdmittedNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A name under which an agent may register. A certificate alone does not admit a node."""

    name: str
    by: str = ""
    """Operator who admitted it; empty: the cluster was founded with it."""
    at: Instant = NEVER


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node. `instance` changes with every start of its agent, `storage_id` only with its disk."""

    name: str
    cpus: int
    instance: str
    storage_id: str
    registered_at: Instant = NEVER
    down: bool = False
    drained: bool = False
    reason: str = ""
    """Reason for being drained or down."""
    buffers: str = ""
    """Directory of the jobs' own buffers on the node, one subdirectory for each job ID; empty if its agent reports
    none.
    """
    process_control: str = ""
    """One of PROCESS_CONTROLS."""
    capacity_control: str = ""
    """One of CAPACITY_CONTROLS."""
    filesystems: tuple[str, ...] = ()
    """Shared filesystems that it stages for, ascending; empty except for movers."""
    down_at: Instant = NEVER
    """Time at which it was marked down; NEVER while it is up."""
    lost: bool = False
    """True if an operator declared it lost while it was down, which gives up everything on it."""

    @property
    def is_mover(self) -> bool:
        """Return whether its agent stages for shared filesystems and runs no scripts."""
        return bool(self.filesystems)

    @property
    def is_up(self) -> bool:
        """Return whether it gets new work."""
        return not self.down and not self.drained

    @property
    def state(self) -> NodeState:
        """Return the most severe state that applies: DOWN, DRAINED, UP."""
        if self.down:
            return NodeState.DOWN
        return NodeState.DRAINED if self.drained else NodeState.UP


class AbandonedBuffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A buffer given up on an unresponsive node. The node's agent removes it when it returns."""

    job: int
    attempt: int
    """Attempt of the teardown."""
    user: str
    persistent: tuple[str, ...] = ()
    """Persistent buffers that the job was creating or destroying there, which are also removed."""


class AbandonedBuffers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Buffers given up on one node, in the order of the decisions."""

    node: str
    buffers: tuple[AbandonedBuffer, ...]

    def find(self, job: int, attempt: int) -> AbandonedBuffer | None:
        """Return the buffer given up with this teardown attempt, or None."""
        return next((one for one in self.buffers if (one.job, one.attempt) == (job, attempt)), None)


class Recovery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of an incarnation of the cluster, from one replica or a snapshot after the loss of a majority.

    The first incarnation began with the cluster and has no record.
    """

    incarnation: int
    """Number of the incarnation, from 2."""
    mark: str
    """Random hexadecimal digits, which distinguish two incarnations begun separately with the same number."""
    by: str
    """The operator."""
    replica: str
    """The member whose data it starts from."""
    members: tuple[str, ...] = ()
    """IDs of the previous incarnation's members."""
    kept_index: int = 0
    """Last entry kept; later ones are lost."""
    known_index: int = 0
    """Last entry known to be committed on the surviving replica."""
    kept_at: Instant = NEVER
    """Time of the last batch kept."""
    first_job: int = 0
    """First job ID assigned from now on."""
    last_job: int = 0
    """Last job ID assigned in the kept history. IDs in between may be those of lost jobs."""
    is_snapshot: bool = False
    """True if it starts from a snapshot, without the history before it."""
    at: Instant = NEVER
