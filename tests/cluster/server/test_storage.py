"""Storage that a starting replica may find, and storage that it must reject."""

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
def test_replica_that_has_run_never_starts_empty_under_its_name(config: Config, lost: str) -> None:
    open_storage(config, "r1").close()
    open_storage(config, "r1").close()
    directory = config.wal_directory("r1")
    assert not any(config.snapshot_directory("r1").iterdir()), "no snapshot may show that the replica has run"
    shutil.rmtree(directory if lost == "wal" else directory.parent)
    with pytest.raises(StorageRefused, match="forgotten votes"):
        open_storage(config, "r1")
    assert not directory.exists()


def test_replica_starts_empty_once_in_a_directory_made_by_init(config: Config) -> None:
    storage = open_storage(config, "r2")
    assert (storage.index, storage.state.revision) == (0, 0)
    assert not first_start_mark(config, "r2").exists(), "the mark is removed before any promise"
    storage.close()


def test_journal_fill_grows_with_its_entries(config: Config) -> None:
    storage = open_storage(config, "r1")
    before = storage.environment.fill
    storage.journal.set_term(1, None)
    storage.journal.append([Entry(index, 1, b"\1" * 500_000) for index in range(1, 21)])
    storage.journal.sync()
    grown = (storage.environment.fill - before) * config.storage.map_size_bytes
    assert 10_000_000 < grown < 12_000_000
    storage.close()


def test_operator_may_declare_a_first_start(config: Config) -> None:
    shutil.rmtree(config.wal_directory("r3").parent)
    open_storage(config, "r3", first_start=True).close()
    assert not first_start_mark(config, "r3").exists()
    shutil.rmtree(config.wal_directory("r3").parent)
    with pytest.raises(StorageRefused):
        open_storage(config, "r3")


def test_interrupted_first_start_may_be_declared_again(config: Config) -> None:
    """LMDB created its file without a transaction, and the log is a new one."""
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
def test_rejected_first_start_does_not_permit_another_one(config: Config, left: str) -> None:
    """A first start is declared for a replica with data, and rejected. A later plain start without data is rejected
    too.
    """
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
def test_mark_beside_data_is_removed_first(config: Config, left: str) -> None:
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


def test_two_starts_of_one_replica_cannot_decide_at_the_same_time(config: Config) -> None:
    with starting(config, "r1", make=False), pytest.raises(StorageRefused, match="starting") as refused:
        open_storage(config, "r1")
    assert refused.value.condition is Condition.HELD_BY_ANOTHER_PROCESS
    open_storage(config, "r1").close()


def test_note_of_lost_data_survives_a_power_failure(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    note_forgotten(config, "r1", "the leader says so")
    home = config.storage.directory / "r1"
    # The note gets its name only when its content is on disk; then the name is synced.
    (note, directory) = synced
    assert (Path(note).parent, Path(note).name.split(".")[1], directory) == (home, FORGOTTEN_NAME, str(home))
    assert (home / FORGOTTEN_NAME).read_text() == "the leader says so\n"


def test_applied_entry_that_no_release_writes_is_a_damaged_ledger(config: Config) -> None:
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
