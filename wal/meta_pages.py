"""Whether the two meta pages of an LMDB file are of two successive transactions, and the file is as long as they say.

LMDB writes its meta pages in turn and believes the one with the larger transaction number; nothing else guards them.
One flipped bit there makes it go back to an older state without a word, so this is checked before LMDB opens the file.
A flip that makes the newer number smaller by exactly two, on a file that did not grow, still passes: LMDB's limit.
"""

import os
import struct
from pathlib import Path
from typing import Final, NamedTuple

from wal.failures import Condition, RecoveryRefused

# struct MDB_page header (16 bytes), then struct MDB_meta of LMDB 0.9 on a 64-bit machine, in its own byte order:
# magic, version, address, map size, two MDB_db of 48 bytes, last page number, transaction number.
_META: Final = struct.Struct("=16x II QQ 48s48s QQ")
_DATABASE: Final = struct.Struct("=I HH QQQQQ")
_MAGIC: Final = 0xBEEFC0DE
_VERSION: Final = 1
_PAGE_SIZES_BYTES: Final = frozenset(1 << power for power in range(9, 17))


class _Meta(NamedTuple):
    page_size_bytes: int
    last_page: int
    transaction: int


def check(directory: int, path: Path) -> None:
    """Check the meta pages of the data file in the directory with this descriptor; `path` is for the message only.

    A file shorter than its last page is made longer with zeros, which LMDB reports as a broken page where it would
    otherwise be killed by SIGBUS. Raises RecoveryRefused; OSError if the file cannot be read.
    """
    file = os.open(path.name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        first = _read(file, 0)
        if first is None:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{path}, meta page 0")
        second = _read(file, first.page_size_bytes)
        if second is None:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{path}, meta page 1")
        oldest, newest = sorted((first, second), key=lambda meta: meta.transaction)
        fresh = first.transaction == second.transaction == 0
        successive = (
            abs(first.transaction - second.transaction) == 1
            and first.transaction % 2 == 0
            and second.transaction % 2 == 1
            and oldest.last_page <= newest.last_page
        )
        if first.page_size_bytes != second.page_size_bytes or not (fresh or successive):
            raise RecoveryRefused(
                Condition.META_PAGES_DISAGREE,
                f"{path} (transactions {first.transaction} and {second.transaction}, "
                f"pages of {first.page_size_bytes} and {second.page_size_bytes} bytes)",
            )
        size_bytes = (newest.last_page + 1) * newest.page_size_bytes
        if newest.last_page >= 1 << 48:
            raise RecoveryRefused(Condition.DATA_FILE_UNREADABLE, f"{path} (its last page would be {newest.last_page})")
        if os.fstat(file).st_size < size_bytes:
            os.ftruncate(file, size_bytes)
    finally:
        os.close(file)


def may_hold_a_transaction(path: Path) -> bool:
    """Whether a data file holds a transaction, or cannot be read, which does not say that it holds none."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    try:
        if os.fstat(file).st_size == 0:
            return False
        first = _read(file, 0)
        second = None if first is None else _read(file, first.page_size_bytes)
        return first is None or second is None or max(first.transaction, second.transaction) > 0
    except OSError:
        return True
    finally:
        os.close(file)


def _read(file: int, offset: int) -> _Meta | None:
    head = os.pread(file, _META.size, offset)
    if len(head) < _META.size:
        return None
    magic, version, _address, _map_size, free, _main, last_page, transaction = _META.unpack(head)
    page_size_bytes = _DATABASE.unpack(free)[0]  # LMDB keeps the page size in the free database's unused field
    if magic != _MAGIC or version != _VERSION or page_size_bytes not in _PAGE_SIZES_BYTES:
        return None
    return _Meta(page_size_bytes, last_page, transaction)
