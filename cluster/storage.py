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

from cluster.chronicle import read_batch, read_configuration
from cluster.config import Config
from cluster.founding import FIRST_START_NAME
from replica.settle import settle
from replica.state import EMPTY, State
from snapshots import Image, SnapshotStore
from wal import Environment, Journal
from wal.configuration import Placed, name_of
from wal.ledger import Ledger

LOGGER = logging.getLogger(__name__)

MEMBER_NAME = "member"
"""A file beside `wal`, with the id under which the replica joined."""

FORGOTTEN_NAME = "forgotten"
"""A file beside `wal`: the replica was found to lack what it had acknowledged. It says so, and nothing is opened."""

FORGOTTEN_CHARACTERS_MAX = 1_000
"""What is read of it: a sentence."""

MEMBER_CHARACTERS_MAX = 96
"""A name of at most 64 characters, '#' and a number."""

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
    identity: str
    """The id of this replica as a member: its name if it founded the cluster."""
    configuration: Placed | None
    """Who is a member as of `index`, as far as snapshot and ledger say it."""

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
    _refuse_if_forgotten(config, name)
    mark = first_start_mark(config, name)
    if not mark.exists() and not _has_files(directory):
        raise StorageRefused(
            f"{directory} is empty; if replica {name} has never run, start it once with `forebay serve --name {name} "
            "--first-start`; if its data is lost, it must not start again under its name, because it would have "
            "forgotten votes and entries that the others count on: `forebay member replace` brings it back, and then "
            "`forebay serve --join`"
        )
    identity = identity_of(config, name)
    environment = Environment.open(
        directory,
        cluster_id=config.cluster.id,
        replica=identity,
        map_size_bytes=config.storage.map_size_bytes,
        create=mark.exists(),
    )
    _consume(mark)
    store: SnapshotStore | None = None
    try:
        journal = Journal(environment)
        ledger = Ledger(environment)
        store = SnapshotStore(snapshot_directory, config.storage.snapshots_kept, cluster_id=config.cluster.id)
        image = _usable_image(store, journal)
        state, replayed, placed = _replay(ledger, journal, image)
        _check(state, journal, config, directory)
        return Storage(environment, journal, ledger, store, state, journal.applied_index, replayed, identity, placed)
    except BaseException:
        if store is not None:
            store.close()
        environment.close()
        raise


def member_note(config: Config, name: str) -> Path:
    """Return the file that says under which id a replica joined; there is none for a founder."""
    return config.storage.directory / name / MEMBER_NAME


def identity_of(config: Config, name: str) -> str:
    """Return the id of replica `name` as a member. StorageRefused if the note is not readable as one of its own."""
    note = member_note(config, name)
    try:
        text = note.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return name
    except (OSError, UnicodeDecodeError) as error:
        raise StorageRefused(f"{note} cannot be read ({error}); it says under which id {name} joined") from error
    if name_of(text) != name or len(text) > MEMBER_CHARACTERS_MAX:
        raise StorageRefused(f"{note} says {text[:MEMBER_CHARACTERS_MAX]!r}, which is no id of replica {name}")
    return text


def note_forgotten(config: Config, name: str, sentence: str) -> None:
    """Note that replica `name` has lost what it promised, so that a restart does not begin again as if it had not."""
    note = config.storage.directory / name / FORGOTTEN_NAME
    try:
        with note.open("w", encoding="utf-8") as file:
            file.write(f"{sentence}\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # it stops all the same, and the leader refuses it for as long as it leads
        LOGGER.error("%s cannot be written: %s", note, error)


def _refuse_if_forgotten(config: Config, name: str) -> None:
    note = config.storage.directory / name / FORGOTTEN_NAME
    try:
        with note.open(encoding="utf-8", errors="replace") as file:
            sentence = file.read(FORGOTTEN_CHARACTERS_MAX).strip()
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise StorageRefused(f"{note} cannot be read ({error.strerror}); it says why {name} must not start") from error
    raise StorageRefused(f"{note}: {sentence}")


def first_start_mark(config: Config, name: str) -> Path:
    """Return the file whose existence lets a replica start without data: made by `forebay init`, or by an operator's
    `--first-start`, and consumed by the first start.
    """
    return config.storage.directory / name / FIRST_START_NAME


def allow_first_start(config: Config, name: str) -> None:
    """Let a replica start without data, once. StorageRefused if the mark cannot be made."""
    mark = first_start_mark(config, name)
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise StorageRefused(f"{mark} cannot be made ({error.strerror})") from error


def _consume(mark: Path) -> None:
    """Remove the mark durably, before the replica promises anything: a promise is what must not be forgotten."""
    try:
        mark.unlink()
        directory = os.open(mark.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise StorageRefused(f"{mark} cannot be removed ({error.strerror})") from error


def _has_files(directory: Path) -> bool:
    return directory.is_dir() and any(directory.iterdir())


def _usable_image(store: SnapshotStore, journal: Journal) -> Image | None:
    """Return the newest snapshot that stands on this ledger; those that do not are not kept for their own sake.

    The newest one may not: a replica that was killed while it installed one has the file, but not yet the mark.
    """
    found = store.newest_usable(lambda image: _why_not(image, journal))
    return None if found is None else found[1]


def _why_not(image: Image, journal: Journal) -> str | None:
    """Return why a sound snapshot is of no use on this ledger, or None."""
    if image.index > journal.applied_index:
        return f"it is ahead of the applied mark {journal.applied_index}"
    if journal.digest_at(image.index) != image.chain_digest:
        return f"it is of another history than entry {image.index} of the ledger"
    return None


def _replay(ledger: Ledger, journal: Journal, image: Image | None) -> tuple[State, int, Placed | None]:
    state, index = (EMPTY, 0) if image is None else (image.state, image.index)
    placed = None if image is None else image.configuration
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
            configuration = read_configuration(entry.data)
            if configuration is not None:
                placed = Placed(entry.index, configuration)
            index = entry.index
            replayed += 1
        if index == before:
            raise StorageRefused(f"the ledger ends at entry {index}, but {journal.applied_index} is marked as applied")
    return state, replayed, placed


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
