"""Whether a destination still is what the receipts say: for bits that flip at rest, long after the transfer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from cluster.agent.files import join
from cluster.agent.transfer.copying.file_copy import open_source
from cluster.agent.transfer.planning.context import nothing
from cluster.agent.transfer.planning.record_paths import RecordPaths
from cluster.agent.transfer.records.digests import combine, digest_on_disk
from cluster.agent.transfer.records.errors import TransferFailed, os_message
from cluster.agent.transfer.records.manifest import FILE, Record
from cluster.agent.transfer.records.options import Algorithm, Item
from cluster.agent.transfer.records.receipts import Line, read_lines


class Difference(NamedTuple):
    """File that is not what was moved there."""

    path: str
    """The destination, as messages name it."""
    why: str


def recheck(
    receipts: int, items: Sequence[Item], algorithm: Algorithm, advanced: Callable[[int, int], None] = nothing
) -> Iterator[Difference]:
    """Yield the files of an open file of receipts that are not at the items' destinations as they were put there.

    Read from storage, not from memory. Sizes alone are compared where a receipt has no digest. `advanced` is called
    with the files and bytes that were checked since the last time. ValueError if the receipts are damaged, OSError.
    """
    with RecordPaths([item._replace(source=item.destination) for item in items], "") as paths:
        for number, line in enumerate(read_lines(receipts)):
            if line.kind == "file":
                if line.item >= len(items):
                    raise ValueError(f"the receipts are damaged: they name item {line.item + 1} of {len(items)}")
                path = bytes.fromhex(line.path_hex) if line.path_hex else os.fsencode(line.path)
                record = Record(number, line.item, FILE, path, line.size, 0, 0, 0, 0, 0, 0, 1)
                shown = join(items[line.item].destination.path, (line.path,) if line.path else ())
                why = _difference(paths, record, line, shown, algorithm, advanced)
                advanced(1, 0)
                if why is not None:
                    yield Difference(shown, why)


def _difference(
    paths: RecordPaths,
    record: Record,
    line: Line,
    shown: str,
    algorithm: Algorithm,
    advanced: Callable[[int, int], None],
) -> str | None:
    try:
        # As a source: nothing is made on the way.
        descriptor, status = open_source(*paths.source(record), shown)
    except TransferFailed as error:
        return str(error)
    except OSError as error:
        return os_message(error)
    try:
        if status.st_size != line.size:
            return f"has {status.st_size} bytes instead of {line.size}"
        if not line.digest:
            return None
        found = _digest(descriptor, line, algorithm, advanced)
        return None if found.hex() == line.digest else f"has the {algorithm} {found.hex()} instead of {line.digest}"
    except OSError as error:
        return os_message(error)
    finally:
        os.close(descriptor)


def _digest(descriptor: int, line: Line, algorithm: Algorithm, advanced: Callable[[int, int], None]) -> bytes:
    if not line.chunk_bytes:
        found = digest_on_disk(descriptor, algorithm)
        advanced(0, line.size)
        return found

    def chunks() -> Iterator[bytes]:
        for offset in range(0, line.size, line.chunk_bytes):
            size_bytes = min(line.chunk_bytes, line.size - offset)
            yield digest_on_disk(descriptor, algorithm, offset, size_bytes)
            advanced(0, size_bytes)

    return combine(algorithm, line.chunk_bytes, chunks())
