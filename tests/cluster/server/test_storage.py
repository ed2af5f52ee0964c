"""What a replica may find when it starts, and what it must refuse."""

import os
import shutil
from pathlib import Path

import lmdb
import pytest

from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, create_site
from forebay.cluster.server.storage import (
    FORGOTTEN_NAME,
    StorageRefused,
    allow_first_start,
    first_start_mark,
    note_forgotten,
    open_storage,
    starting,
)
from forebay.cluster.system.clock import SystemClock
from forebay.snapshots import Image, write_snapshot
from forebay.wal import RecoveryRefused
from forebay.wal.failures import LOG_FILE, Condition
from forebay.wal.journal import Entry
from forebay.wal.sectors import BLOCK_BYTES


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return create_site(tmp_path / "site", Founding(), clock=SystemClock())


@pytest.mark.parametrize("lost", ["wal", "the whole directory"])
def test_a_replica_that_has_run_never_starts_empty_under_its_name(config: Config, lost: str) -> None:
    open_storage(config, "r1").close()
    open_storage(config, "r1").close()
    directory = config.wal_directory("r1")
    assert not any(config.snapshot_directory("r1").iterdir()), "there is no snapshot to remind of the former life"
    shutil.rmtree(directory if lost == "wal" else directory.parent)
    with pytest.raises(StorageRefused, match="forgotten votes"):
        open_storage(config, "r1")
    assert not directory.exists()


def test_a_replica_starts_empty_once_where_init_made_its_directory(config: Config) -> None:
    storage = open_storage(config, "r2")
    assert (storage.index, storage.state.revision) == (0, 0)
    assert not first_start_mark(config, "r2").exists(), "consumed before anything is promised"
    storage.close()


def test_how_full_the_journal_is_grows_with_its_entries(config: Config) -> None:
    storage = open_storage(config, "r1")
    before = storage.environment.fill
    storage.journal.set_term(1, None)
    storage.journal.append([Entry(index, 1, b"\1" * 500_000) for index in range(1, 21)])
    storage.journal.sync()
    grown = (storage.environment.fill - before) * config.storage.map_size_bytes
    assert 10_000_000 < grown < 12_000_000
    storage.close()


def test_an_operator_may_say_that_a_replica_has_never_run(config: Config) -> None:
    shutil.rmtree(config.wal_directory("r3").parent)
    open_storage(config, "r3", first_start=True).close()
    assert not first_start_mark(config, "r3").exists()
    shutil.rmtree(config.wal_directory("r3").parent)
    with pytest.raises(StorageRefused):
        open_storage(config, "r3")


def test_a_first_start_that_was_interrupted_may_be_said_again(config: Config) -> None:
    """LMDB made its file and wrote no transaction, and of the log there is only what a new one has."""
    shutil.rmtree(config.wal_directory("r3").parent)
    directory = config.wal_directory("r3")
    directory.mkdir(parents=True)
    lmdb.open(str(directory), map_size=1 << 20, max_dbs=5, lib_version=0).close()
    (directory / LOG_FILE).write_bytes(b"FBSYNCLG".ljust(BLOCK_BYTES * 4, b"\0"))
    with pytest.raises(RecoveryRefused) as refused:
        open_storage(config, "r3")
    assert refused.value.condition is Condition.DIRECTORY_EMPTY
    open_storage(config, "r3", first_start=True).close()


@pytest.mark.parametrize("left", ["nothing", "snapshots"])
def test_a_first_start_that_was_refused_allows_no_other_one(config: Config, left: str) -> None:
    """Somebody says so of a replica that runs, and is refused. Then its data is lost, and it is started as always."""
    storage = open_storage(config, "r1")
    write_snapshot(storage.snapshots.directory, Image(storage.state, 1, 1, b"d" * 32))
    with pytest.raises(StorageRefused) as refused:
        open_storage(config, "r1", first_start=True)
    assert refused.value.condition is Condition.HAS_RUN
    storage.close()
    for directory in (config.wal_directory("r1"), config.snapshot_directory("r1")):
        if left == "nothing" or directory.name != left:
            shutil.rmtree(directory)
    with pytest.raises(StorageRefused) as refused:
        open_storage(config, "r1")
    assert refused.value.condition is Condition.DIRECTORY_EMPTY


@pytest.mark.parametrize("left", ["wal", "snapshots"])
def test_a_mark_beside_data_is_removed_before_anything_else(config: Config, left: str) -> None:
    storage = open_storage(config, "r1")
    write_snapshot(storage.snapshots.directory, Image(storage.state, 1, 1, b"d" * 32))
    storage.close()
    allow_first_start(config, "r1")
    lost = "snapshots" if left == "wal" else "wal"
    shutil.rmtree(config.storage.directory / "r1" / lost)
    if left == "wal":
        (config.wal_directory("r1") / LOG_FILE).unlink()
    expected = Condition.SYNC_LOG_MISSING if left == "wal" else Condition.DIRECTORY_EMPTY
    with pytest.raises((RecoveryRefused, StorageRefused), match=expected.title.split()[-1]):
        open_storage(config, "r1")
    assert not first_start_mark(config, "r1").exists()


def test_two_starts_of_one_replica_do_not_decide_at_once_whether_it_has_run(config: Config) -> None:
    with starting(config, "r1", make=False), pytest.raises(StorageRefused, match="starting") as refused:
        open_storage(config, "r1")
    assert refused.value.condition is Condition.HELD_BY_ANOTHER_PROCESS
    open_storage(config, "r1").close()


def test_what_is_said_of_a_replica_that_lost_its_data_is_there_after_a_power_failure(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    note_forgotten(config, "r1", "the leader says so")
    home = config.storage.directory / "r1"
    # The note, which has its name only when it is on the disk, and then the name.
    (note, directory) = synced
    assert (Path(note).parent, Path(note).name.split(".")[1], directory) == (home, FORGOTTEN_NAME, str(home))
    assert (home / FORGOTTEN_NAME).read_text() == "the leader says so\n"


def test_an_applied_entry_that_no_release_writes_is_a_damaged_ledger(config: Config) -> None:
    storage = open_storage(config, "r1")
    odd = Entry(1, 1, b"\x7fodd")
    storage.journal.set_term(1, "r1")
    storage.journal.append([odd])
    storage.journal.sync()
    storage.journal.set_commit(1)
    storage.journal.record_applied(odd, 0)
    storage.close()
    with pytest.raises(StorageRefused, match="not a known kind") as refused:
        open_storage(config, "r1")
    assert refused.value.condition is Condition.LEDGER_DAMAGED
