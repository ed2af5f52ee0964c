"""Helpers that create and damage the sync log of a replica."""

import shutil
from collections.abc import Callable
from pathlib import Path

from forebay.wal import Environment, records, sectors
from forebay.wal.environment import DATA_FILE
from forebay.wal.failures import LOG_FILE
from forebay.wal.records import STATE, LogMark, StorageIdentity
from forebay.wal.replay import Sync, pack
from forebay.wal.sectors import BLOCK_BYTES, SECTOR_BYTES, TAG_BYTES
from tests.wal.support import CLUSTER, REPLICA, apply, edit, entry, fill, opened

IDENTITY = records.pack_identity(StorageIdentity(CLUSTER, REPLICA))


def made_with_log(directory: Path) -> None:
    """Create nine entries in LMDB (five applied, base 2) and three log records up to entry 12 (eight applied)."""
    with opened(directory) as journal:
        fill(journal, 6, applied=5)
        journal.compact_to(2)
        fill(journal, 9, term=2)
        journal.flush_hints()
        fill(journal, 10, term=2)
        apply(journal, 7)
        journal.set_term(3, "r2")
        fill(journal, 11, term=3)
        fill(journal, 12, applied=8, term=3)
        assert not journal._sync_log.is_empty


def log_mark(directory: Path) -> LogMark:
    found: list[LogMark] = []
    edit(
        directory,
        lambda transaction, tables: found.append(
            records.unpack_log(transaction.get(records.LOG_KEY, db=tables[STATE]))  # type: ignore[arg-type]
        ),
    )
    return found[0]


def content_of(directory: Path) -> bytes:
    return (directory / LOG_FILE).read_bytes()


def rewrite(directory: Path, content: bytes) -> None:
    (directory / LOG_FILE).write_bytes(content)


def tag_of(directory: Path, sequence: int) -> bytes:
    return sectors.Tags(IDENTITY, log_mark(directory).generation).of(sequence)


def offset_of(directory: Path, sequence: int) -> int:
    """Return the offset of the record with this number: the first position of its tag."""
    tag, content = tag_of(directory, sequence), content_of(directory)
    return next(at for at in range(0, len(content), BLOCK_BYTES) if content[at : at + TAG_BYTES] == tag)


def log_edited(change: Callable[[bytearray, int], object], *, sequence: int = 3) -> Callable[[Path], None]:
    """Return a damage: `change` receives the file's bytes and the offset of the record with this number."""

    def damage(directory: Path) -> None:
        made_with_log(directory)
        content = bytearray(content_of(directory))
        change(content, offset_of(directory, sequence))
        rewrite(directory, bytes(content))

    return damage


def bit_flipped(bit: int, *, sequence: int = 3) -> Callable[[Path], None]:
    """Return a damage: flip one bit, counted from the beginning of a record."""

    def flip(content: bytearray, at: int) -> None:
        content[at + bit // 8] ^= 1 << bit % 8

    return log_edited(flip, sequence=sequence)


def sector_lost(number: int, *, sequence: int = 3, old: bytes = bytes(SECTOR_BYTES)) -> Callable[[Path], None]:
    """Return a damage: a sector of a record holds old content."""

    def lose(content: bytearray, at: int) -> None:
        content[at + number * SECTOR_BYTES : at + (number + 1) * SECTOR_BYTES] = old

    return log_edited(lose, sequence=sequence)


def forged(sync: Sync | bytes) -> Callable[[Path], None]:
    """Return a damage: add a fourth record with valid checksums."""

    def damage(directory: Path) -> None:
        made_with_log(directory)
        generation = log_mark(directory).generation
        body = sync if isinstance(sync, bytes) else pack(sync)
        content = bytearray(content_of(directory))
        at = offset_of(directory, 3) + BLOCK_BYTES
        laid_out = sectors.lay_out(tag_of(directory, 4), generation, 4, body)
        content[at : at + len(laid_out)] = laid_out
        rewrite(directory, bytes(content))

    return damage


def replaced(change: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a damage: replace the log file by something else."""

    def damage(directory: Path) -> None:
        made_with_log(directory)
        path = directory / LOG_FILE
        path.rename(directory / "away")
        change(path)

    return damage


def foreign_log(cluster: str, replica: str) -> Callable[[Path], None]:
    def damage(directory: Path) -> None:
        made_with_log(directory)
        other = directory.with_name("other")
        Environment.open(other, cluster_id=cluster, replica=replica, map_size_bytes=1 << 24, create=True).close()
        shutil.copy(other / LOG_FILE, directory / LOG_FILE)

    return damage


def older_data(directory: Path) -> None:
    """Replace the data file by an older copy, while the log has newer records."""
    made_with_log(directory)
    before = (directory / DATA_FILE).read_bytes()
    with opened(directory) as journal:
        fill(journal, 13, term=3)
        journal.flush_hints()
        fill(journal, 14, term=3)
    (directory / DATA_FILE).write_bytes(before)


def log_cannot_be_made(directory: Path) -> None:
    (directory / LOG_FILE).mkdir(parents=True)


def good_sync(**changed: object) -> Sync:
    """Return a valid fourth record after `made_with_log`, with the given changes."""
    with_digest = bytes.fromhex(DIGEST_OF_8)
    sync = Sync(12, 13, [entry(13, 3)], None, 8, 8, with_digest, [])
    return sync._replace(**changed)  # type: ignore[arg-type]


def _digest_of(last: int) -> str:
    digest = records.GENESIS
    for index in range(1, last + 1):
        digest = records.chain_digest(digest, entry(index, 1 if index <= 6 else 2))
    return digest.hex()


DIGEST_OF_8 = _digest_of(8)


def auditor(env: Environment) -> Environment:
    """Return the environment that another process would open (LMDB opens a file only once in a process)."""
    assert env._environment is not None
    reader = Environment(env.directory, env._environment, env._tables, env.identity, env.log)
    reader.readonly = True
    return reader
