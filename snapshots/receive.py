"""Reception of a snapshot from a peer, in chunks. The file has no final name until all of it was verified.

Lifecycle: `write` until complete; then `verify`, which is slow and may run in another thread; then `finalize`, which
renames the file. `abort` discards the received data at any time; `suspend` keeps it for the next process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from forebay.snapshots.finalize import (
    SNAPSHOT_BYTES_MAX,
    SnapshotAbandoned,
    SnapshotDisk,
    SnapshotFailed,
    SnapshotName,
    create_temporary,
    failure,
    open_directory,
    reopen_temporary,
)
from forebay.snapshots.image import Image
from forebay.snapshots.restore import SnapshotRefused, load_open

CHUNK_BYTES_MAX = 8 * 1024 * 1024
"""Maximum chunk: larger than any frame of the peers' transport."""

RECEIVING_SUFFIX = ".receiving"


def receiving_name(name: SnapshotName) -> str:
    """Return the temporary file name of a snapshot being received."""
    return f".{name}{RECEIVING_SUFFIX}"


class Receiver:
    """Receiver of one snapshot into a temporary file. Always end with `finalize`, `abort` or `suspend`."""

    def __init__(
        self,
        directory: Path,
        name: SnapshotName,
        *,
        accept: Callable[[Image], str | None],
        finished: Callable[[SnapshotName], None],
        disk: SnapshotDisk,
        breathe: Callable[[], None] = lambda: None,
        resume_bytes: int = 0,
    ) -> None:
        """Open the temporary file.

        `accept` may reject a verified image by returning the reason. `breathe` is called between steps of the
        verification, and may raise SnapshotAbandoned. `resume_bytes`: size of the valid part that an earlier process
        received.

        Raises:
            SnapshotFailed: The file cannot be opened.
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
        """Offset of the next chunk, bytes: the size received so far."""
        return self._received_bytes

    @property
    def verifying(self) -> bool:
        """Return whether `verify` is running, in any thread."""
        return self._verifying

    @property
    def image(self) -> Image:
        """Verified image; available after `verify`."""
        if self._image is None:
            raise SnapshotRefused(self._path, "the snapshot has not been received completely")
        return self._image

    def write(self, offset: int, data: bytes) -> int:
        """Write a chunk that starts at `offset` bytes; return the offset of the next.

        A chunk may be resent if it is identical.

        Raises:
            SnapshotRefused: The chunk leaves a gap, contradicts an earlier chunk, or exceeds the maximum size. The
            receiver is
                unchanged and accepts a correct chunk later.
            SnapshotFailed: The disk fails. The receiver has ended.
        """
        self._must_be_open()
        if self._verifying or self._image is not None:
            raise SnapshotRefused(self._path, "the snapshot is already complete")
        if len(data) > CHUNK_BYTES_MAX:
            raise SnapshotRefused(self._path, f"a chunk has {len(data)} bytes; at most {CHUNK_BYTES_MAX} are accepted")
        if offset < 0 or offset > self._received_bytes:
            raise SnapshotRefused(
                self._path, f"a chunk starts at byte {offset}, but byte {self._received_bytes} was expected next"
            )
        if offset + len(data) > SNAPSHOT_BYTES_MAX:
            raise SnapshotRefused(self._path, f"the snapshot exceeds the maximum of {SNAPSHOT_BYTES_MAX} bytes")
        known = min(self._received_bytes - offset, len(data))
        try:
            if known and os.pread(self._file, known, offset) != data[:known]:
                raise SnapshotRefused(
                    self._path,
                    f"the chunk at byte {offset} differs from the one received before: the sender must start again",
                )
            if known < len(data):
                self._disk.write(self._file, data[known:])
        except OSError as why:
            self.abort()
            raise failure(self._path, why) from why
        self._received_bytes = max(self._received_bytes, offset + len(data))
        return self._received_bytes

    def verify(self) -> None:
        """Check the whole file and make its content durable, without renaming it. A large file takes seconds.

        On failure the file is removed. Other snapshots never change.

        Raises:
            SnapshotRefused: The file is not a valid snapshot of the announced index and term.
            SnapshotFailed: The disk fails.
            SnapshotAbandoned: Another thread ended the receiver, or `breathe` raised it. The file stays, to be
                continued.
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
        """Rename the verified file to its final name, durable on return; return its path.

        Raises:
            SnapshotRefused: The file was not verified.
            SnapshotFailed: The disk fails.
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
        """Remove the received file; no effect once the receiver has ended."""
        self._end(remove=True)

    def suspend(self) -> None:
        """Close the file and leave it in place; no effect once the receiver has ended."""
        self._end(remove=False)

    @contextmanager
    def _aborted_on_failure(self) -> Iterator[None]:
        """Remove the received file on any failure except an abandonment."""
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
        """Return the file left by an earlier process; -1 if it no longer exists."""
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
            raise SnapshotAbandoned(f"{self._path}: the snapshot is no longer needed")
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
            raise SnapshotFailed(f"{self._path}: reception has ended; start again")
