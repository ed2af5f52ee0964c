"""Environment: one process, one identity, and no use after the first failure."""

import errno
import stat
import subprocess
import sys
from pathlib import Path

import lmdb
import pytest

from forebay.wal import Entry, Environment, Journal, RecoveryRefused, StorageFailed
from forebay.wal.directory import LOCK_FILE
from forebay.wal.ledger import Ledger
from forebay.wal.recovery import Condition
from tests.wal.support import CLUSTER, REPLICA, apply, entry, fill, open_env, opened

HOLDER = """
import sys
from pathlib import Path
from wal import Environment
env = Environment.open(Path(sys.argv[1]), cluster_id="cluster-1", replica="r1", map_size_bytes=1 << 24, create=True)
print("held", flush=True)
sys.stdin.read()
"""

FULL_DISK = """
import resource, sys
from pathlib import Path
from wal import Entry, Environment, Journal, StorageFailed
env = Environment.open(Path(sys.argv[1]), cluster_id="cluster-1", replica="r1", map_size_bytes=1 << 26, create=False)
journal = Journal(env)
size_bytes = (Path(sys.argv[1]) / "data.mdb").stat().st_size
resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))
journal.append([Entry(journal.last_index + 1, 1, bytes(300_000))])
sentences = []
for attempt in range(3):
    try:
        journal.sync()
    except StorageFailed as error:
        sentences.append(str(error))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert len(sentences) == 3 and len(set(sentences)) == 1, sentences
print(sentences[0])
"""


def test_second_process_is_rejected_by_name_and_may_read(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3, applied=2)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(RecoveryRefused, match=f"process {holder.pid} of replica r1") as refused:
            open_env(tmp_path)
        assert refused.value.condition is Condition.HELD_BY_ANOTHER_PROCESS
        with Environment.open_readonly(tmp_path) as env:
            assert env.identity == (CLUSTER, REPLICA)
            assert Ledger(env).verify().entries == 2
    finally:
        holder.communicate("")
    open_env(tmp_path).close()


