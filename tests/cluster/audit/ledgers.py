"""Replica directory with a real ledger of a small cluster, including no-ops and a void batch."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from click.testing import Result

from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages.commands import CONTROLLER
from forebay.replica.messages.entries import Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.messages.events import StateDigested
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY, State
from forebay.snapshots.image import Image
from forebay.wal.codec import NO_OP, EntryKind, decode_batch, encode_batch, kind_of
from forebay.wal.configuration import Member, encode_configuration, initial
from forebay.wal.environment import Environment
from forebay.wal.journal import Entry, Journal
from tests.auditing import audit
from tests.replica.world import World

ROOT = Path(__file__).parents[3]
CLUSTER, REPLICA = "0" * 32, "r1"
MAP_SIZE_BYTES = 64 << 20
NO_OP_EVERY = 4
MINUTES = 4
"""Number of digests in the ledger of `digested`."""


class Made(NamedTuple):
    """Written ledger with the expected results; `states` and `digests` are those after each entry."""

    directory: Path
    entries: tuple[Entry, ...]
    states: tuple[State, ...]
    digests: tuple[bytes, ...]

    @property
    def state(self) -> State:
        return self.states[-1]

    @property
    def applied_digest(self) -> str:
        return self.digests[-1].hex()

    @property
    def state_digest(self) -> str:
        return state_digest(self.state).hex()

    def image(self, index: int) -> Image:
        """Return the image after entry `index`."""
        return Image(
            state=self.states[index - 1],
            index=index,
            term=self.entries[index - 1].term,
            chain_digest=self.digests[index - 1],
        )


def lived() -> list[Batch]:
    """Return the batches of a cluster with finished and waiting jobs and a rejected command."""
    world = World({"fast": 100, "slow": 1_000}, nodes=2)
    first = world.submit("capacity=60")
    second = world.submit("capacity=60", who="bob")
    world.submit("capacity=10 pool=slow")
    world.try_submit("capacity=5000")
    world.finish(first)
    world.advance(5)
    world.done(second)
    world.submit("capacity=90", priority=9)
    return world.ledger


def digested() -> list[Batch]:
    """Return the batches of a cluster that ran a job every other minute, and recorded a state digest each minute."""
    world = World({"fast": 100}, nodes=2)
    for minute in range(MINUTES):
        job = world.submit("capacity=10", who=f"user{minute}")
        world.finish(job)
        # No batch came for a minute, so the digested state is the base of the next batch.
        recorded = StateDigested(world.state.revision, state_digest(world.state))
        world.advance(66)
        world.commit(Settled(b"", CONTROLLER, "record_state_digest", (recorded,)))
    return world.ledger


def make(directory: Path, batches: list[Batch] | None = None) -> Made:
    """Write the ledger of `lived`, or of other batches, into `directory`/wal, closed afterwards as by a replica that
    was stopped.
    """
    batches = batches or lived()
    members = initial((Member(REPLICA, "r1:7401", "r1:7411"),), version=1)
    data = [encode_configuration(members), *map(encode_batch, batches[:3])]
    # Batch of a deposed leader, based on a revision that another leader had settled meanwhile.
    data += [encode_batch(msgspec.structs.replace(batches[1], at=batches[2].at)), NO_OP]
    data += [encode_batch(batch) for batch in batches[3:]]
    return written(directory, [(1 if index < 6 else 2, one) for index, one in enumerate(data, start=1)])


def written(directory: Path, history: list[tuple[int, bytes]]) -> Made:
    """Write a ledger into `directory`/wal: its entries, each with its term."""
    entries = tuple(Entry(index, term, data) for index, (term, data) in enumerate(history, start=1))
    state = EMPTY
    states = []
    for entry in entries:
        batch = decode_batch(entry.data) if kind_of(entry.data) is EntryKind.BATCH else None
        state = state if batch is None else apply_batch(state, batch) or state
        states.append(state)
    with Environment.open(
        directory / "wal", cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        journal = Journal(environment)
        journal.set_term(entries[-1].term, REPLICA)
        journal.append(entries)
        journal.set_commit(len(entries))
        digests = [journal.record_applied(entry, after.revision) for entry, after in zip(entries, states, strict=True)]
        journal.flush_hints()
        return Made(directory, entries, tuple(states), tuple(digests))


class Living:
    """Replica that applies one more entry in each step, and keeps the results for comparison."""

    def __init__(self, environment: Environment) -> None:
        self.journal = Journal(environment)
        self.journal.set_term(1, REPLICA)
        self._world = World({"fast": 100})
        self._taken = 0
        self.revisions = [0]
        """The revision after each entry, by its index."""
        self.digests = [self.journal.applied_digest]
        """The digest of the ledger after each entry, by its index."""

    def step(self) -> None:
        """Append, sync, apply and sync one entry: a batch, and now and then a no-op, which settles nothing."""
        index = self.journal.last_index + 1
        data, revision = NO_OP, self.revisions[-1]
        if index % NO_OP_EVERY:
            if self._taken == len(self._world.ledger):
                self._world.try_submit("capacity=5000")
            batch = self._world.ledger[self._taken]
            self._taken += 1
            data, revision = encode_batch(batch), revision + len(batch.entries)
        entry = Entry(index, 1, data)
        self.journal.append([entry])
        self.journal.sync()
        self.journal.set_commit(index)
        self.digests.append(self.journal.record_applied(entry, revision))
        self.revisions.append(revision)
        self.journal.sync()


def typed(*words: object) -> Result:
    """Run an audit command in this process."""
    return audit(*words)


def real(*words: object, module: str = "forebay.cluster.cli", **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a separate process."""
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, words)],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
