"""The scratch directory of an item: where a program copies to, and how what lies in it is looked at."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Final

from cluster.agent.files import join, remove_tree
from cluster.agent.transfer.copying.transfer_state import TransferState
from cluster.agent.transfer.planning.record_paths import RecordPaths, enter, part_name
from cluster.agent.transfer.records.errors import TransferFailed
from cluster.agent.transfer.records.manifest import Record

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Scratch:
    """Scratch directory, while it is used; what is left in it goes when it is removed."""

    def __init__(self, transfer: TransferState, record: Record, paths: RecordPaths) -> None:
        """Make or find that of the record's item, which `record` is the first of. OSError."""
        number = record.item
        self._parent = os.dup(paths.part(record)[0])
        self._name = os.fsdecode(part_name(transfer.context.tag, b"%d:scratch" % number))
        self.shown = join(transfer.items[number].destination.path, (self._name,))
        self.is_old = False
        """Whether an earlier attempt left something in it, maybe."""
        try:
            try:
                os.mkdir(self._name, 0o700, dir_fd=self._parent)
            except FileExistsError:
                self.is_old = True
            self.descriptor = os.open(self._name, _DIRECTORY, dir_fd=self._parent)
        except BaseException:
            os.close(self._parent)
            raise

    def remove(self) -> None:
        """Remove it with everything in it. RemovalFailed."""
        remove_tree(self._parent, self._name, shown=self.shown)

    def close(self) -> None:
        """Close it."""
        os.close(self.descriptor)
        os.close(self._parent)

    @contextlib.contextmanager
    def holding(self, path: bytes) -> Iterator[tuple[int, bytes]]:
        """Give the open directory in which a file of the program lies, and its name there; never through a link.

        TransferFailed if there is no such directory.
        """
        *above, name = path.split(b"/")
        current, shown = os.dup(self.descriptor), self.shown
        try:
            for part in above:
                shown = join(shown, (os.fsdecode(part),))
                following = enter(current, part, shown, None)
                os.close(current)
                current = following
            yield current, name
        finally:
            os.close(current)

    def discard_unlike(self, path: bytes, size_bytes: int, mtime_ns: int) -> None:
        """Remove a file unless it has this size and this time. OSError, RemovalFailed."""
        with contextlib.suppress(FileNotFoundError, TransferFailed), self.holding(path) as (directory, name):
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if (status.st_size, status.st_mtime_ns) == (size_bytes, mtime_ns):
                return
        self.discard(path)

    def discard(self, path: bytes) -> None:
        """Remove a file of the program, or what it made in its place. OSError, RemovalFailed."""
        with contextlib.suppress(FileNotFoundError, TransferFailed), self.holding(path) as (directory, name):
            try:
                os.unlink(name, dir_fd=directory)
            except IsADirectoryError:
                remove_tree(directory, os.fsdecode(name), shown=self.shown)
