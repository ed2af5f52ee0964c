"""Opened files are the ones that their names lead to; files that merely cannot be opened are not damaged."""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from forebay.wal import Environment, Journal, RecoveryRefused, StorageFailed
from forebay.wal import directory as directories
from forebay.wal.failures import DATA_FILE, LOG_FILE, READERS_FILE, REPLACE
from forebay.wal.recovery import Condition
from forebay.wal.sectors import BLOCK_BYTES
from tests.wal.support import entry, fill, open_env, opened

READER = """
import sys
from pathlib import Path
from wal import Environment
with Environment.open_readonly(Path(sys.argv[1])) as env, env.read() as transaction:
    print("reading", flush=True)
    sys.stdin.read()
"""

WITHOUT_DESCRIPTORS = """
import os, resource, sys
from pathlib import Path
from wal import Environment, RecoveryRefused
import forebay.wal.environment
original = forebay.wal.environment._open_lmdb
def limited(*given, **more):
    free = os.dup(0)
    os.close(free)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        return original(*given, **more)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
forebay.wal.environment._open_lmdb = limited
try:
    Environment.open(Path(sys.argv[1]), cluster_id="cluster-1", replica="r1", map_size_bytes=1 << 26, create=False)
except RecoveryRefused as error:
    print(error.condition.name, error)
"""


def reader(directory: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", READER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "reading\n"
    return process


def copied(path: Path) -> None:
    """Replace the file by a copy of itself, as a restored backup does: same content, another inode."""
    copy = path.with_name("copy")
    if path.is_dir():
        shutil.copytree(path, copy)
        path.rename(path.with_name("moved"))
    else:
        shutil.copy2(path, copy)
    copy.rename(path)


def removed(path: Path) -> None:
    if path.is_dir():
        path.rename(path.with_name("moved"))
    else:
        path.unlink()


@pytest.mark.parametrize("what", [removed, copied])
@pytest.mark.parametrize("name", [DATA_FILE, LOG_FILE, READERS_FILE, ""])
def test_replica_stops_at_the_next_checkpoint_if_its_files_are_replaced(
    tmp_path: Path, name: str, what: Callable[[Path], None]
) -> None:
    """A restart would not find later writes."""
    directory = tmp_path / "wal"
    with opened(directory) as journal:
        fill(journal, 3)
        journal.flush_hints()
        fill(journal, 4)
        what(directory / name)
        for _ in range(2):
            with pytest.raises(StorageFailed, match="removed or replaced while the replica ran") as stopped:
                journal.flush_hints()
            assert str(directory / name) in str(stopped.value)
        with pytest.raises(StorageFailed):
            journal.append([entry(5)])


def test_directory_replaced_during_opening_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise LMDB would open another file, by path, than the one that was locked and checked."""
    directory = tmp_path / "wal"
    with opened(directory) as journal:
        fill(journal, 3)
    original = directories.has_data

    def exchanged(descriptor: int) -> bool:
        copied(directory)
        return original(descriptor)

    monkeypatch.setattr(directories, "has_data", exchanged)
    with pytest.raises(StorageFailed, match="is not the file that this replica has open"):
        open_env(directory)


def test_used_log_is_never_created_again(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3)
    (tmp_path / DATA_FILE).unlink()
    log = (tmp_path / LOG_FILE).read_bytes()
    with pytest.raises(RecoveryRefused) as refused:
        open_env(tmp_path, create=True)
    assert refused.value.condition is Condition.DATA_FILE_MISSING
    assert (tmp_path / LOG_FILE).read_bytes() == log
    (tmp_path / LOG_FILE).write_bytes(log[:BLOCK_BYTES].ljust(len(log), b"\0"))
    (tmp_path / DATA_FILE).unlink(missing_ok=True)
    open_env(tmp_path, create=True).close()


@pytest.mark.parametrize(
    "number", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC]
)
@pytest.mark.parametrize("readonly", [False, True])
def test_error_of_the_system_on_opening_is_not_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, readonly: bool
) -> None:
    open_env(tmp_path).close()

    def fail(*given: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("forebay.wal.environment._open_lmdb", fail)
    with pytest.raises(RecoveryRefused, match="the data may be intact") as refused:
        Environment.open_readonly(tmp_path) if readonly else open_env(tmp_path, create=False)
    assert refused.value.condition is Condition.CANNOT_BE_OPENED
    assert os.strerror(number) in str(refused.value) and REPLACE not in str(refused.value)


def test_read_error_of_the_disk_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_env(tmp_path).close()

    def fail(*given: object, **more: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("forebay.wal.environment._open_lmdb", fail)
    with pytest.raises(RecoveryRefused) as refused:
        open_env(tmp_path, create=False)
    assert refused.value.condition is Condition.DATA_FILE_UNREADABLE


def test_lmdb_error_names_the_exceeded_limit(tmp_path: Path) -> None:
    """LMDB raises its own exceptions for system errors; this test provokes a real one."""
    open_env(tmp_path).close()
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_DESCRIPTORS, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert process.stdout.startswith("CANNOT_BE_OPENED"), process
    assert "Too many open files" in process.stdout


@pytest.mark.parametrize("content", [b"\xff" * 8192, b""])
def test_overwritten_reader_table_in_use_is_named_instead_of_the_data(tmp_path: Path, content: bytes) -> None:
    with opened(tmp_path) as journal:
        fill(journal, 3, applied=3)
    process = reader(tmp_path)
    try:
        with (tmp_path / READERS_FILE).open("r+b") as file:
            file.truncate(len(content))
            file.write(content)
        with pytest.raises(RecoveryRefused) as refused:
            open_env(tmp_path, create=False)
        assert refused.value.condition is Condition.TABLE_OF_READERS_UNUSABLE
        assert str(tmp_path / READERS_FILE) in str(refused.value)
    finally:
        process.kill()
        process.communicate()
    (tmp_path / READERS_FILE).unlink()
    with opened(tmp_path, create=False) as journal:
        assert journal.last_index == 3


def readers_of(env: Environment) -> int:
    assert env._environment is not None
    return len(env._environment.readers().splitlines()) - 1


def test_killed_reader_does_not_hold_pages_forever(tmp_path: Path) -> None:
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 3)
        process = reader(tmp_path)
        before = readers_of(env)
        process.kill()
        process.communicate()
        assert readers_of(env) == before
        fill(journal, 4)
        journal.flush_hints()
        assert readers_of(env) == before - 1, "a checkpoint removes dead readers"
        living, dead = reader(tmp_path), reader(tmp_path)
        dead.kill()
        dead.communicate()
        another = reader(tmp_path)
        assert readers_of(env) == before + 1, "opening removes dead readers, and the live one stays"
        for process in (living, another):
            process.communicate("")


def test_killed_readers_do_not_block_other_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.wal.environment.READERS_MAX", 3)
    with open_env(tmp_path) as env:
        journal = Journal(env)
        fill(journal, 3)
        journal.flush_hints()
        processes = []
        with env.read():
            # Each reader checks for dead readers when it opens, so all of them must die together.
            processes = [reader(tmp_path), reader(tmp_path)]
            for process in processes:
                process.kill()
                process.communicate()
            assert env._environment is not None
            with pytest.raises(lmdb.ReadersFullError):
                env._environment.begin()
            with env.read():
                pass
