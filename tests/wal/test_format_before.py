"""What the last release without a sync log has really left on its disks, opened by this one (tests/golden)."""

import json
from pathlib import Path

import pytest

from tests.golden.archive import GOLDEN, unpack
from wal import Environment, Journal
from wal.failures import LOG_FILE
from wal.ledger import Ledger
from wal.records import FORMAT_VERSION, FORMAT_WITHOUT_SYNC_LOG
from wal.tables import read_identity

CLUSTER = "0123456789abcdef" * 2


def format_of(env: Environment) -> int:
    assert env._environment is not None
    return read_identity(env.directory, env._environment, env._tables)[0]


@pytest.mark.parametrize("replica", ["r1", "r2", "r3"])
def test_a_directory_of_the_release_before_is_read_as_it_is_and_becomes_one_of_this_when_its_replica_starts(
    tmp_path: Path, replica: str
) -> None:
    unpack(tmp_path)
    golden = json.loads((GOLDEN / "level-1.json").read_text(encoding="utf-8"))
    directory = tmp_path / replica / "wal"
    with Environment.open_readonly(directory) as env:
        assert format_of(env) == FORMAT_WITHOUT_SYNC_LOG
        before = Ledger(env).verify()
        assert before.entries > 10
        assert (before.digest.hex() == golden["ledger_digest"]) == (replica != "r3")
    assert not (directory / LOG_FILE).exists(), "who reads makes nothing"
    for more in range(2):
        with Environment.open(
            directory, cluster_id=CLUSTER, replica=replica, map_size_bytes=64 << 20, create=False
        ) as env:
            journal = Journal(env)
            assert format_of(env) == FORMAT_VERSION
            assert Ledger(env).verify() == before
            assert journal.applied_digest == before.digest
            journal.set_term(journal.term + 1, replica)
            journal.sync()
            assert journal.term == 3 + more
