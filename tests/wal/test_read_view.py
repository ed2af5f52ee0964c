"""A read-only reader combines LMDB with the sync log, for a dead replica and beside a live one."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from forebay.wal import Environment, Journal, RecoveryRefused, sectors
from forebay.wal.environment import DATA_FILE
from forebay.wal.failures import LOG_FILE
from forebay.wal.ledger import SCANS_MAX, Ledger
from forebay.wal.recovery import Condition
from forebay.wal.sync_log import SyncLog
from tests.wal.logs import auditor, bit_flipped, content_of, made_with_log, offset_of, rewrite, sector_lost
from tests.wal.support import apply, entry, fill, open_env, opened


def test_ledger_of_a_killed_replica_includes_its_log_and_reading_changes_nothing(tmp_path: Path) -> None:
    made_with_log(tmp_path)
    before = (tmp_path / DATA_FILE).read_bytes(), content_of(tmp_path)
    with Environment.open_readonly(tmp_path) as env:
        ledger = Ledger(env)
        assert (ledger.first_index, ledger.applied_index, ledger.applied_revision) == (1, 8, 16)
        assert ledger.verify().entries == 8
        held = list(ledger.read(1, limit=99))
        assert [(one.index, one.data) for one in held] == [
            (index, entry(index, 1 if index <= 6 else 2).data) for index in range(1, 9)
        ]
        assert ledger.applied_digest == held[-1].digest
        assert [ledger.index_of_revision(revision) for revision in range(1, 17)] == [
            index for index in range(1, 9) for _ in range(2)
        ]
        with pytest.raises(LookupError, match="holds 1 to 16"):
            ledger.index_of_revision(17)
        assert [one.index for one in ledger.read(8, limit=1)] == [8]
    assert ((tmp_path / DATA_FILE).read_bytes(), content_of(tmp_path)) == before
    with opened(tmp_path, create=False) as journal:
        assert journal.applied_index == 8, "the replica itself finds the same"


def test_lmdb_entry_replaced_by_the_log_is_not_shown(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 5, applied=3)
        journal.flush_hints()
        journal.set_term(2, None)
        journal.truncate_from(4)
        journal.append([entry(4, 2), entry(5, 2)])
        apply(journal, 5)
        journal.sync()
    with Environment.open_readonly(tmp_path) as env:
        assert [(one.index, one.term) for one in Ledger(env).read(1, limit=9)] == [
            (1, 1), (2, 1), (3, 1), (4, 2), (5, 2),
        ]  # fmt: skip
        assert Ledger(env).verify().entries == 5


def test_torn_sync_is_not_read(tmp_path: Path) -> None:
    sector_lost(2)(tmp_path)
    with Environment.open_readonly(tmp_path) as env:
        assert Ledger(env).verify().entries == 7


def test_damaged_log_is_rejected_for_reading_with_its_condition(tmp_path: Path) -> None:
    bit_flipped(300, sequence=2)(tmp_path)
    with Environment.open_readonly(tmp_path) as env, pytest.raises(RecoveryRefused) as refused:
        Ledger(env).verify()
    assert refused.value.condition is Condition.SYNC_LOG_DAMAGED
    (tmp_path / LOG_FILE).unlink()
    with pytest.raises(RecoveryRefused) as refused:
        Environment.open_readonly(tmp_path)
    assert refused.value.condition is Condition.SYNC_LOG_MISSING


def test_half_written_record_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may see half of a sector; a moment later the writer has written the rest."""
    made_with_log(tmp_path)
    whole = content_of(tmp_path)
    half = bytearray(whole)
    at = offset_of(tmp_path, 3)
    half[at + 60 : at + 512] = bytes(452)
    rewrite(tmp_path, bytes(half))
    original, reads = SyncLog.read, list[int]()

    def read(self: SyncLog, generation: int) -> list[bytes]:
        reads.append(generation)
        if len(reads) == 3:
            rewrite(tmp_path, whole)
        return original(self, generation)

    monkeypatch.setattr(SyncLog, "read", read)
    with Environment.open_readonly(tmp_path) as env:
        assert Ledger(env).applied_index == 8
    assert len(reads) == 3


