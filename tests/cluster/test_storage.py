"""What a replica may find when it starts, and what it must refuse."""

import shutil
from pathlib import Path

import pytest

from cluster.clock import SystemClock
from cluster.config import Config
from cluster.founding import Founding, found
from cluster.storage import STARTED_MARK, open_storage
from wal.failures import RecoveryRefused


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return found(tmp_path / "site", Founding(), clock=SystemClock())


def test_a_replica_that_has_run_never_starts_empty_under_its_name(config: Config) -> None:
    open_storage(config, "r1").close()
    open_storage(config, "r1").close()
    directory = config.wal_directory("r1")
    assert not any(config.snapshot_directory("r1").iterdir()), "there is no snapshot to remind of the former life"
    shutil.rmtree(directory)
    with pytest.raises(RecoveryRefused, match=r"r1/wal"):
        open_storage(config, "r1")
    assert (directory.parent / STARTED_MARK).exists()


def test_a_replica_that_has_not_run_starts_empty(config: Config) -> None:
    storage = open_storage(config, "r2")
    assert (storage.index, storage.state.revision) == (0, 0)
    storage.close()