@pytest.mark.parametrize("names", [(LOCK_FILE,), (LOCK_FILE, "lock.mdb")], ids=" and ".join)
def test_second_process_is_rejected_even_if_the_lock_files_were_removed(tmp_path: Path, names: tuple[str, ...]) -> None:
    """Its first checkpoint would begin a new generation of the sync log and void the first process's later records."""
    with opened(tmp_path) as journal:
        fill(journal, 3)
        for name in names:
            (tmp_path / name).unlink()
        second = subprocess.run([sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True, text=True, input="")
        assert second.returncode != 0 and "held\n" not in second.stdout
        assert "held by another process" in second.stderr and f"{LOCK_FILE} was removed" in second.stderr
        journal.set_term(2, "r2")
        journal.append([entry(4, term=2)])
        journal.sync()
    with opened(tmp_path) as journal:
        assert (journal.last_index, journal.term, journal.voted_for) == (4, 2, "r2")


def test_second_opening_in_the_same_process_is_rejected(tmp_path: Path) -> None:
    with open_env(tmp_path), pytest.raises(RecoveryRefused) as refused:
        open_env(tmp_path)
    assert refused.value.condition is Condition.HELD_BY_ANOTHER_PROCESS


def test_reader_in_another_process_follows_the_growing_file(tmp_path: Path) -> None:
    reader = """
import sys
from pathlib import Path
from wal import Environment
from forebay.wal.directory import LOCK_FILE
from forebay.wal.ledger import Ledger
with Environment.open_readonly(Path(sys.argv[1])) as env:
    ledger = Ledger(env)
    for line in sys.stdin:
        print(ledger.verify().last_index, flush=True)
"""
    with opened(tmp_path) as journal:
        fill(journal, 2, applied=2)
        process = subprocess.Popen(
            [sys.executable, "-c", reader, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None and process.stdout is not None
        for last in (2, 200):
            journal.append([entry(index, 1, 50_000) for index in range(journal.last_index + 1, last + 1)])
            apply(journal, last)
            journal.sync()
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == f"{last}\n"
        process.communicate("")


def test_files_are_private_to_the_account(tmp_path: Path) -> None:
    directory = tmp_path / "r1" / "wal"
    open_env(directory).close()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("data.mdb", "lock.mdb", "replica.lock", "sync.log"):
        assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600


def test_symbolic_link_instead_of_lock_or_data_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    for name in ("replica.lock", "data.mdb"):
        directory = tmp_path / f"wal-{name}"
        directory.mkdir()
        (directory / name).symlink_to(victim)
        with pytest.raises(RecoveryRefused):
            open_env(directory)
        assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize(("cluster", "replica"), [("", "r1"), ("c", ""), ("c" * 256, "r1"), ("c", "ä" * 128)])
def test_invalid_names_are_rejected_before_files_are_created(tmp_path: Path, cluster: str, replica: str) -> None:
    with pytest.raises(ValueError, match="must have 1 to 255"):
        Environment.open(tmp_path / "new", cluster_id=cluster, replica=replica, create=True)
    assert not (tmp_path / "new").exists()


def test_full_map_stops_the_replica_and_a_larger_map_lets_it_start(tmp_path: Path) -> None:
    with open_env(tmp_path, map_size_bytes=1 << 18) as env:
        journal = Journal(env)
        fill(journal, 3)
        journal.append([Entry(4, 1, bytes(200_000))])
        journal.sync()
        journal.append([Entry(5, 1, bytes(500_000))])
        for _ in range(2):
            with pytest.raises(StorageFailed, match=r"maximum of 262144 bytes. Set a larger map_size in \[storage\]"):
                journal.flush_hints()
    with open_env(tmp_path) as env:
        journal = Journal(env)
        assert journal.last_index == 4, "synced entries are in the log and fit into a larger map"
        journal.append([Entry(5, 1, bytes(500_000))])
        journal.flush_hints()


def test_too_small_map_at_creation_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StorageFailed, match="Set a larger map_size"):
        open_env(tmp_path, map_size_bytes=4096 * 4)


def test_write_rejected_by_the_file_system_stops_the_replica_permanently(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3)
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "could not be written durably" in done.stdout and "start the replica again" in done.stdout
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 3


@pytest.mark.parametrize(
    "error", [lmdb.DiskError("fdatasync: Input/output error"), OSError(errno.EIO, "Input/output error")]
)
def test_sync_error_stops_the_environment_permanently(tmp_path: Path, error: Exception) -> None:
    with open_env(tmp_path) as env:

        def fail(transaction: "lmdb.Transaction[bytes]") -> None:
            raise error

        env.commit = fail
        with pytest.raises(StorageFailed, match="Input/output error"), env.write():
            pass
        env.commit = lambda transaction: transaction.commit()
        with pytest.raises(StorageFailed, match="Input/output error"), env.write():
            raise AssertionError("reached")


def test_interrupted_write_stops_the_environment(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        with pytest.raises(KeyboardInterrupt), env.write():
            raise KeyboardInterrupt
        with pytest.raises(StorageFailed, match="interrupted"), env.read():
            pass


def test_checkpoint_calls_fdatasync_and_an_idle_journal_makes_none(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        assert env._environment is not None
        flags = env._environment.flags()
        assert flags["sync"] and flags["metasync"] and flags["lock"]
        assert not flags["writemap"] and not flags["map_async"]
        assert env._environment.lib_version()[0] == 0
        journal = Journal(env)
        fill(journal, 2)
        journal.flush_hints()
        before = env._environment.info()["last_txnid"], (tmp_path / "sync.log").stat().st_mtime_ns
        for _ in range(5):
            journal.sync()
            journal.flush_hints()
        assert (env._environment.info()["last_txnid"], (tmp_path / "sync.log").stat().st_mtime_ns) == before


def test_child_programs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    env = open_env(tmp_path)
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    try:
        env.close()
        open_env(tmp_path).close()
    finally:
        child.communicate(b"")
