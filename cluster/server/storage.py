"""What a replica finds when it starts: its journal, its ledger, its snapshots, and the state that they add up to.

The newest snapshot that stands on this replica's own ledger is loaded and the entries after it are folded, up to the
applied mark; on the way states are held against the digests that the ledger records of them. A snapshot whose digest
differs from the ledger's at its index is of another history and is passed over; without a usable one everything is
folded from the first entry, if this replica holds it.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from cluster.config import FIRST_START_NAME, Config
from cluster.server.applied_log import read_batch, read_configuration
from cluster.system import make_private_directory, replace_private, start_command
from replica.fold import HistoryFold
from replica.messages import ReleaseNeeded
from replica.state import EMPTY, RecordedDigests, State, StateDiffers
from replica.values import LedgerViolation
from snapshots import Image, SnapshotStore
from wal import (
    FIRST_INCARNATION,
    CodecError,
    Condition,
    ConfigurationAt,
    Environment,
    Incarnation,
    Journal,
    Ledger,
    LedgerBroken,
    RecoveryRefused,
    may_have_run,
    name_of,
    parse_lineage,
)
from wal import directory as directories

LOGGER = logging.getLogger(__name__)

MEMBER_NAME = "member"
"""A file beside `wal`, with the id under which the replica joined."""

FORGOTTEN_NAME = "forgotten"
"""A file beside `wal`: the replica was found to lack what it had acknowledged. It says so, and nothing is opened."""

SUPERSEDED_NAME = "superseded"
"""A file beside `wal`: the cluster goes on as a later incarnation without this replica. It says so, and nothing is
opened."""

NOTE_CHARACTERS_MAX = 1_000
"""What is read of those two: a sentence."""

MEMBER_CHARACTERS_MAX = 96
"""A name of at most 64 characters, '#' and a number."""

REPLAY_STEP_ENTRIES = 1024
"""Entries read at a time while folding at start, count."""


class StorageRefused(Exception):
    """What this replica has cannot be used as it is; the sentence names the place and the remedy.

    `condition` is what the recovery table (`wal.Condition`) has for it; None for what is not damage, such as a mark
    that cannot be made.
    """

    def __init__(self, sentence: str, condition: Condition | None = None) -> None:
        super().__init__(sentence)
        self.condition = condition


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
    configuration: ConfigurationAt | None
    """Who is a member as of `index`, as far as snapshot and ledger say it."""

    def close(self) -> None:
        """Write what is known and close everything."""
        self.snapshots.close()
        if self.environment.failure is None:
            self.journal.flush_hints()
        self.environment.close()


def open_storage(config: Config, name: str, *, first_start: bool = False) -> Storage:
    """Open the storage of replica `name` and rebuild its state. `first_start`: somebody says that it has never run.

    Raises RecoveryRefused and StorageFailed (wal), SnapshotFailed (snapshots), StorageRefused.
    """
    directory = config.wal_directory(name)
    snapshot_directory = config.snapshot_directory(name)
    with starting(config, name, make=first_start):
        _refuse_if_noted(config, name)
        mark = first_start_mark(config, name)
        may_be_empty = _may_be_empty(config, name, mark, first_start=first_start)
        if not may_be_empty and any_of(directory) is None:
            raise StorageRefused(
                f"{directory} is empty; if replica {name} has never run, start it once with `forebay run replica "
                f"--name "
                f"{name} --first-start`; if its data is lost, it must not start again as who it was, because it would "
                f"have forgotten votes and entries that the others count on: `forebay cluster replace {name}` brings "
                f"it back, and then `{start_command('replica', name)}`; where the data of a majority is lost, "
                "`forebay cluster recover` on a machine that has some left",
                Condition.DIRECTORY_EMPTY,
            )
        identity, incarnation = noted_member(config, name)
        try:
            environment = Environment.open(
                directory,
                cluster_id=config.cluster.id,
                replica=identity,
                map_size_bytes=config.storage.map_size_bytes,
                create=may_be_empty,
                incarnation=incarnation,
            )
        except RecoveryRefused as error:
            _refuse_if_of_another_id(error, directory, member_note(config, name), name)
            raise RecoveryRefused(error.condition, error.place, name) from error
        try:
            _consume(mark, name)
        except BaseException:
            environment.close()
            raise
    store: SnapshotStore | None = None
    try:
        journal = Journal(environment)
        ledger = Ledger(environment)
        store = SnapshotStore(snapshot_directory, config.storage.snapshots_kept, cluster_id=config.cluster.id)
        image = _usable_image(store, journal)
        try:
            state, replayed, placed = _replay(ledger, journal, image, directory, name)
        except ReleaseNeeded:
            raise
        except (LedgerBroken, CodecError) as error:
            raise _refused(Condition.LEDGER_DAMAGED, f"{directory} ({error})", name) from error
        except StateDiffers as error:
            raise _refused(Condition.STATE_NOT_THE_RECORDED, f"{directory} ({error})", name) from error
        except LedgerViolation as error:
            raise _refused(Condition.STATE_CONTRADICTS, f"{directory} ({error})", name) from error
        _check(state, journal, config, directory, name)
        return Storage(environment, journal, ledger, store, state, journal.applied_index, replayed, identity, placed)
    except BaseException as error:
        if store is not None:
            store.close()
        environment.close()
        if isinstance(error, RecoveryRefused):
            raise RecoveryRefused(error.condition, error.place, name) from error
        raise


def member_note(config: Config, name: str) -> Path:
    """Return the file that says under which id a replica joined; there is none for a founder."""
    return config.storage.directory / name / MEMBER_NAME


def identity_of(config: Config, name: str) -> str:
    """Return the id of replica `name` as a member. StorageRefused if the note is not readable as one of its own."""
    return noted_member(config, name)[0]


def noted_member(config: Config, name: str) -> tuple[str, Incarnation]:
    """Return the id of replica `name` as a member, and the incarnation of the cluster that it joined. StorageRefused.

    The note is `r2#6`, or `r2#6 2-…` where the incarnation is not the first one.
    """
    note = member_note(config, name)
    try:
        text = note.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        return name, FIRST_INCARNATION
    except (OSError, UnicodeDecodeError) as error:
        raise _refused(Condition.MEMBER_NOTE_DAMAGED, f"{note} cannot be read ({error})", name) from error
    identity, _, incarnation = text.partition(" ")
    lineage = parse_lineage(f"{config.cluster.id}/{incarnation}" if incarnation else config.cluster.id)
    if name_of(identity) != name or len(identity) > MEMBER_CHARACTERS_MAX or lineage is None:
        place = f"{note} says {text[:MEMBER_CHARACTERS_MAX]!r}, which is no id of replica {name}"
        raise _refused(Condition.MEMBER_NOTE_DAMAGED, place, name)
    return identity, lineage[1]


def note_forgotten(config: Config, name: str, sentence: str) -> None:
    """Note that replica `name` has lost what it promised, so that a restart does not begin again as if it had not."""
    _write_note(config, name, FORGOTTEN_NAME, sentence)


def note_superseded(config: Config, name: str, sentence: str) -> None:
    """Note that the cluster goes on without replica `name`, so that a restart does not go on with the one that was."""
    _write_note(config, name, SUPERSEDED_NAME, sentence)


def _write_note(config: Config, name: str, file_name: str, sentence: str) -> None:
    note = config.storage.directory / name / file_name
    try:
        replace_private(note, f"{sentence}\n".encode())
    except OSError as error:  # it stops all the same, and is told again whenever it starts
        LOGGER.error("%s cannot be written: %s", note, error)


def _refuse_if_noted(config: Config, name: str) -> None:
    for file_name, condition in (
        (FORGOTTEN_NAME, Condition.PROMISES_FORGOTTEN),
        (SUPERSEDED_NAME, Condition.INCARNATION_OVER),
    ):
        note = config.storage.directory / name / file_name
        try:
            with note.open(encoding="utf-8", errors="replace") as file:
                sentence = file.read(NOTE_CHARACTERS_MAX).strip()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise _refused(condition, f"{note} cannot be read ({error.strerror})", name) from error
        # Its own sentence comes first. What follows is for a note that was damaged, and is still a reason not to start.
        raise _refused(condition, f"{note}: {sentence}", name)


def _refuse_if_of_another_id(error: RecoveryRefused, directory: Path, note: Path, name: str) -> None:
    """Say that the note `member` is wrong, where the storage is this replica's after all, under another id."""
    if error.condition is not Condition.REPLICA_FOREIGN:
        return
    with Environment.open_readonly(directory) as stored:
        theirs = stored.identity.replica
    if name_of(theirs) == name:
        raise _refused(Condition.MEMBER_NOTE_CONTRADICTS, f"{note} ({directory} is of {theirs})", name) from error


