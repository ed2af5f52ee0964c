"""Index of nodes: their jobs and CPUs, and the lists of them that a pass chooses from, one for each partition."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from replica.model import Partitions
from replica.scheduler.index_row import Group, IndexRow, Key, Queue, update_keys, update_set
from replica.state import State
from replica.values import SortedKeys

NodeUse = tuple[int, int, int]
"""CPUs of a node that is up, how many of them are free, and how many jobs are on it."""


class NodeList:
    """The nodes of one partition that are up, in the orders in which they are chosen."""

    def __init__(self) -> None:
        self.by_free: SortedKeys[tuple[int, str]] = SortedKeys()
        """(-free CPUs, node)."""
        self.by_jobs: dict[int, SortedKeys[tuple[int, str]]] = {}
        """CPUs of a node -> (jobs on it, node)."""

    def add(self, name: str, use: NodeUse) -> None:
        """Have a node in the list."""
        cpus, free, jobs = use
        self.by_free.add((-free, name))
        update_keys(self.by_jobs, cpus, (jobs, name), True)

    def discard(self, name: str, use: NodeUse) -> None:
        """Have a node no longer in the list, where it stands as `use`."""
        cpus, free, jobs = use
        self.by_free.discard((-free, name))
        update_keys(self.by_jobs, cpus, (jobs, name), False)

    @property
    def cpus_max(self) -> int:
        """CPUs of the largest node; 0 if there is none."""
        return max(self.by_jobs, default=0)

    def fewest_jobs(self, cpus: int) -> str:
        """Return the node with the fewest jobs that has so many CPUs; there must be one."""
        return min(keys.first for has, keys in self.by_jobs.items() if has >= cpus)[1]


_NO_NODES = NodeList()
_NO_JOBS: frozenset[int] = frozenset()


class NodeIndex:
    """Nodes that are up, in a list for each partition that has not all of them, and in one with all."""

    def __init__(self) -> None:
        self.up: dict[str, NodeUse] = {}
        """Node that is up -> its CPUs, how many of them are free, and how many jobs are on it."""
        self.every = NodeList()
        self._lists: dict[str, NodeList] = {}
        self._lists_of: dict[str, list[NodeList]] = {}
        """Node -> the lists of partitions that have it."""
        self._partitions: Partitions | None = None
        self.ready: set[str] = set()
        """Nodes that are up and whose first candidate could run."""
        self._jobs_on: dict[str, set[int]] = {}
        self._cpus_taken: dict[str, int] = {}
        self._changed: set[str] = set()

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Count the job on its node; `refresh` then has the lists say so."""
        if not before.node and not after.node:
            return
        for row, sign in ((before, -1), (after, 1)):
            node = row.node
            if node:
                update_set(self._jobs_on, node, job_id, sign > 0)
                if row.cpus:
                    taken = self._cpus_taken.get(node, 0) + sign * row.cpus
                    self._cpus_taken[node] = taken
                    if not taken:
                        del self._cpus_taken[node]
                # Also where only its place in the queue of the node is another one: `ready` goes by that.
                self._changed.add(node)

    def change(self, names: Iterable[str]) -> None:
        """Have `refresh` check these nodes: their records have changed."""
        self._changed.update(names)

    def jobs_on(self, name: str) -> Set[int]:
        """Return the jobs that are not over and have the node."""
        return self._jobs_on.get(name, _NO_JOBS)

    def refresh(self, state: State, heads: Mapping[Group, SortedKeys[tuple[Key, Queue]]]) -> None:
        """Have the lists and `ready` say of each node that has changed what is so now; `heads`: those of the queues."""
        self._follow(state.partitions)
        if not self._changed:
            return
        for name in self._changed:
            node = state.nodes.get(name)
            up = node is not None and node.is_up and not node.is_mover
            free = node.cpus - self._cpus_taken.get(name, 0) if node is not None else 0
            self.put(name, (node.cpus, free, len(self.jobs_on(name))) if up and node is not None else None)
            head = heads.get(("node", name))
            # One of this class may be kept back by a limit: then those behind it are candidates too.
            scheduling_class = head.first[1][3] if head else None
            limited = scheduling_class is not None and scheduling_class.limits_runs
            if up and head and (head.first[0][2] <= free or limited):
                self.ready.add(name)
            else:
                self.ready.discard(name)
        self._changed = set()

    def _follow(self, partitions: Partitions) -> None:
        """Have the lists that these partitions need."""
        if self._partitions is partitions:
            return
        self._partitions = partitions
        self._lists, self._lists_of = {}, {}
        for name, partition in partitions.items():
            if partition.every_node:
                continue
            made = self._lists[name] = NodeList()
            for node in partition.nodes:
                self._lists_of.setdefault(node, []).append(made)
                if node in self.up:
                    made.add(node, self.up[node])

    def of(self, partition: str) -> NodeList:
        """Return the list of a partition (`partitions.place_name`)."""
        return self._lists.get(partition, _NO_NODES) if partition else self.every

    def put(self, name: str, after: NodeUse | None) -> None:
        """Have the lists say of a node what `after` says; None: it is not up."""
        before = self.up.get(name)
        if before == after:
            return
        lists: Iterable[NodeList] = (self.every, *self._lists_of.get(name, ()))
        if before is not None:
            del self.up[name]
            for one in lists:
                one.discard(name, before)
        if after is not None:
            self.up[name] = after
            for one in lists:
                one.add(name, after)
