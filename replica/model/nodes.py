"""Nodes: compute or storage hosts, each with one agent; and when the cluster that they belong to was begun again."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import msgspec

from replica.values import NEVER, Instant


class NodeState(IntEnum):
    """Return whether a node gets new work; the numbers are wire numbers (law 12)."""

    UP = 1
    DOWN = 2
    """Its agent has not been heard of for the liveness time of the leader. It keeps what it holds and gets nothing
    new.
    """
    DRAINED = 3
    """An operator keeps new work away."""


PROCESS_CONTROLS: Final = ("", "cgroup", "listing")
"""How an agent ends all processes of a job: as one cgroup, or as many as it finds by listing; empty: not known."""

CAPACITY_CONTROLS: Final = ("", "image", "project_quota", "subvolume_quota", "watch")
"""What holds a buffer of an agent to its capacity while a job writes: the file system, which refuses what is more, or
a watch, which ends the job soon after; empty: not known."""


class AdmittedNode(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A name under which an agent may register: a certificate alone makes no node."""

    name: str
    by: str = ""
    """The operator who admitted it; empty: the cluster was founded with it."""
    at: Instant = NEVER


class Node(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Node. `instance` changes with every start of its agent, `storage_id` only when its disk is another one."""

    name: str
    cpus: int
    instance: str
    storage_id: str
    registered_at: Instant = NEVER
    down: bool = False
    drained: bool = False
    reason: str = ""
    """Why it is drained or down, in words."""
    buffers: str = ""
    """The directory on the node that jobs' own buffers lie in, each under its job's number; empty where its agent says
    none."""
    process_control: str = ""
    """One of PROCESS_CONTROLS."""
    capacity_control: str = ""
    """One of CAPACITY_CONTROLS."""
    filesystems: tuple[str, ...] = ()
    """The shared filesystems that it stages for, in ascending order; empty but for a mover."""
    down_at: Instant = NEVER
    """When it was marked down; NEVER while it is not."""
    lost: bool = False
    """Whether an operator declared it lost while it was down: what is on it is given up."""

    @property
    def is_mover(self) -> bool:
        """Return whether its agent stages for shared filesystems, and runs no scripts."""
        return bool(self.filesystems)

    @property
    def is_up(self) -> bool:
        """Return whether it gets new work."""
        return not self.down and not self.drained

    @property
    def state(self) -> NodeState:
        """DOWN before DRAINED before UP: the most severe is shown."""
        if self.down:
            return NodeState.DOWN
        return NodeState.DRAINED if self.drained else NodeState.UP


class AbandonedBuffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The buffer of a job that was given up on a node that did not answer: its agent removes it when it returns."""

    job: int
    attempt: int
    """The attempt of the teardown."""
    user: str
    persistent: tuple[str, ...] = ()
    """Persistent buffers that the job was creating or destroying there, which are to be removed, too."""


class AbandonedBuffers(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was given up on one node, in the order in which that was decided."""

    node: str
    buffers: tuple[AbandonedBuffer, ...]

    def find(self, job: int, attempt: int) -> AbandonedBuffer | None:
        """Return the buffer that was given up with this teardown attempt; None if there is none."""
        return next((one for one in self.buffers if (one.job, one.attempt) == (job, attempt)), None)


class Recovery(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The beginning of an incarnation of the cluster: what one replica, or a snapshot, had left when a majority of the
    members was lost. The first incarnation began with the cluster, and has none.
    """

    incarnation: int
    """Its number, from 2 on."""
    mark: str
    """Hexadecimal digits drawn for it: two that were begun apart have one number, and different marks."""
    by: str
    """The operator."""
    replica: str
    """The member whose data is the beginning."""
    members: tuple[str, ...] = ()
    """The members of the incarnation before, by id."""
    kept_index: int = 0
    """The last entry that is kept; what came after it is lost."""
    known_index: int = 0
    """The last entry that was known to be committed where it is kept."""
    kept_at: Instant = NEVER
    """The time of the last batch that is kept."""
    first_job: int = 0
    """The first job number that is given out from now on."""
    last_job: int = 0
    """The last job number that the kept history has given out; those between may be of lost jobs."""
    is_snapshot: bool = False
    """Whether a snapshot was restored: history before it is not held."""
    at: Instant = NEVER