def _refused(condition: Condition, place: str, name: str) -> StorageRefused:
    """Return the refusal that the recovery table has for this condition, with the replica's name in its remedy."""
    remedy = condition.value.remedy.replace("NAME", name)
    return StorageRefused(f"{place}: {condition.title}: {condition.value.reason}. {remedy}.", condition)


@contextmanager
def starting(config: Config, name: str, *, make: bool) -> Iterator[None]:
    """Let nobody else start replica `name`, or make it join, in the meantime. With `make` its directory is made.

    Whether it may begin without data is decided here and is true until there is data, or the mark is gone. Raises
    StorageRefused.
    """
    home = config.storage.directory / name
    descriptor: int | None = None
    try:
        if make:
            directories.make(home)
        # Without the directory there is no mark in it either.
        with suppress(FileNotFoundError, NotADirectoryError):
            descriptor = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(Condition.DIRECTORY_UNUSABLE, f"{home} ({error.strerror})", name) from error
    if descriptor is None:
        yield
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            place = f"{home} (by a process that is starting)"
            raise _refused(Condition.HELD_BY_ANOTHER_PROCESS, place, name) from error
        except OSError as error:
            raise _refused(Condition.DIRECTORY_UNUSABLE, f"{home} ({error.strerror})", name) from error
        yield
    finally:
        os.close(descriptor)


