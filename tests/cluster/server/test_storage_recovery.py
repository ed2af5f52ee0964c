"""Recovery table, rows beside the journal: snapshots, notes, marks, and a full disk.

Each condition is produced in a replica's directory; the replica then starts or is rejected, as the table says.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import immutables
import msgspec
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.server.storage import (
    FORGOTTEN_NAME,
    SUPERSEDED_NAME,
    StorageRefused,
    first_start_mark,
    identity_of,
    member_note,
    note_forgotten,
    note_superseded,
    open_storage,
)
from forebay.cluster.system.clock import SystemClock
from forebay.replica.decide.decide import decide
from forebay.replica.fold.apply import apply_batch
from forebay.replica.messages.commands import CONTROLLER, FoundCluster, Request
from forebay.replica.messages.entries import Acceptance, Batch
from forebay.replica.messages.entries import Entry as Settled
from forebay.replica.messages.events import StateDigested
from forebay.replica.state.digest import state_digest
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.units import Instant, Revision
from forebay.snapshots import Image, SnapshotFailed, SnapshotName, load_snapshot, write_snapshot
from forebay.snapshots.finalize import TEMPORARY_SUFFIX
from forebay.snapshots.receive import receiving_name
from forebay.wal import Entry, RecoveryRefused, records
from forebay.wal.codec import encode_batch
from forebay.wal.directory import LOCK_FILE
from forebay.wal.failures import DATA_FILE, LOG_FILE, READERS_FILE, Condition, Reaction
from tests.repo.tree import ROOT
from tests.wal.support import NO_OP, flip_value_in_file
from tests.wal.test_recovery import DAMAGE as DAMAGE_OF_JOURNAL
from tests.wal.test_recovery import ELSEWHERE

Damage = Callable[[Config], None]

IDENTITY = "r1#2"
OLDER, NEWER, LAST = SnapshotName(10, 2), SnapshotName(30, 2), 60
RECORDING = 35
"""Index of the entry that records the digest of the snapshots' state."""
GAP_TO = SnapshotName(80, 3)


class Site(msgspec.Struct):
    """Two stopped replicas: r1 with a complete ledger, and r2, which received a snapshot."""

    config: Config
    state: State


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    config = create_site(tmp_path_factory.mktemp("site") / "site", Founding(agents=0), clock=SystemClock())
    member_note(config, "r1").write_text(f"{IDENTITY}\n")
    command = FoundCluster(config.cluster.id, config.cluster.name, config.policy, config.pools)
    outcome = decide(EMPTY, Request(b"", CONTROLLER, command), Instant(1))
    assert isinstance(outcome, Acceptance)
    batch = Batch(Revision(0), Instant(1), (Settled(b"", CONTROLLER, "found_cluster", outcome.events),))
    after = apply_batch(EMPTY, batch)
    assert after is not None
    record = Settled(b"", CONTROLLER, "record_state_digest", (StateDigested(1, state_digest(after)),))
    recording = Batch(Revision(1), Instant(1), (record,))
    recorded = apply_batch(after, recording)
    assert recorded is not None
    storage = open_storage(config, "r1")
    journal = storage.journal
    journal.set_term(2, IDENTITY)
    entries = [Entry(index, 2, NO_OP) for index in range(1, LAST + 1)]
    entries[1] = Entry(2, 1, encode_batch(batch))
    entries[0] = Entry(1, 1, NO_OP)
    entries[RECORDING - 1] = Entry(RECORDING, 2, encode_batch(recording))
    journal.append(entries)
    for entry in entries[:40]:
        journal.set_commit(entry.index)
        digest = journal.record_applied(entry, (entry.index >= 2) + (entry.index >= RECORDING))
        if entry.index in (OLDER.index, NEWER.index):
            write_snapshot(storage.snapshots.directory, Image(after, entry.index, entry.term, digest))
    journal.compact_to(20)
    journal.sync()
    storage.close()
    storage = open_storage(config, "r2")
    storage.journal.set_term(3, None)
    storage.journal.append([Entry(1, 1, NO_OP)])
    digest = b"d" * records.DIGEST_BYTES
    write_snapshot(storage.snapshots.directory, Image(recorded, GAP_TO.index, GAP_TO.term, digest))
    storage.journal.reset_to(GAP_TO.index, GAP_TO.term, digest, recorded.revision)
    storage.journal.sync()
    storage.close()
    return Site(config, recorded)


