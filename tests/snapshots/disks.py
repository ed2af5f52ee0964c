"""Disks that fail, or kill their process, at a chosen call."""

from __future__ import annotations

import errno
import os
import signal

from forebay.snapshots.finalize import SnapshotDisk


class TracingDisk(SnapshotDisk):
    """Disk that records its calls; `happen` runs before call number `at`, counted from 0."""

    def __init__(self, at: int | None = None) -> None:
        self.calls: list[str] = []
        self._at = at

    def happen(self, file: int | None, data: bytes) -> None:
        """Run before the chosen call."""

    def _call(self, what: str, file: int | None = None, data: bytes = b"") -> None:
        self.calls.append(what)
        if len(self.calls) - 1 == self._at:
            self.happen(file, data)

    def create(self, directory: int, name: str) -> int:
        self._call(f"create {name}")
        return super().create(directory, name)

    def write(self, file: int, data: bytes) -> None:
        self._call("write", file, data)
        super().write(file, data)

    def sync(self, file: int) -> None:
        self._call("sync")
        super().sync(file)

    def rename(self, directory: int, old: str, new: str) -> None:
        self._call(f"rename {old} {new}")
        super().rename(directory, old, new)

    def sync_directory(self, directory: int) -> None:
        self._call("sync directory")
        super().sync_directory(directory)

    def remove(self, directory: int, name: str) -> None:
        self._call(f"remove {name}")
        super().remove(directory, name)


class FailingDisk(TracingDisk):
    """Disk that fails at the chosen call, after writing half of the data."""

    def __init__(self, at: int, number: int = errno.ENOSPC) -> None:
        super().__init__(at)
        self._number = number

    def happen(self, file: int | None, data: bytes) -> None:
        if file is not None:
            os.write(file, data[: len(data) // 2])
        raise OSError(self._number, os.strerror(self._number))


class KillingDisk(TracingDisk):
    """Disk that kills its process at the chosen call, in the middle of a write."""

    def happen(self, file: int | None, data: bytes) -> None:
        if file is not None:
            os.write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
