"""The nodes in an agenda: their CPUs, and the lists of them that a pass chooses from, one for each partition."""

from __future__ import annotations

from collections.abc import Iterable

from replica.model import Partitions
from replica.scheduler.index_rows import NodeUse, keep
from replica.values import SortedKeys


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
        keep(self.by_jobs, cpus, (jobs, name), True)

    def discard(self, name: str, use: NodeUse) -> None:
        """Have a node no longer in the list, where it stands as `use`."""
        cpus, free, jobs = use
        self.by_free.discard((-free, name))
        keep(self.by_jobs, cpus, (jobs, name), False)

    @property
    def cpus_max(self) -> int:
        """CPUs of the largest node; 0 if there is none."""
        return max(self.by_jobs, default=0)

    def fewest_jobs(self, cpus: int) -> str:
        """Return the node with the fewest jobs that has so many CPUs; there must be one."""
        return min(keys.first for has, keys in self.by_jobs.items() if has >= cpus)[1]


_NO_NODES = NodeList()


class AgendaNodes:
    """The nodes that are up, in a list for each partition that has not all of them, and in one with all."""

    def __init__(self) -> None:
        self.up: dict[str, NodeUse] = {}
        """Node that is up -> its CPUs, how many of them are free, and how many jobs are on it."""
        self.every = NodeList()
        self._lists: dict[str, NodeList] = {}
        self._lists_of: dict[str, list[NodeList]] = {}
        """Node -> the lists of partitions that have it."""
        self._partitions: Partitions | None = None

    def follow(self, partitions: Partitions) -> None:
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

    def contents(self) -> dict[str, object]:
        """Return it in a form that can be compared."""
        lists = {"": self.every, **self._lists}
        return {
            "up": dict(self.up),
            "by_free": {partition: list(one.by_free) for partition, one in lists.items()},
            "by_jobs": {
                partition: {cpus: list(keys) for cpus, keys in one.by_jobs.items()} for partition, one in lists.items()
            },
        }
