"""What a replica finds when it starts: its journal, its ledger, its snapshots, and the state that they add up to.

The newest snapshot that stands on this replica's own ledger is loaded and the entries after it are folded, up to the
applied mark. A snapshot whose digest differs from the ledger's at its index is of another history and is passed over;
without a usable one everything is folded from the first entry, if this replica holds it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from cluster.chronicle import read_batch
from cluster.config import Config
from replica.settle import settle
from replica.state import EMPTY, State
from snapshots import Image, SnapshotRefused, SnapshotStore, load_snapshot
from wal import Environment, Journal
from wal.ledger import Ledger

LOGGER = logging.getLogger(__name__)

STARTED_MARK = "started"
"""The file beside `wal` and `snapshots` that says that the replica has run before."""

REPLAY_STEP_ENTRIES = 1024
"""Entries read at a time while folding at start, count."""


class StorageRefused(Exception):
    """What this replica has cannot be used as it is; the sentence names the place and the remedy."""


class Storage(msgspec.Struct, frozen=True):
    """Everything that a replica remembers, opened, and the state at `index`."""

    environment: Environment
    journal: Journal
    ledger: Ledger
    snapshots: SnapshotStore
    state: State
    index: int
    replayed: int
    """Entries that were folded after the snapshot."""

    def close(self) -> None:
        """Write what is known and close everything."""
        self.snapshots.close()
        if self.environment.failure is None:
            self.journal.flush_hints()
        self.environment.close()


def open_storage(config: Config, name: str) -> Storage:
    """Open the storage of replica `name` and rebuild its state.

    Raises RecoveryRefused and StorageFailed (wal), SnapshotFailed (snapshots), StorageRefused.
    """
    directory = config.wal_directory(name)
    snapshot_directory = config.snapshot_directory(name)
    # A replica that has run before must not start empty: without its journal it has forgotten votes and entries.
    mark = directory.parent / STARTED_MARK
    create = not mark.exists() and not _has_files(snapshot_directory)
    environment = Environment.open(
        directory,
        cluster_id=config.cluster.id,
        replica=name,
        map_size_bytes=config.storage.map_size_bytes,
        create=create,
    )
    if not mark.exists():
        _leave_mark(mark)
    store: SnapshotStore | None = None
    try:
        journal = Journal(environment)
        ledger = Ledger(environment)
        store = SnapshotStore(snapshot_directory, config.storage.snapshots_kept, cluster_id=config.cluster.id)
        image = _usable_image(store, journal)
        state, replayed = _replay(ledger, journal, image)
        _check(state, journal, config, directory)
        return Storage(environment, journal, ledger, store, state, journal.applied_index, replayed)
    except BaseException:
        if store is not None:
            store.close()
        environment.close()
        raise


def _leave_mark(mark: Path) -> None:
    """Note durably that the replica has run. Before it promises anything: a promise is what must not be forgotten."""
    try:
        mark.write_text("This replica has run. Without its wal directory it must not start again under its name.\n")
        for path, flags in ((mark, os.O_RDONLY), (mark.parent, os.O_RDONLY | os.O_DIRECTORY)):
            descriptor = os.open(path, flags)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise StorageRefused(f"{mark} cannot be written ({error.strerror}); make room or put it right") from error


def _has_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _usable_image(store: SnapshotStore, journal: Journal) -> Image | None:
    """Return the newest snapshot that stands on this ledger.

    The newest one may not: a replica that was killed while it installed one has the file, but not yet the mark.
    """
    found = store.newest_valid()
    for skipped in store.skipped:
        LOGGER.warning("snapshot %s is passed over: %s", skipped.path, skipped.sentence)
    if found is None:
        return None
    path, image = found
    if _stands(path, image, journal):
        return image
    for name in store.names():
        if name.index >= image.index or name.index > journal.applied_index:
            continue
        path = store.directory / str(name)
        try:
            older = load_snapshot(path)
        except SnapshotRefused as error:
            LOGGER.warning("snapshot %s is passed over: %s", path, error.sentence)
            continue
        if _stands(path, older, journal):
            return older
    return None


def _stands(path: Path, image: Image, journal: Journal) -> bool:
    if image.index > journal.applied_index:
        LOGGER.warning("snapshot %s is ahead of the applied mark %d; it is not used", path, journal.applied_index)
        return False
    if journal.digest_at(image.index) != image.chain_digest:
        LOGGER.warning(
            "snapshot %s is of another history than entry %d of the ledger; it is not used", path, image.index
        )
        return False
    return True


def _replay(ledger: Ledger, journal: Journal, image: Image | None) -> tuple[State, int]:
    state, index = (EMPTY, 0) if image is None else (image.state, image.index)
    for gap in ledger.gaps():
        if index < gap.last_index:
            raise StorageRefused(
                f"entries {gap.first_index} to {gap.last_index} came with a snapshot that is gone or damaged, so the "
                "state cannot be rebuilt; put the snapshot back, or remove this replica and add another to the cluster"
            )
    replayed = 0
    while index < journal.applied_index:
        before = index
        for entry in ledger.read(index + 1, limit=REPLAY_STEP_ENTRIES):
            if entry.index != index + 1:
                raise StorageRefused(f"entry {index + 1} of the ledger is missing; {entry.index} follows")
            batch = read_batch(entry.data)
            if batch is not None:
                following = settle(state, batch)
                state = state if following is None else following
            index = entry.index
            replayed += 1
        if index == before:
            raise StorageRefused(f"the ledger ends at entry {index}, but {journal.applied_index} is marked as applied")
    return state, replayed


def _check(state: State, journal: Journal, config: Config, directory: Path) -> None:
    if state.revision != journal.applied_revision:
        raise StorageRefused(
            f"{directory}: the state has revision {state.revision}, the applied mark says {journal.applied_revision}; "
            "this replica must not go on: remove it from the cluster and add a new one"
        )
    if state.cluster_id and state.cluster_id != config.cluster.id:
        raise StorageRefused(
            f"{directory}: the ledger is of cluster {state.cluster_id}, {config.file} says {config.cluster.id}; "
            "name the right configuration"
        )
