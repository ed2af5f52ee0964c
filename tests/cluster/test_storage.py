"""What a replica may find when it starts, and what it must refuse."""

import shutil
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config import Config
from cluster.founding import Founding, found
from cluster.storage import StorageRefused, allow_first_start, first_start_mark, open_storage
from wal.journal import Entry


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return found(tmp_path / "site", Founding(), clock=SystemClock())


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
    allow_first_start(config, "r3")
    open_storage(config, "r3").close()
    shutil.rmtree(config.wal_directory("r3").parent)
    with pytest.raises(StorageRefused):
        open_storage(config, "r3")
