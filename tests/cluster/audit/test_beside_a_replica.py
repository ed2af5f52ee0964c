"""Audits of a running replica: each sees one point in time, and entries applied meanwhile cause no failure."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lmdb
import msgspec
import pytest

from forebay.cluster.audit.replay import replay
from forebay.cluster.cli.exits import ExitCode
from forebay.snapshots.image import Image
from forebay.wal.environment import Environment
from forebay.wal.ledger import Ledger
from forebay.wal.sync_log import SyncLog
from tests.cluster.audit.ledgers import CLUSTER, MAP_SIZE_BYTES, REPLICA, ROOT, Living, typed
from tests.wal.logs import auditor

ENTRIES_BEFORE = 12
"""Number of entries before the audit: some are in LMDB, some only in the sync log."""

DUMP = ["dump"]
COMMANDS = pytest.mark.parametrize(
    "words", [["verify", "--json"], ["replay", "--json"], DUMP], ids=lambda words: words[0]
)

AUDITS = 300
VERIFIED_EVERY = 10
"""Interval of audits that verify the whole ledger; the other audits only replay new entries."""

WRITER = """
import select, sys
from pathlib import Path
from tests.cluster.audit.ledgers import CLUSTER, MAP_SIZE_BYTES, REPLICA, Living
from forebay.wal.environment import Environment
with Environment.open(
    Path(sys.argv[1]), cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
) as environment:
    living = Living(environment)
    living.step()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        living.step()
        if living.journal.last_index % 50 == 0:
            living.journal.flush_hints()
"""


@pytest.fixture
def living(tmp_path: Path) -> Iterator[Living]:
    with Environment.open(
        tmp_path, cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=MAP_SIZE_BYTES, create=True
    ) as environment:
        living = Living(environment)
        for index in range(ENTRIES_BEFORE):
            living.step()
            if index == ENTRIES_BEFORE // 2:
                living.journal.flush_hints()
        yield living


def _audit_beside(
    living: Living, monkeypatch: pytest.MonkeyPatch, words: list[str], at: int, *, checkpoint: bool
) -> tuple[list[Any], int]:
    """Audit, and let the replica apply an entry before the reader's transaction number `at` (0 for none).

    Return the printed rows and the number of transactions of the audit.
    """
    reader = auditor(living.journal._env)
    original, begun = reader.read, 0

    @contextlib.contextmanager
    def read() -> "Iterator[lmdb.Transaction[bytes]]":
        nonlocal begun
        begun += 1
        if begun == at:
            living.step()
            if checkpoint:
                living.journal.flush_hints()
        with original() as transaction:
            yield transaction

    monkeypatch.setattr(reader, "read", read)
    monkeypatch.setattr(Environment, "open_readonly", lambda directory: contextlib.nullcontext(reader))
    result = typed("audit", *words, "--data", reader.directory)
    assert (result.exit_code, result.stderr) == (0, ""), f"an entry was applied before transaction {at}"
    printed = result.stdout.splitlines() if words == DUMP else [result.stdout]
    return [msgspec.json.decode(one) for one in printed], begun


@pytest.mark.parametrize("checkpoint", [False, True], ids=["synced", "checkpoint"])
@COMMANDS
def test_an_audit_during_appends_sees_one_point_in_time(
    living: Living, monkeypatch: pytest.MonkeyPatch, words: list[str], checkpoint: bool
) -> None:
    _, begun = _audit_beside(living, monkeypatch, words, 0, checkpoint=checkpoint)
    assert begun > 3, "an audit has more transactions than that of its look"
    for at in range(1, begun + 1):
        before = living.journal.applied_index
        rows, _ = _audit_beside(living, monkeypatch, words, at, checkpoint=checkpoint)
        last = rows[-1].get("last_index", rows[-1].get("index"))
        assert last in (before, before + 1) and len(rows) == (last if words == DUMP else 1)
        digest = rows[-1].get("digest" if words == DUMP else "ledger_digest")
        assert digest == living.digests[last].hex()
        if words != DUMP:
            assert rows[-1]["revision"] == living.revisions[last]


@COMMANDS
def test_an_audit_reads_the_sync_log_once(living: Living, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    original, reads = SyncLog.read, list[int]()

    def read(self: SyncLog, generation: int) -> list[bytes]:
        reads.append(generation)
        return original(self, generation)

    monkeypatch.setattr(SyncLog, "read", read)
    _audit_beside(living, monkeypatch, words, 0, checkpoint=False)
    assert len(reads) == 1


def test_an_unstable_ledger_is_not_reported_as_broken(living: Living, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code and message request a retry, so that monitoring for damage raises no alarm."""
    original = SyncLog.read

    def read(self: SyncLog, generation: int) -> list[bytes]:
        living.journal.flush_hints()
        living.step()
        return original(self, generation)

    monkeypatch.setattr(SyncLog, "read", read)
    reader = auditor(living.journal._env)
    monkeypatch.setattr(Environment, "open_readonly", lambda directory: contextlib.nullcontext(reader))
    for command in ("verify", "replay", "dump"):
        result = typed("audit", command, "--data", reader.directory)
        assert result.exit_code == ExitCode.UNREACHABLE
        sentence = " ".join(result.stderr.split())
        assert "the replica itself is sound" in sentence and "Read again" in sentence
        assert "replace" not in sentence and "do not start" not in sentence


@pytest.mark.campaign(3)
def test_many_concurrent_audits_find_a_busy_replica_sound(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdin is not None and writer.stdout is not None
    try:
        assert writer.stdout.readline() == "ready\n"
        found: list[tuple[int, int, bytes]] = []
        start: Image | None = None
        for number in range(AUDITS):
            if number % VERIFIED_EVERY == 0:
                result = typed("audit", "verify", "--data", tmp_path, "--json")
                assert (result.exit_code, result.stderr) == (0, "")
                verified = msgspec.json.decode(result.stdout)
                assert verified["entries"] == verified["last_index"]
                digest = bytes.fromhex(verified["ledger_digest"])
                found.append((verified["last_index"], verified["revision"], digest))
                continue
            with Environment.open_readonly(tmp_path) as environment:
                replayed = replay(Ledger(environment), start=start)
            found.append((replayed.last_index, replayed.state.revision, replayed.ledger_digest))
            start = Image(state=replayed.state, index=replayed.last_index, term=1, chain_digest=replayed.ledger_digest)
    finally:
        writer.stdin.close()
        assert writer.wait() == 0
        writer.stdout.close()
    assert found == sorted(found), "the ledger only grows"
    assert found[-1][0] > found[0][0], "the replica went on"
    with Environment.open_readonly(tmp_path) as environment:
        ledger = Ledger(environment).as_of_now()
        for index, revision, digest in found:
            assert ledger.rows_before(index + 1, index + 1) == [(digest, revision)]
