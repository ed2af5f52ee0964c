"""A snapshot that comes from a peer in chunks: not believed, and without a name, before all of it was verified."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from snapshots.image import Image
from snapshots.restore import SnapshotRefused, load_open
from snapshots.seal import (
    SNAPSHOT_BYTES_MAX,
    Disk,
    SnapshotFailed,
    SnapshotName,
    create_temporary,
    failure,
    open_directory,
)

CHUNK_BYTES_MAX = 8 * 1024 * 1024
"""One chunk, bytes: more than any frame of the peers' transport carries."""

RECEIVING_SUFFIX = ".receiving"


class Receiver:
    """Takes the chunks of one file. It holds a temporary file, so it must end in `finish` or `abort`."""

    def __init__(
        self,
        directory: Path,
        name: SnapshotName,
        *,
        accept: Callable[[Image], str | None],
        finished: Callable[[SnapshotName], None],
        disk: Disk,
    ) -> None:
        """Open the temporary file; raises SnapshotFailed. `accept` may refuse a verified image by a sentence."""
        self._name = name
        self._path = directory / str(name)
        self._temporary = f".{name}{RECEIVING_SUFFIX}"
        self._accept = accept
        self._finished = finished
        self._disk = disk
        self._image: Image | None = None
        self._received_bytes = 0
        self._folder = open_directory(directory)
        self._file = -1
        try:
            self._file = create_temporary(disk, self._folder, self._temporary)
        except OSError as why:
            os.close(self._folder)
            raise failure(self._path, why) from why

    @property
    def next_offset(self) -> int:
        """Where the next chunk must start, bytes; everything before it was received."""
        return self._received_bytes

    @property
    def image(self) -> Image:
        """The verified image, so that nobody has to read the file again; only after `finish`."""
        if self._image is None:
            raise SnapshotRefused(self._path, "it has not been received as a whole")
        return self._image

    def write(self, offset: int, data: bytes) -> int:
        """Take a chunk that starts at `offset` bytes and return where the next must start.

        What was received before may come again (a resent chunk), if it is the same. Raises SnapshotRefused for a chunk
        that leaves a gap, says something else than before, or is too much; the receiver then is as it was and still
        takes the right one. Raises SnapshotFailed if the disk does not take it; the receiver then is over.
        """
        self._must_be_open()
        if len(data) > CHUNK_BYTES_MAX:
            raise SnapshotRefused(self._path, f"a chunk has {len(data)} bytes; at most {CHUNK_BYTES_MAX} are taken")
        if offset < 0 or offset > self._received_bytes:
            raise SnapshotRefused(
                self._path, f"a chunk starts at byte {offset}, but byte {self._received_bytes} must come next"
            )
        if offset + len(data) > SNAPSHOT_BYTES_MAX:
            raise SnapshotRefused(self._path, f"it has more than the {SNAPSHOT_BYTES_MAX} bytes that are read")
        known = min(self._received_bytes - offset, len(data))
        try:
            if known and os.pread(self._file, known, offset) != data[:known]:
                raise SnapshotRefused(
                    self._path, f"the chunk at byte {offset} is not what came there before: its sender must start again"
                )
            if known < len(data):
                self._disk.write(self._file, data[known:])
        except OSError as why:
            self.abort()
            raise failure(self._path, why) from why
        self._received_bytes = max(self._received_bytes, offset + len(data))
        return self._received_bytes

    def finish(self) -> Path:
        """Verify everything, give the file its name durably and return its path.

        Raises SnapshotRefused if it is not a sound snapshot of the announced index and term, and SnapshotFailed if the
        disk fails; nothing is left of it then, and the other snapshots are as they were.
        """
        self._must_be_open()
        try:
            os.lseek(self._file, 0, os.SEEK_SET)
            image = load_open(os.dup(self._file), self._path)
            sentence = self._accept(image)
            if sentence is not None:
                raise SnapshotRefused(self._path, sentence)
            self._disk.sync(self._file)
            self._disk.rename(self._folder, self._temporary, str(self._name))
            self._disk.sync_directory(self._folder)
        except OSError as why:
            self.abort()
            raise failure(self._path, why) from why
        except BaseException:
            self.abort()
            raise
        self._close()
        self._image = image
        self._finished(self._name)
        return self._path

    def abort(self) -> None:
        """Remove what was received; does nothing when the receiver is over."""
        if self._file < 0:
            return
        with suppress(OSError):
            self._disk.remove(self._folder, self._temporary)
        self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._folder)
        self._file = self._folder = -1

    def _must_be_open(self) -> None:
        if self._file < 0:
            raise SnapshotFailed(f"{self._path}: receiving it is over; begin again")