def test_checkpoint_between_two_reads_is_detected_by_the_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMDB was read before the checkpoint, the log after it: together they would give a ledger that is too short."""
    with open_env(tmp_path) as writer:
        journal = Journal(writer)
        fill(journal, 5, applied=5)
        original, reads = SyncLog.read, list[int]()

        def read(self: SyncLog, generation: int) -> list[bytes]:
            if not reads:
                journal.flush_hints()
                fill(journal, 7, applied=7)
                reads.append(generation)
                assert sectors.BLOCK_BYTES < len(content_of(tmp_path))
                raise RecoveryRefused(Condition.SYNC_LOG_AHEAD, "as the reader finds it")
            reads.append(generation)
            return original(self, generation)

        reader = auditor(writer)
        monkeypatch.setattr(SyncLog, "read", read)
        assert Ledger(reader).applied_index == 7
        assert len(reads) == 2 and reads[1] == reads[0] + 1


def test_log_that_changes_in_every_scan_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_env(tmp_path) as writer:
        journal = Journal(writer)
        fill(journal, 2, applied=2)
        original, looks = SyncLog.read, list[int]()

        def read(self: SyncLog, generation: int) -> list[bytes]:
            bodies = original(self, generation)
            looks.append(generation)
            fill(journal, journal.last_index + 1)
            journal.flush_hints()
            return bodies

        reader = auditor(writer)
        monkeypatch.setattr(SyncLog, "read", read)
        with pytest.raises(RecoveryRefused) as refused:
            Ledger(reader).verify()
        assert refused.value.condition is Condition.SYNC_LOG_RESTLESS
        assert len(looks) == SCANS_MAX


@pytest.mark.parametrize("accidents", [1, SCANS_MAX // 2, SCANS_MAX])
def test_rejection_during_a_checkpoint_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accidents: int
) -> None:
    """LMDB is read, then begins a generation, then the log is read, which is ahead of the state read from LMDB."""
    with open_env(tmp_path) as writer:
        journal = Journal(writer)
        fill(journal, 2, applied=2)
        original, looks = SyncLog.read, list[Condition | None]()

        def read(self: SyncLog, generation: int) -> list[bytes]:
            if len(looks) < accidents:
                journal.flush_hints()
                fill(journal, journal.last_index + 1)
            looks.append(None)
            try:
                return original(self, generation)
            except RecoveryRefused as error:
                looks[-1] = error.condition
                raise

        reader = auditor(writer)
        monkeypatch.setattr(SyncLog, "read", read)
        if accidents < SCANS_MAX:
            assert Ledger(reader).verify().entries == 2
        else:
            with pytest.raises(RecoveryRefused, match="Read again when the replica is less busy") as refused:
                Ledger(reader).verify()
            assert refused.value.condition is Condition.SYNC_LOG_RESTLESS
        expected = [Condition.SYNC_LOG_AHEAD] * accidents + [None] * (accidents < SCANS_MAX)
        assert looks == expected, "the log must be ahead of the generation that the scan began with"


READER = """
import sys
from pathlib import Path
from wal import Environment
from forebay.wal.ledger import Ledger
with Environment.open_readonly(Path(sys.argv[1])) as env:
    ledger, last = Ledger(env), 0
    print("ready", flush=True)
    for line in sys.stdin:
        at_least = int(line)
        verified = ledger.verify()
        assert verified.last_index >= max(at_least, last), (verified, at_least, last)
        assert verified.entries == verified.last_index
        last = verified.last_index
        print(last, flush=True)
"""


def test_auditor_beside_a_busy_replica_always_sees_synced_entries(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 1, applied=1)
        reader = subprocess.Popen(
            [sys.executable, "-c", READER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert reader.stdin is not None and reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        answers: list[str] = []
        synced = 1

        def ask() -> None:
            for _ in range(25):
                reader.stdin.write(f"{synced}\n")  # type: ignore[union-attr]
                reader.stdin.flush()  # type: ignore[union-attr]
                answers.append(reader.stdout.readline())  # type: ignore[union-attr]
                if not answers[-1]:
                    return

        asker = threading.Thread(target=ask)
        asker.start()
        while asker.is_alive():
            journal.append([entry(journal.last_index + 1, 1, 700)])
            apply(journal, journal.last_index)
            journal.sync()
            synced = journal.last_index
            if synced % 40 == 0:
                journal.flush_hints()
        asker.join()
        reader.communicate("")
        assert len(answers) == 25 and all(answers), "the reader found less than was promised, or damage"
