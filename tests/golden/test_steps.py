"""Files of the preliminary versions 0.1 to 0.3 are rejected with a remedy and stay unchanged.

`step-0.1.tar.gz` and `step-0.3.tar.gz` were made by trees of those steps, with their `tests.golden.make_ledger`: the
first without a sync log, the last with one.
"""

import shutil
from pathlib import Path

import pytest

from forebay.cluster import serve
from forebay.cluster.cli.exits import ExitCode
from forebay.cluster.system.clock import SystemClock
from forebay.snapshots.restore import SnapshotRefused, load_snapshot
from forebay.wal import Condition, Environment, RecoveryRefused
from forebay.wal.directory import LOCK_FILE
from forebay.wal.failures import READERS_FILE
from tests.auditing import audit
from tests.cluster.test_serve import make
from tests.golden.archive import unpack

STEPS = ("step-0.1", "step-0.3")


def contents(directory: Path) -> dict[str, bytes]:
    found = (path for path in directory.rglob("*") if path.is_file() and path.name not in (LOCK_FILE, READERS_FILE))
    return {str(path): path.read_bytes() for path in found}


@pytest.mark.parametrize("step", STEPS)
def test_a_replica_does_not_start_on_a_directory_of_a_step_and_says_what_to_do(tmp_path: Path, step: str) -> None:
    config = make(tmp_path, 1)
    shutil.rmtree(tmp_path / "r1")
    unpack(tmp_path, step)
    before = contents(tmp_path / "r1")
    with pytest.raises(serve.StartRefused, match="the formats of 0.1 to 0.3 were temporary") as refused:
        serve.Replica(config, "r1", clock=SystemClock())
    assert refused.value.code == serve.EXIT_STORAGE_REFUSED == 66
    assert "forebay audit dump" in str(refused.value) and "the source tree that wrote the history" in str(refused.value)
    assert contents(tmp_path / "r1") == before


@pytest.mark.parametrize("step", STEPS)
def test_an_audit_of_a_directory_of_a_step_says_with_what_to_read_it(tmp_path: Path, step: str) -> None:
    unpack(tmp_path, step)
    with pytest.raises(RecoveryRefused) as refused:
        Environment.open_readonly(tmp_path / "r1" / "wal")
    assert refused.value.condition is Condition.FORMAT_OF_A_CONSTRUCTION_STEP
    words = ("audit", "dump", "--data", str(tmp_path / "r1"))
    result = audit(*words)
    assert (
        result.exit_code == ExitCode.VERIFICATION_FAILED and "the source tree that wrote the history" in result.stderr
    )


@pytest.mark.parametrize("step", STEPS)
def test_a_snapshot_of_a_step_is_refused_by_name(tmp_path: Path, step: str) -> None:
    unpack(tmp_path, step)
    for path in (tmp_path / "r1" / "snapshots").glob("*.fbs"):
        with pytest.raises(SnapshotRefused, match="preliminary format .0.1 to 0.3."):
            load_snapshot(path)