@pytest.fixture
def config(site: Site, tmp_path: Path) -> Config:
    """Copy the replicas' directories for one test."""
    shutil.copytree(site.config.storage.directory, tmp_path / "storage")
    storage = msgspec.structs.replace(site.config.storage, directory=tmp_path / "storage")
    return msgspec.structs.replace(site.config, storage=storage)


def snapshot(config: Config, name: SnapshotName, replica: str = "r1") -> Path:
    return config.snapshot_directory(replica) / str(name)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def both(what: Callable[[Path], None]) -> Damage:
    def damage(config: Config) -> None:
        for name in (OLDER, NEWER):
            what(snapshot(config, name))

    return damage


def noted(text: bytes) -> Damage:
    return lambda config: member_note(config, "r1").write_bytes(text) and None


def instead(path: Callable[[Config], Path]) -> Damage:
    """Return a damage: a directory replaces a file, as after a bad file system repair."""

    def damage(config: Config) -> None:
        path(config).unlink(missing_ok=True)
        path(config).mkdir()

    return damage


def snapshots_are_a_file(config: Config) -> None:
    shutil.rmtree(config.snapshot_directory("r1"))
    config.snapshot_directory("r1").write_bytes(b"")


def of_another_cluster(config: Config) -> None:
    """Replace the newest snapshot by a valid one of another cluster."""
    storage = open_storage(config, "r1")
    state = msgspec.structs.replace(storage.state, cluster_id="another")
    digest = storage.journal.digest_at(NEWER.index) or b""
    storage.close()
    write_snapshot(config.snapshot_directory("r1"), Image(state, NEWER.index, NEWER.term, digest))


def of_another_history(config: Config) -> None:
    storage = open_storage(config, "r1")
    image = Image(storage.state, NEWER.index, NEWER.term, b"h" * records.DIGEST_BYTES)
    storage.close()
    write_snapshot(config.snapshot_directory("r1"), image)


def ahead(config: Config) -> None:
    """Leave a received and finalized snapshot that the journal does not know yet."""
    storage = open_storage(config, "r1")
    image = Image(storage.state, LAST, 2, b"h" * records.DIGEST_BYTES)
    storage.close()
    write_snapshot(config.snapshot_directory("r1"), image)


def older_entry_flipped(config: Config) -> None:
    """Damage an entry below the base, which no start checks, but which is folded without snapshots."""
    both(Path.unlink)(config)
    key = records.index_key(7)
    flip_value_in_file(config.wal_directory("r1"), key, records.pack_entry(key, Entry(7, 2, NO_OP))[4:])


def older_state(config: Config) -> None:
    """Write a snapshot with the right index and ledger digest, and the state of another index."""
    storage = open_storage(config, "r1")
    digest = storage.journal.digest_at(NEWER.index) or b""
    state = msgspec.structs.replace(storage.state, revision=Revision(storage.state.revision + 1))
    storage.close()
    write_snapshot(config.snapshot_directory("r1"), Image(state, NEWER.index, NEWER.term, digest))


def forged_state(config: Config) -> None:
    """Write a snapshot with the right index, revision and ledger digest, but with a pool of twice the size."""
    image = load_snapshot(snapshot(config, NEWER))
    pools = {
        name: msgspec.structs.replace(pool, quantity_bytes=2 * pool.quantity_bytes)
        for name, pool in image.state.pools.items()
    }
    state = msgspec.structs.replace(image.state, pools=immutables.Map(pools))
    write_snapshot(config.snapshot_directory("r1"), msgspec.structs.replace(image, state=state))


def lost(what: Callable[[Config], Path]) -> Damage:
    return lambda config: shutil.rmtree(what(config))


