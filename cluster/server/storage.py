"""Storage of a starting replica: journal, ledger and snapshots, and the state rebuilt from them.

The newest snapshot that belongs to this replica's own ledger is loaded. The entries after it are folded up to the
applied mark, and states are compared with the digests recorded in the ledger. A snapshot whose digest differs from the
ledger's at the same index belongs to another history and is skipped. Without a usable snapshot, all entries are folded
from the first one, if this replica has it.
"""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from forebay.cluster.config import FIRST_START_NAME, Config
from forebay.cluster.server.applied_log import read_batch, read_configuration
from forebay.cluster.system import make_private_directory, replace_private, start_command
from forebay.replica.fold import HistoryFold
from forebay.replica.messages import ReleaseNeeded
from forebay.replica.state import EMPTY, DigestChecker, State, StateDigestMismatch
from forebay.replica.values import LedgerViolation
from forebay.snapshots import Image, SnapshotStore
from forebay.wal import (
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
from forebay.wal import directory as directories

LOGGER = logging.getLogger(__name__)

MEMBER_NAME = "member"
"""File beside `wal` with the ID under which the replica joined."""

FORGOTTEN_NAME = "forgotten"
"""File beside `wal` of a replica that was found to lack entries it acknowledged; it prevents a start."""

SUPERSEDED_NAME = "superseded"
"""File beside `wal` of a replica whose cluster continues as a later incarnation without it; it prevents a start."""

NOTE_CHARACTERS_MAX = 1_000
"""Maximum number of characters read of these two files, which contain a sentence."""

MEMBER_CHARACTERS_MAX = 96
"""Maximum length of a member ID: a name of at most 64 characters, '#' and a number."""

REPLAY_STEP_ENTRIES = 1024
"""Number of entries read at a time while folding at start."""

FILE_REMEDY = "check the permissions of its directory and the free space of the disk"
"""Remedy for a small file of a replica that cannot be written or removed."""


class StorageRefused(Exception):
    """Storage that cannot be used; the message names location and remedy.

    `condition` is the row of the recovery table (`wal.Condition`); None for problems other than damage, such as a mark
    that cannot be created.
    """

    def __init__(self, sentence: str, condition: Condition | None = None) -> None:
        super().__init__(sentence)
        self.condition = condition


class Storage(msgspec.Struct, frozen=True):
    """Opened storage of a replica, and the state at `index`."""

    environment: Environment
    journal: Journal
    ledger: Ledger
    snapshots: SnapshotStore
    state: State
    index: int
    replayed: int
    """Number of entries folded after the snapshot."""
    identity: str
    """ID of this replica as a member: its name if it founded the cluster."""
    configuration: ConfigurationAt | None
    """Membership at `index`; None if snapshot and ledger have none."""

    def close(self) -> None:
        """Write pending marks and close everything."""
        self.snapshots.close()
        if self.environment.failure is None:
            self.journal.flush_hints()
        self.environment.close()


def open_storage(config: Config, name: str, *, first_start: bool = False) -> Storage:
    """Open the storage of replica `name` and rebuild its state. `first_start`: the operator declares a first start.

    Raises:
        RecoveryRefused: The ledger is damaged or belongs to another replica (`wal`).
        StorageFailed: The ledger cannot be read or written (`wal`).
        SnapshotFailed: The snapshots cannot be read (`snapshots`).
        StorageRefused: The storage cannot be used.
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
                f"--name {name} --first-start`; if its data is lost, it must not start under its old identity, "
                "because it would have forgotten votes and entries that other replicas rely on: run `forebay cluster "
                f"replace {name}`, then `{start_command('replica', name)}`; if a majority has lost its data, run "
                "`forebay cluster recover` on a machine that still has data",
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
        except StateDigestMismatch as error:
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
    """Return the path of the file with a replica's ID; founders have no such file."""
    return config.storage.directory / name / MEMBER_NAME


def identity_of(config: Config, name: str) -> str:
    """Return the ID of replica `name` as a member. Raises the exceptions of `noted_member`."""
    return noted_member(config, name)[0]


def noted_member(config: Config, name: str) -> tuple[str, Incarnation]:
    """Return the ID of replica `name` as a member, and the incarnation of the cluster that it joined.

    The file contains `r2#6`, or `r2#6 2-…` for an incarnation after the first.

    Raises:
        StorageRefused: The file is unreadable or belongs to another replica.
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
        place = f"{note} contains {text[:MEMBER_CHARACTERS_MAX]!r}, which is not an ID of replica {name}"
        raise _refused(Condition.MEMBER_NOTE_DAMAGED, place, name)
    return identity, lineage[1]


def note_forgotten(config: Config, name: str, sentence: str) -> None:
    """Record that replica `name` has lost promised entries, so that it does not start again."""
    _write_note(config, name, FORGOTTEN_NAME, sentence)


def note_superseded(config: Config, name: str, sentence: str) -> None:
    """Record that the cluster continues without replica `name`, so that it does not start again."""
    _write_note(config, name, SUPERSEDED_NAME, sentence)


def _write_note(config: Config, name: str, file_name: str, sentence: str) -> None:
    note = config.storage.directory / name / file_name
    try:
        replace_private(note, f"{sentence}\n".encode())
    except OSError as error:  # the replica stops anyway, and is notified again at each start
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
        # The file's sentence comes first. A damaged file also prevents a start.
        raise _refused(condition, f"{note}: {sentence}", name)


def _refuse_if_of_another_id(error: RecoveryRefused, directory: Path, note: Path, name: str) -> None:
    """Report a wrong `member` file if the storage belongs to this replica under another ID."""
    if error.condition is not Condition.REPLICA_FOREIGN:
        return
    with Environment.open_readonly(directory) as stored:
        theirs = stored.identity.replica
    if name_of(theirs) == name:
        raise _refused(Condition.MEMBER_NOTE_CONTRADICTS, f"{note} ({directory} is of {theirs})", name) from error


def _refused(condition: Condition, place: str, name: str) -> StorageRefused:
    """Return the recovery table's rejection for this condition, with the replica's name in its remedy."""
    remedy = condition.value.remedy.replace("NAME", name)
    return StorageRefused(f"{place}: {condition.title}: {condition.value.reason}. {remedy}.", condition)


@contextmanager
def starting(config: Config, name: str, *, make: bool) -> Iterator[None]:
    """Prevent other processes from starting or joining replica `name` in this block. `make`: create its directory.

    Inside the block, the caller decides whether the replica may start without data. The decision holds until there is
    data or the mark is removed.

    Raises:
        StorageRefused: The directory is unusable, or another process uses it.
    """
    home = config.storage.directory / name
    descriptor: int | None = None
    try:
        if make:
            directories.make(home)
        # Without the directory there is no mark, and nothing to lock.
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
    """Return whether this replica may start without data. Remove a mark that lies beside data of an earlier run.

    Raises:
        StorageRefused: The operator declared a first start, but the replica has run.
    """
    if not first_start and not mark.exists():
        return False
    trace = may_have_run(config.wal_directory(name)) or any_of(config.snapshot_directory(name))
    note = member_note(config, name)
    if trace is not None:
        # A replica that has run must not keep the mark: after a loss of its data, the mark would allow a start.
        _consume(mark, name)
    elif first_start and os.path.lexists(note) and not mark.exists():
        trace = note  # a joining replica has both the file and the mark before it has data
    if first_start and trace is not None:
        raise _refused(Condition.HAS_RUN, str(trace), name)
    return trace is None


def any_of(directory: Path) -> Path | None:
    """Return a file in the directory, the directory itself if it is unreadable, or None if it is empty or absent."""
    try:
        return next(directory.iterdir(), None)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return directory


def first_start_mark(config: Config, name: str) -> Path:
    """Return the path of the mark that permits a start without data. The first start removes the mark.

    `forebay cluster init` creates the mark, and so does a replica that joins.
    """
    return config.storage.directory / name / FIRST_START_NAME


def allow_first_start(config: Config, name: str) -> None:
    """Permit one start of a replica without data.

    Raises:
        StorageRefused: The mark cannot be created.
    """
    mark = first_start_mark(config, name)
    try:
        make_private_directory(mark.parent)
        replace_private(mark, b"")
    except OSError as error:
        raise StorageRefused(f"{mark} cannot be created ({error.strerror}); {FILE_REMEDY}") from error


def _consume(mark: Path, name: str) -> None:
    """Remove the mark durably, before the replica makes any promise."""
    try:
        mark.unlink()
        directories.sync(mark.parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise _refused(Condition.FIRST_START_KEPT, f"{mark} cannot be removed ({error.strerror})", name) from error


def _usable_image(store: SnapshotStore, journal: Journal) -> Image | None:
    """Return the newest snapshot that belongs to this ledger, or None.

    The newest snapshot may be unusable: a replica that was killed while installing it has the file, but not yet the
    mark.
    """
    found = store.newest_usable(lambda image: _why_not(image, journal))
    return None if found is None else found[1]


def _why_not(image: Image, journal: Journal) -> str | None:
    """Return the reason why a valid snapshot is unusable on this ledger, or None."""
    if image.index > journal.applied_index:
        return f"the snapshot is newer than the applied mark {journal.applied_index}"
    if journal.digest_at(image.index) != image.chain_digest:
        return f"the snapshot contradicts entry {image.index} of the ledger"
    return None


def _replay(
    ledger: Ledger, journal: Journal, image: Image | None, directory: Path, name: str
) -> tuple[State, int, ConfigurationAt | None]:
    state, index = (EMPTY, 0) if image is None else (image.state, image.index)
    placed = None if image is None else image.configuration
    for gap in ledger.gaps():
        if index < gap.last_index:
            missing = (
                f"entries {gap.first_index} to {gap.last_index} were installed from a snapshot that is missing or "
                "damaged"
            )
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


def _log_digests(digests: DigestChecker, state: State, image: Image | None) -> None:
    """Log how many recorded digests the replayed state was compared with."""
    if not state.revision:
        return
    start = "the first entry" if image is None else f"the snapshot of entry {image.index}"
    rest = f"the state after revision {digests.agreed}" if digests.compared else "this state"
    LOGGER.info(
        "compared %d of %d digests that the ledger records after %s with the replayed state; %s will be compared with "
        "the peers' and with the next recorded digest",
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
            f"{directory}: the ledger belongs to cluster {state.cluster_id}, but {config.file} names "
            f"{config.cluster.id}; name the right configuration",
            Condition.CLUSTER_FOREIGN,
        )
