"""Life of a replica's storage: the real code of wal over the simulator's disk, which forgets unsynced data.

LMDB is simulated in memory, and any unsynced sectors of the sync log may be lost.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

import lmdb
import pytest

from forebay.wal import Entry, Environment, Journal
from forebay.wal.ledger import Ledger
from tests.simulation.disk import SimDisk, SimEnvironments
from tests.wal.support import CLUSTER, REPLICA, entry

MAP_SIZE_BYTES = 1 << 24


class Died(BaseException):
    """The simulated process died."""


class State(NamedTuple):
    """Observable state of a journal."""

    term: int
    voted_for: str | None
    base_index: int
    entries: tuple[Entry, ...]
    applied_index: int
    applied_digest: bytes


def state_of(journal: Journal) -> State:
    entries = journal.entries(journal.first_index, max_bytes=1 << 30, max_entries=1 << 20)
    return State(
        journal.term,
        journal.voted_for,
        journal.base_index,
        tuple(entries),
        journal.applied_index,
        journal.applied_digest,
    )


class Life:
    """Storage of a replica, the state at the last sync, and the state that a running sync would make durable."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.directory = directory
        self.environments = SimEnvironments()
        snapshots = directory / "snapshots"
        snapshots.mkdir(exist_ok=True)
        self.disk = SimDisk(random.Random(seed), snapshots)
        self.environments.disks[directory] = self.disk
        self.create = True
        self.env: Environment | None = None
        self.promised: State | None = None
        self.under_way: State | None = None

    def die(self, where: str) -> NoReturn:
        self.disk.dead = True
        raise Died(where)

    def open(self) -> Journal:
        self.disk.start(self.die, lambda duration_s: None)
        self.env = self.environments.open(
            self.directory, cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=self.create
        )
        return Journal(self.env)

    def sync(self, journal: Journal, how: Callable[[], None]) -> None:
        self.under_way = state_of(journal)
        how()
        self.promised = self.under_way

    def dies(self, operation: int | None, what: Callable[[], object]) -> bool:
        """Run `what` and die at the given operation; return False if `what` has fewer operations."""
        self.disk.operations_left = operation
        try:
            what()
        except Died:
            self.disk.lose_power()
            return True
        self.disk.operations_left = None
        return False

    def lose_power(self) -> None:
        """Die between two operations; unsynced data may be lost."""
        self.disk.dead = True
        self.disk.lose_power()

    def check(self) -> None:
        """Restart and check that the state is the promised one."""
        journal = self.open()
        found = state_of(journal)
        if self.promised is not None or self.under_way is not None:
            assert found in (self.promised, self.under_way) or (self.promised is None and found.term == 0), found
        assert self.env is not None
        verified = Ledger(self.env).verify()
        assert (verified.last_index, verified.digest) == (found.applied_index, found.applied_digest)
        # The storage must still work: a later sync is durable too.
        journal.set_term(journal.term + 1, "r9")
        last = journal.last_index + 1
        journal.append([entry(last, journal.term, 900)])
        journal.sync()
        after = state_of(journal)
        self.lose_power()
        assert state_of(self.open()) == after


def lives(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Life]:
    """Replace LMDB by the simulator's; return a function that makes a life from a seed."""
    made: list[Life] = []

    def open_lmdb(path: str, **options: object) -> object:
        return made[-1].environments.open_lmdb(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(lmdb, "open", open_lmdb)

    def make(seed: int) -> Life:
        made.append(Life(directory, seed))
        return made[-1]

    return make
