"""Index of nodes: their jobs and CPUs, and sorted lists of the nodes of each partition.

`NodeList.fewest_jobs` chooses the node on which a job of a pool on nodes is staged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from forebay.replica.model import Partitions
from forebay.replica.scheduler.index_row import Group, IndexRow, Key, Queue, update_keys, update_set
from forebay.replica.state import State
from forebay.replica.values import SortedKeys

NodeUse = tuple[int, int, int]
"""(CPUs, free CPUs, jobs) of a node that is up."""


class NodeList:
    """Nodes of one partition that are up, sorted by free CPUs and by number of jobs."""

    def __init__(self) -> None:
        self.by_free: SortedKeys[tuple[int, str]] = SortedKeys()
        """(-free CPUs, node)."""
        self.by_jobs: dict[int, SortedKeys[tuple[int, str]]] = {}
        """CPUs of a node -> (jobs on it, node)."""

    def add(self, name: str, use: NodeUse) -> None:
        """Add a node."""
        cpus, free, jobs = use
        self.by_free.add((-free, name))
        update_keys(self.by_jobs, cpus, (jobs, name), True)

    def discard(self, name: str, use: NodeUse) -> None:
        """Remove a node that was added with `use`."""
        cpus, free, jobs = use
        self.by_free.discard((-free, name))
        update_keys(self.by_jobs, cpus, (jobs, name), False)

    @property
    def cpus_max(self) -> int:
        """CPUs of the largest node; 0 if there is none."""
        return max(self.by_jobs, default=0)

    def fewest_jobs(self, cpus: int) -> str:
        """Return the node to stage a job on, of those with at least `cpus` CPUs the one with the fewest jobs.

        There must be one.
        """
        return min(keys.first for has, keys in self.by_jobs.items() if has >= cpus)[1]


_NO_NODES = NodeList()
_NO_JOBS: frozenset[int] = frozenset()


class NodeIndex:
    """Nodes that are up, in one list with all nodes and one list for each partition that has a part of them."""

    def __init__(self) -> None:
        self.up: dict[str, NodeUse] = {}
        """Node that is up -> its use."""
        self.every = NodeList()
        self._lists: dict[str, NodeList] = {}
        self._lists_of: dict[str, list[NodeList]] = {}
        """Node -> lists of the partitions that contain it."""
        self._partitions: Partitions | None = None
        self.ready: set[str] = set()
        """Nodes that are up and could run their first candidate."""
        self._jobs_on: dict[str, set[int]] = {}
        self._cpus_taken: dict[str, int] = {}
        self._changed: set[str] = set()

    def apply(self, job_id: int, before: IndexRow, after: IndexRow) -> None:
        """Count the job on its node; `refresh` then updates the lists."""
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
                # Needed even if only the job's position in the node's queue has changed, because `ready` depends on it.
                self._changed.add(node)

    def change(self, names: Iterable[str]) -> None:
        """Mark nodes whose records have changed, for `refresh`."""
        self._changed.update(names)

    def jobs_on(self, name: str) -> Set[int]:
        """Return the unfinished jobs on a node."""
        return self._jobs_on.get(name, _NO_JOBS)

    def refresh(self, state: State, heads: Mapping[Group, SortedKeys[tuple[Key, Queue]]]) -> None:
        """Update the lists and `ready` for each changed node; `heads` are the heads of the queues."""
        self._follow(state.partitions)
        if not self._changed:
            return
        for name in self._changed:
            node = state.nodes.get(name)
            up = node is not None and node.is_up and not node.is_mover
            free = node.cpus - self._cpus_taken.get(name, 0) if node is not None else 0
            self.put(name, (node.cpus, free, len(self.jobs_on(name))) if up and node is not None else None)
            head = heads.get(("node", name))
            # A limit may block the first candidate, if its class has limits; then later ones may run.
            scheduling_class = head.first[1][3] if head else None
            limited = scheduling_class is not None and scheduling_class.limits_runs
            if up and head and (head.first[0][2] <= free or limited):
                self.ready.add(name)
            else:
                self.ready.discard(name)
        self._changed = set()

    def _follow(self, partitions: Partitions) -> None:
        """Rebuild the lists if the partitions have changed."""
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
        """Return the list of a partition (`partitions.node_set_name`)."""
        return self._lists.get(partition, _NO_NODES) if partition else self.every

    def put(self, name: str, after: NodeUse | None) -> None:
        """Set the use of a node in all lists; None: the node is not up."""
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