REFUSED: dict[Condition, list[Damage]] = {
    Condition.DIRECTORY_EMPTY: [
        lost(lambda config: config.wal_directory("r1")),
        lost(lambda config: config.wal_directory("r1").parent),
    ],
    Condition.FIRST_START_KEPT: [instead(lambda config: first_start_mark(config, "r1"))],
    Condition.MEMBER_NOTE_DAMAGED: [
        noted(b""),
        noted(b"r2#2\n"),
        noted(b"r1\xff2\n"),
        noted(b"r1#" + b"2" * 200),
        instead(lambda config: member_note(config, "r1")),
    ],
    Condition.MEMBER_NOTE_CONTRADICTS: [lambda config: member_note(config, "r1").unlink(), noted(b"r1#3\n")],
    Condition.PROMISES_FORGOTTEN: [
        lambda config: note_forgotten(config, "r1", "the leader says so"),
        lambda config: member_note(config, "r1").with_name(FORGOTTEN_NAME).touch(),
        lambda config: member_note(config, "r1").with_name(FORGOTTEN_NAME).write_bytes(b"\xff" * 5000) and None,
        instead(lambda config: member_note(config, "r1").with_name(FORGOTTEN_NAME)),
    ],
    Condition.INCARNATION_OVER: [
        lambda config: note_superseded(config, "r1", "r2 has incarnation 2"),
        lambda config: member_note(config, "r1").with_name(SUPERSEDED_NAME).touch(),
        instead(lambda config: member_note(config, "r1").with_name(SUPERSEDED_NAME)),
    ],
    Condition.SNAPSHOTS_UNUSABLE: [snapshots_are_a_file],
    Condition.LEDGER_DAMAGED: [older_entry_flipped],
    Condition.STATE_CONTRADICTS: [older_state],
    Condition.STATE_NOT_THE_RECORDED: [forged_state],
}
"""Rejected conditions, each produced in r1's directory."""

NEEDED: list[Callable[[Path], None]] = [Path.unlink, flip, cut]
"""Damage of the snapshot that r2's ledger needs: `snapshot needed`."""

REPAIRED: dict[Condition, list[tuple[Damage, int]]] = {
    Condition.LOCK_FILE_ALTERED: [
        (lambda config: (config.wal_directory("r1") / LOCK_FILE).unlink(), 10),
        (lambda config: (config.wal_directory("r1") / LOCK_FILE).write_bytes(b"\xff" * 99) and None, 10),
    ],
    Condition.TABLE_OF_READERS_ALTERED: [
        (lambda config: (config.wal_directory("r1") / READERS_FILE).unlink(), 10),
        (lambda config: (config.wal_directory("r1") / READERS_FILE).write_bytes(b"\xff" * 8192) and None, 10),
    ],
    Condition.SNAPSHOT_LOST: [
        (lambda config: snapshot(config, NEWER).unlink(), 30),
        (lambda config: snapshot(config, OLDER).unlink(), 10),
        (both(Path.unlink), 40),
        (lost(lambda config: config.snapshot_directory("r1")), 40),
    ],
    Condition.SNAPSHOT_DAMAGED: [
        (lambda config: flip(snapshot(config, NEWER)), 30),
        (lambda config: cut(snapshot(config, NEWER)), 30),
        (lambda config: snapshot(config, NEWER).write_bytes(b"") and None, 30),
        (of_another_cluster, 30),
        (both(flip), 40),
    ],
    Condition.SNAPSHOT_NOT_OF_THIS_LEDGER: [(of_another_history, 30), (ahead, 10)],
}
"""Conditions after which a start continues, with the number of entries it folds (10 after the newest snapshot)."""


def test_every_row_of_the_table_is_produced_here_or_in_the_journals_tests() -> None:
    alone = {Condition.HAS_RUN, Condition.SNAPSHOT_NEEDED, Condition.SNAPSHOT_UNFINISHED, Condition.DISK_FULL}
    here = {*REFUSED, *REPAIRED, *alone}
    assert {*DAMAGE_OF_JOURNAL, *here} == set(Condition)
    # Rows omitted by the journal's tests must be here, or in the module that they name.
    assert {condition for condition, ways in DAMAGE_OF_JOURNAL.items() if not ways} == {*ELSEWHERE}
    assert all(ways for ways in (*REFUSED.values(), *REPAIRED.values()))
    assert {condition.value.action for condition in REFUSED} == {Reaction.REFUSE}
    assert {condition.value.action for condition in REPAIRED} == {Reaction.CONTINUE}


@pytest.mark.parametrize(
    ("condition", "damage"),
    [
        pytest.param(condition, way, id=f"{condition.title}-{number}")
        for condition, ways in REFUSED.items()
        for number, way in enumerate(ways)
    ],
)
def test_unusable_storage_is_rejected_by_name_at_every_start(
    config: Config, condition: Condition, damage: Damage
) -> None:
    damage(config)
    for _ in range(2):
        with pytest.raises((StorageRefused, SnapshotFailed)) as refused:
            open_storage(config, "r1")
        sentence = str(refused.value)
        assert str(config.storage.directory / "r1") in sentence
        if isinstance(refused.value, StorageRefused):
            assert refused.value.condition is condition
        else:
            assert condition is Condition.SNAPSHOTS_UNUSABLE
        if condition in (Condition.DIRECTORY_EMPTY, Condition.SNAPSHOTS_UNUSABLE):
            continue  # these messages say more than the table's row
        assert condition.title in sentence and condition.value.reason in sentence
        assert condition.value.remedy.replace("NAME", "r1") in sentence