def _may_be_empty(config: Config, name: str, mark: Path, *, first_start: bool) -> bool:
    """Whether this replica may begin without data. A mark beside what it left when it ran is removed.

    Raises StorageRefused if `first_start` is not true.
    """
    if not first_start and not mark.exists():
        return False
    trace = may_have_run(config.wal_directory(name)) or any_of(config.snapshot_directory(name))
    note = member_note(config, name)
    if trace is not None:
        # Whoever made the mark, it is not for a replica that has run, and would outlive the loss of its data.
        _consume(mark, name)
    elif first_start and os.path.lexists(note) and not mark.exists():
        trace = note  # one that joins has the note and the mark before it has data
    if first_start and trace is not None:
        raise _refused(Condition.HAS_RUN, str(trace), name)
    return trace is None


def any_of(directory: Path) -> Path | None:
    """Return something that is in the directory, itself if it cannot be read, or None if it is empty or not there."""
    try:
        return next(directory.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return directory


def first_start_mark(config: Config, name: str) -> Path:
    """Return the file whose existence lets a replica start without data: made by `forebay cluster init`, or for a
    replica that joins, and consumed by the first start.
    """
    return config.storage.directory / name / FIRST_START_NAME


def allow_first_start(config: Config, name: str) -> None:
    """Let a replica that has no data start without, once. StorageRefused if the mark cannot be made."""
    mark = first_start_mark(config, name)
    try:
        make_private_directory(mark.parent)
        replace_private(mark, b"")
    except OSError as error:
        raise StorageRefused(f"{mark} cannot be made ({error.strerror})") from error


def _consume(mark: Path, name: str) -> None:
    """Remove the mark durably, before the replica promises anything: a promise is what must not be forgotten."""
    try:
        mark.unlink()
        directories.sync(mark.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refused(Condition.FIRST_START_KEPT, f"{mark} cannot be removed ({error.strerror})", name) from error


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


def _replay(
    ledger: Ledger, journal: Journal, image: Image | None, directory: Path, name: str
) -> tuple[State, int, ConfigurationAt | None]:
    state, index = (EMPTY, 0) if image is None else (image.state, image.index)
    placed = None if image is None else image.configuration
    for gap in ledger.gaps():
        if index < gap.last_index:
            missing = f"entries {gap.first_index} to {gap.last_index} came with a snapshot that is gone or damaged"
            raise _refused(Condition.SNAPSHOT_NEEDED, f"{directory}: {missing}", name)
    replayed = 0
    history = HistoryFold(state)
    while index < journal.applied_index:
        before = index
        for entry in ledger.read(index + 1, limit=REPLAY_STEP_ENTRIES):
            if entry.index != index + 1:
                place = f"{directory} (entry {index + 1} of the ledger is missing; {entry.index} follows)"
                raise _refused(Condition.LEDGER_DAMAGED, place, name)
            history.take(entry.index, read_batch(entry.data))
            configuration = read_configuration(entry.data)
            if configuration is not None:
                placed = ConfigurationAt(entry.index, configuration)
            index = entry.index
            replayed += 1
        if index == before:
            place = f"{directory} (the ledger ends at entry {index}, but {journal.applied_index} is marked as applied)"
            raise _refused(Condition.LEDGER_DAMAGED, place, name)
    history.digests.finish()
    _log_digests(history.digests, history.state, image)
    return history.state, replayed, placed


def _log_digests(digests: RecordedDigests, state: State, image: Image | None) -> None:
    """Say up to where the state was held against what the ledger records, and what has yet to be."""
    if not state.revision:
        return
    start = "the first entry" if image is None else f"the snapshot of entry {image.index}"
    rest = f"what follows revision {digests.agreed}" if digests.compared else "this state"
    LOGGER.info(
        "%d of %d digests that the ledger records behind %s were compared with what it leads to; %s is compared with "
        "that of the peers, and with the next one that is recorded",
        digests.compared,
        digests.recorded,
        start,
        rest,
    )


def _check(state: State, journal: Journal, config: Config, directory: Path, name: str) -> None:
    if state.revision != journal.applied_revision:
        place = f"{directory} (the state has revision {state.revision}, the applied mark {journal.applied_revision})"
        raise _refused(Condition.STATE_CONTRADICTS, place, name)
    if state.cluster_id and state.cluster_id != config.cluster.id:
        raise StorageRefused(
            f"{directory}: the ledger is of cluster {state.cluster_id}, {config.file} says {config.cluster.id}; "
            "name the right configuration",
            Condition.CLUSTER_FOREIGN,
        )
