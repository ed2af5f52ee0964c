"""Disks that fail, or take their process with them, at a chosen call."""

from __future__ import annotations

import errno
import os
import signal

from forebay.snapshots.finalize import SnapshotDisk


class TracingDisk(SnapshotDisk):
    """Does what Disk does and remembers the calls; at call number `at`, counted from 0, `happen` comes first."""

    def __init__(self, at: int | None = None) -> None:
        self.calls: list[str] = []
        self._at = at

    def happen(self, file: int | None, data: bytes) -> None:
        """What happens at the chosen call."""

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
    """Fails at the chosen call, after having written half of what it was given."""

    def __init__(self, at: int, number: int = errno.ENOSPC) -> None:
        super().__init__(at)
        self._number = number

    def happen(self, file: int | None, data: bytes) -> None:
        if file is not None:
            os.write(file, data[: len(data) // 2])
        raise OSError(self._number, os.strerror(self._number))


class KillingDisk(TracingDisk):
    """Kills its process at the chosen call, in the middle of a write."""

    def happen(self, file: int | None, data: bytes) -> None:
        if file is not None:
            os.write(file, data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
