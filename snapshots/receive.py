"""A snapshot that comes from a peer in chunks: not believed, and without a name, before all of it was verified.

Lifecycle: `write` until all is there; `verify`, the slow part, which may run in another thread; `finalize`, which gives
the file its name. `abort` throws it away at any time, `suspend` leaves it for the next process to go on with.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from snapshots.finalize import (
    SNAPSHOT_BYTES_MAX,
    Disk,
    SnapshotAbandoned,
    SnapshotFailed,
    SnapshotName,
    create_temporary,
    failure,
    open_directory,
    reopen_temporary,
)
from snapshots.image import Image
from snapshots.restore import SnapshotRefused, load_open

CHUNK_BYTES_MAX = 8 * 1024 * 1024
"""One chunk, bytes: more than any frame of the peers' transport carries."""

RECEIVING_SUFFIX = ".receiving"


def receiving_name(name: SnapshotName) -> str:
    """Return the name of the file that a snapshot is received into."""
    return f".{name}{RECEIVING_SUFFIX}"


class Receiver:
    """Takes the chunks of one file. It holds a temporary file, so it must end in `finalize`, `abort` or `suspend`."""

    def __init__(
        self,
        directory: Path,
        name: SnapshotName,
        *,
        accept: Callable[[Image], str | None],
        finished: Callable[[SnapshotName], None],
        disk: Disk,
        breathe: Callable[[], None] = lambda: None,
        resume_bytes: int = 0,
    ) -> None:
        """Open the temporary file; raises SnapshotFailed.

        `accept` may refuse a verified image by a sentence; `breathe` is called between two steps of verifying and may
        raise SnapshotAbandoned. `resume_bytes`: how much of a file that an earlier process left is sound and kept.
        """
        self._name = name
        self._path = directory / str(name)
        self._temporary = receiving_name(name)
        self._accept = accept
        self._finished = finished
        self._disk = disk
        self._breathe = breathe
        self._image: Image | None = None
        self._received_bytes = 0
        self._lock = threading.Lock()
        self._verifying = False
        self._over = False
        self._folder = open_directory(directory)
        try:
            self._file = self._reopen(resume_bytes) if resume_bytes else -1
            if self._file < 0:
                self._file = create_temporary(disk, self._folder, self._temporary)
        except OSError as why:
            os.close(self._folder)
            raise failure(self._path, why) from why

    @property
    def next_offset(self) -> int:
        """Where the next chunk must start, bytes; everything before it was received."""
        return self._received_bytes

    @property
    def verifying(self) -> bool:
        """Whether `verify` runs now, in whatever thread."""
        return self._verifying

    @property
    def image(self) -> Image:
        """The verified image, so that nobody has to read the file again; only after `verify`."""
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
        if self._verifying or self._image is not None:
            raise SnapshotRefused(self._path, "it is complete, and takes no more")
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

    def verify(self) -> None:
        """Read and check the whole and make its content durable: seconds for a large one, and nothing has its name yet.

        Raises SnapshotRefused if it is not a sound snapshot of the announced index and term, and SnapshotFailed if the
        disk fails; nothing is left of it then, and the other snapshots are as they were. SnapshotAbandoned if the
        receiver was ended meanwhile, by another thread or by `breathe`; in the second case the file stays, to go on.
        """
        with self._lock:
            self._must_be_open()
            self._verifying = True
        try:
            with self._aborted_on_failure():
                os.lseek(self._file, 0, os.SEEK_SET)
                image = load_open(os.dup(self._file), self._path, breathe=self._breathe_unless_over)
                sentence = self._accept(image)
                if sentence is not None:
                    raise SnapshotRefused(self._path, sentence)
                self._breathe_unless_over()
                self._disk.sync(self._file)
                self._image = image
        finally:
            with self._lock:
                self._verifying = False
                if self._over:
                    self._close()

    def finalize(self) -> Path:
        """Give the verified file its name, durably, and return its path.

        Raises SnapshotRefused before it is verified, SnapshotFailed if the disk fails.
        """
        self._must_be_open()
        _ = self.image
        with self._aborted_on_failure():
            self._disk.rename(self._folder, self._temporary, str(self._name))
            self._disk.sync_directory(self._folder)
        self.suspend()
        self._finished(self._name)
        return self._path

    def abort(self) -> None:
        """Remove what was received; does nothing when the receiver is over."""
        self._end(remove=True)

    def suspend(self) -> None:
        """Let go of the file and leave it where it is; does nothing when the receiver is over."""
        self._end(remove=False)

    @contextmanager
    def _aborted_on_failure(self) -> Iterator[None]:
        """Throw away what was received if anything fails, unless it is only given up for now."""
        try:
            yield
        except SnapshotAbandoned:
            self.suspend()
            raise
        except BaseException as why:
            self.abort()
            if isinstance(why, OSError):
                raise failure(self._path, why) from why
            raise

    def _reopen(self, resume_bytes: int) -> int:
        """Return the file that an earlier process left, to go on with; -1 if it is not there any more."""
        try:
            file = reopen_temporary(self._disk, self._folder, self._temporary)
        except (FileNotFoundError, BlockingIOError):
            return -1
        try:
            is_whole = os.fstat(file).st_size >= resume_bytes
            if is_whole:
                self._disk.truncate(file, resume_bytes)
        except BaseException:
            os.close(file)
            raise
        if not is_whole:
            os.close(file)
            return -1
        self._received_bytes = resume_bytes
        return file

    def _breathe_unless_over(self) -> None:
        if self._over:
            raise SnapshotAbandoned(f"{self._path}: it is not wanted any more")
        self._breathe()

    def _end(self, *, remove: bool) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
            if remove:
                with suppress(OSError):
                    self._disk.remove(self._folder, self._temporary)
            if not self._verifying:
                self._close()

    def _close(self) -> None:
        os.close(self._file)
        os.close(self._folder)
        self._file = self._folder = -1

    def _must_be_open(self) -> None:
        if self._over:
            raise SnapshotFailed(f"{self._path}: receiving it is over; begin again")