@pytest.mark.parametrize(
    ("condition", "damage", "replayed"),
    [
        pytest.param(condition, way, replayed, id=f"{condition.title}-{number}")
        for condition, ways in REPAIRED.items()
        for number, (way, replayed) in enumerate(ways)
    ],
)
def test_harmless_condition_is_skipped_and_the_state_is_unchanged(
    config: Config, site: Site, condition: Condition, damage: Damage, replayed: int, caplog: pytest.LogCaptureFixture
) -> None:
    damage(config)
    caplog.clear()
    storage = open_storage(config, "r1")
    try:
        assert (storage.state, storage.index, storage.replayed) == (site.state, 40, replayed)
        assert (storage.identity, storage.journal.last_index) == (IDENTITY, LAST)
        if condition in (Condition.SNAPSHOT_DAMAGED, Condition.SNAPSHOT_NOT_OF_THIS_LEDGER):
            bad = storage.snapshots.skipped_snapshots[0]
            assert f"{bad.path} is ignored" in caplog.text and bad.sentence in caplog.text
            newest = storage.snapshots.newest()
            assert newest is None or newest.path != bad.path, "the bad snapshot must not be sent to peers"
        if condition is Condition.SNAPSHOT_LOST:
            assert storage.snapshots.skipped_snapshots == (), "a missing snapshot is not reported"
        if condition is Condition.LOCK_FILE_ALTERED:
            assert (config.wal_directory("r1") / LOCK_FILE).read_text().endswith(f"of replica {IDENTITY}")
        assert storage.ledger.verify().entries == 40
    finally:
        storage.close()
    if condition is Condition.TABLE_OF_READERS_ALTERED:
        # Check the file after LMDB has closed it: closing it twice would release LMDB's own locks.
        assert (config.wal_directory("r1") / READERS_FILE).read_bytes()[:4] == b"\xde\xc0\xef\xbe"


def test_h08_corrupt_snapshot_at_start_is_reported_and_the_older_one_is_used(
    config: Config, site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    """The stock engine swallows the error and starts empty. Without an older snapshot, the ledger is used or the start
    fails.
    """
    flip(snapshot(config, NEWER))
    storage = open_storage(config, "r1")
    assert (storage.state, storage.replayed) == (site.state, 30)
    assert [skipped.path for skipped in storage.snapshots.skipped_snapshots] == [snapshot(config, NEWER)]
    storage.close()
    assert f"{snapshot(config, NEWER)} is ignored" in caplog.text
    flip(snapshot(config, OLDER))
    storage = open_storage(config, "r1")
    assert (storage.state, storage.replayed) == (site.state, 40)
    storage.close()
    flip(snapshot(config, GAP_TO, "r2"))
    with pytest.raises(StorageRefused) as refused:
        open_storage(config, "r2")
    assert refused.value.condition is Condition.SNAPSHOT_NEEDED


@pytest.mark.parametrize("what", NEEDED)
def test_snapshot_that_the_ledger_cannot_replace_is_required(
    config: Config, site: Site, what: Callable[[Path], None]
) -> None:
    row = Condition.SNAPSHOT_NEEDED.value
    assert row.action is Reaction.REFUSE
    path = snapshot(config, GAP_TO, "r2")
    kept = path.read_bytes()
    what(path)
    for _ in range(2):
        with pytest.raises(StorageRefused) as refused:
            open_storage(config, "r2")
        assert refused.value.condition is Condition.SNAPSHOT_NEEDED
        sentence = str(refused.value)
        assert f"entries 1 to {GAP_TO.index} were installed from a snapshot that is missing or damaged" in sentence
        assert row.reason in sentence and row.remedy.replace("NAME", "r2") in sentence
    path.write_bytes(kept)
    storage = open_storage(config, "r2")
    assert (storage.state, storage.index) == (site.state, GAP_TO.index)
    storage.close()


def test_leftover_of_a_dead_process_is_removed_or_kept_up_to_its_valid_end(config: Config, site: Site) -> None:
    assert Condition.SNAPSHOT_UNFINISHED.value.action is Reaction.CUT
    directory, whole = config.snapshot_directory("r1"), snapshot(config, NEWER).read_bytes()
    saving = directory / f".{SnapshotName(39, 2)}{TEMPORARY_SUFFIX}"
    saving.write_bytes(whole[:-40])
    receiving = directory / receiving_name(SnapshotName(50, 2))
    receiving.write_bytes(whole[:-40])
    storage = open_storage(config, "r1")
    assert (storage.state, storage.replayed) == (site.state, 10)
    assert not saving.exists()
    partial = storage.snapshots.partial
    assert partial is not None and 0 < partial.sound_bytes <= len(whole) - 40
    storage.close()


FULL_DISK = """
import resource, sys
from pathlib import Path
import msgspec
from forebay.cluster.config.config import Config
from forebay.cluster.server.storage import open_storage
from wal import StorageFailed
config = Config.load(Path(sys.argv[1]))
config = msgspec.structs.replace(config, storage=msgspec.structs.replace(config.storage, directory=Path(sys.argv[2])))
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]), resource.RLIM_INFINITY))
try:
    open_storage(config, "r1")
except StorageFailed as error:
    print(error)
"""
"""Limit on file sizes that acts like a full disk. The lock's text fits."""


def test_start_on_a_full_disk_ends_with_the_remedy_and_loses_nothing(config: Config, site: Site) -> None:
    row = Condition.DISK_FULL.value
    assert row.action is Reaction.REFUSE
    words = [sys.executable, "-c", FULL_DISK, str(config.file), str(config.storage.directory), "200"]
    for _ in range(2):
        done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=True)
        assert row.remedy in done.stdout and str(config.wal_directory("r1")) in done.stdout, done
    storage = open_storage(config, "r1")
    assert (storage.state, storage.journal.last_index) == (site.state, LAST)
    storage.close()


