"""Real crashes and real damage: a writer that is killed at any moment, and flipped bits in the data file."""

import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay.wal import Environment, Journal, RecoveryRefused, StorageFailed, records
from forebay.wal.environment import DATA_FILE
from forebay.wal.journal import Entry
from forebay.wal.ledger import Ledger, LedgerBroken
from forebay.wal.recovery import Condition
from tests.wal.support import CLUSTER, REPLICA, apply, entry, fill, flip_value_in_file, open_env, opened

FLIPS = 160
"""Number of flipped bits, spread over the file. A manual run tried 6,000."""

WRITER = """
import sys
from pathlib import Path
from tests.wal.support import entry, open_env
from wal import Journal
env = open_env(Path(sys.argv[1]))
journal = Journal(env)
while True:
    term = journal.term + 1
    journal.set_term(term, f"r{term}")
    if journal.last_index > journal.commit_index + 2:
        journal.truncate_from(journal.last_index)
    first = journal.last_index + 1
    journal.append([entry(index, term, 3000) for index in range(first, first + 3)])
    journal.sync()
    print(term, journal.last_index, journal.applied_index, flush=True)
    journal.set_commit(max(journal.commit_index, first - 3))
    for index in range(journal.applied_index + 1, journal.commit_index + 1):
        journal.record_applied(journal.entry(index), index)
    if term % 5 == 0 and journal.applied_index > journal.base_index:
        journal.compact_to(journal.applied_index - 1)
"""


def test_writer_killed_at_any_moment_keeps_its_promises(tmp_path: Path) -> None:
    directory, applied = tmp_path / "wal", list[int]()
    for lines in (1, 2, 5, 9, 17, 33, 40, 64):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert writer.stdout is not None
        for _ in range(lines - 1):
            writer.stdout.readline()
        # From here to the signal, the writer may be anywhere in its next rounds.
        promised = writer.stdout.readline()
        os.kill(writer.pid, signal.SIGKILL)
        promised = ([promised, *writer.stdout.readlines()])[-1]
        writer.wait()
        term, last_index, applied_index = map(int, promised.split())
        with open_env(directory, create=False) as env:
            journal = Journal(env)
            assert journal.term in (term, term + 1) and journal.voted_for == f"r{journal.term}"
            assert journal.last_index >= last_index - (journal.term > term) and journal.applied_index >= applied_index
            held = journal.entries(journal.first_index, max_bytes=1 << 30, max_entries=1 << 20)
            assert held == [entry(one.index, one.term, 3000) for one in held]
            verified = Ledger(env).verify()
            assert verified.entries == journal.applied_index and verified.gaps == ()
            applied.append(verified.entries)
    assert sorted(applied) == applied and applied[-1] > 100


def _made(directory: Path) -> None:
    with opened(directory) as journal:
        fill(journal, 30, applied=20)
        fill(journal, 33, term=2)
        journal.flush_hints()


@pytest.mark.parametrize(
    ("index", "condition"), [(7, Condition.APPLIED_ENTRY_DAMAGED), (32, Condition.TAIL_ENTRY_DAMAGED)]
)
def test_flipped_bit_in_the_file_is_found_at_the_start(tmp_path: Path, index: int, condition: Condition) -> None:
    _made(tmp_path)
    damaged = entry(index, 2 if index > 30 else 1)
    key = records.index_key(index)
    flip_value_in_file(tmp_path, key, records.pack_entry(key, damaged)[4:])
    with pytest.raises(RecoveryRefused, match=f"index {index}") as refused, opened(tmp_path, create=False):
        pass
    assert refused.value.condition is condition


def test_flipped_bit_while_running_stops_the_replica_when_the_entry_is_read(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env, recent_max_bytes=100)
        fill(journal, 30, applied=20)
        journal.flush_hints()
        key = records.index_key(5)
        flip_value_in_file(tmp_path, key, records.pack_entry(key, entry(5))[4:])
        assert journal.entry(4) == entry(4)
        with pytest.raises(LedgerBroken, match="entry 5"):
            list(Ledger(env).read(1, limit=99))
        with pytest.raises(StorageFailed, match="table entries, index 5"):
            journal.entries(3, max_bytes=1 << 20, max_entries=9)
        with pytest.raises(StorageFailed, match="table entries, index 5"):
            journal.sync()


def _read_all(directory: Path) -> tuple[object, ...]:
    with Environment.open(directory, cluster_id=CLUSTER, replica=REPLICA, map_size_bytes=1 << 20, create=False) as env:
        journal = Journal(env)
        entries: list[Entry] = journal.entries(journal.first_index, max_bytes=1 << 30, max_entries=999)
        verified = Ledger(env).verify()
        return journal.term, journal.voted_for, journal.last_index, entries, verified


@pytest.mark.campaign(3)
def test_no_flipped_bit_in_the_file_changes_the_data_read(tmp_path: Path) -> None:
    """Each flip, in a forked process, is rejected, kills the process by a signal, or has no effect."""
    with opened(tmp_path) as journal:
        journal.set_term(1, "r1")
        journal.append([entry(index, 1, 1500) for index in range(1, 61)])
        apply(journal, 50)
        journal.flush_hints()
    sound = (tmp_path / DATA_FILE).read_bytes()
    expected = _read_all(tmp_path)
    outcomes = {"rejected": 0, "killed": 0, "without effect": 0}
    for number in range(FLIPS):
        position = (number * 2_654_435_761) % len(sound)
        content = bytearray(sound)
        content[position] ^= 1 << (number % 8)
        (tmp_path / DATA_FILE).write_bytes(content)
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            try:
                os._exit(0 if _read_all(tmp_path) == expected else 1)
            except (StorageFailed, LedgerBroken):
                os._exit(2)
            except BaseException:
                os._exit(3)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, 2) or status < 0, f"bit {number % 8} of byte {position}: exit code {status}"
        outcomes["killed" if status < 0 else "rejected" if status else "without effect"] += 1
    assert outcomes["rejected"] > 40, outcomes
    (tmp_path / DATA_FILE).write_bytes(sound)
    assert _read_all(tmp_path) == expected