def test_note_corrected_as_the_rejection_says_lets_the_replica_start(config: Config) -> None:
    """`member note contradicts`: the message names the storage's ID."""
    member_note(config, "r1").unlink()
    assert identity_of(config, "r1") == "r1"
    with pytest.raises(StorageRefused, match=rf"{config.wal_directory('r1')} is of {IDENTITY}"):
        open_storage(config, "r1")
    member_note(config, "r1").write_text(IDENTITY)
    open_storage(config, "r1").close()


def test_directory_of_another_replica_is_not_reported_as_a_wrong_note(config: Config) -> None:
    shutil.rmtree(config.storage.directory / "r3", ignore_errors=True)
    shutil.copytree(config.storage.directory / "r2", config.storage.directory / "r3")
    with pytest.raises(RecoveryRefused) as refused:
        open_storage(config, "r3")
    assert refused.value.condition is Condition.REPLICA_FOREIGN


def test_remedy_names_the_replica_as_the_site_does(config: Config) -> None:
    """The table has NAME; operators do not find the replica's ID in the configuration."""
    (config.wal_directory("r1") / DATA_FILE).write_bytes(b"")
    (config.wal_directory("r2") / DATA_FILE).write_bytes(bytes(1 << 16))
    for name, condition, remedy in (
        ("r1", Condition.DIRECTORY_EMPTY, "`forebay run replica --name r1 --first-start`"),
        ("r2", Condition.DATA_FILE_UNREADABLE, "`forebay cluster replace r2`"),
    ):
        with pytest.raises(RecoveryRefused) as refused:
            open_storage(config, name)
        assert refused.value.condition is condition
        assert remedy in str(refused.value) and "NAME" not in str(refused.value)


def only(kept: str) -> Damage:
    """Return a damage: remove all data of r1 except `kept`."""

    def damage(config: Config) -> None:
        home = config.storage.directory / "r1"
        for path in (*home.glob("wal/*"), *home.glob("snapshots/*"), home / "member"):
            if not path.match(kept):
                path.unlink()

    return damage


@pytest.mark.parametrize("kept", ["wal/*", f"wal/{DATA_FILE}", f"wal/{LOG_FILE}", "snapshots/*", "member"])
def test_first_start_is_rejected_for_a_replica_with_any_data_left(config: Config, kept: str) -> None:
    row = Condition.HAS_RUN.value
    assert row.action is Reaction.REFUSE
    only(kept)(config)
    home = config.storage.directory / "r1"
    before = {path: path.read_bytes() for path in home.rglob("*") if path.is_file()}
    for _ in range(2):
        with pytest.raises(StorageRefused) as refused:
            open_storage(config, "r1", first_start=True)
        assert refused.value.condition is Condition.HAS_RUN
        sentence = str(refused.value)
        assert any(sentence.startswith(str(path)) for path in before)
        assert row.reason in sentence and row.remedy.replace("NAME", "r1") in sentence
        assert {path: path.read_bytes() for path in home.rglob("*") if path.is_file()} == before
