"""The files of snapshots on one replica's disk: real ones, of which a crash forgets what was not synced."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from forebay.snapshots.finalize import SnapshotDisk, SnapshotName

if TYPE_CHECKING:
    from tests.simulation.disk import SimDisk


class SimFiles(SnapshotDisk):
    """The calls of `snapshots` that change a disk: files on tmpfs, of which a crash forgets what was not synced."""

    def __init__(self, disk: SimDisk, directory: Path) -> None:
        self._disk = disk
        self.directory = directory
        self._names: dict[int, str] = {}
        """By descriptor; of those that are closed the entry is out of date until the number is used again."""
        self._unsynced: set[str] = set()
        self._renamed: list[tuple[str, str, bytes | None, bool]] = []
        """Old name, new name, what was durably there under the new one and whether that was damaged: a crash brings it
        back, or keeps what took its place, but never leaves nothing."""
        self.flipped: set[str] = set()
        """Sealed snapshots that were damaged, and are there."""

    def create(self, directory: int, name: str) -> int:
        self._step("making a snapshot's file", needs_space=True)
        file = super().create(directory, name)
        self._names[file] = name
        self._unsynced.add(name)
        return file

    def reopen(self, directory: int, name: str) -> int:
        file = super().reopen(directory, name)
        self._names[file] = name
        return file

    def truncate(self, file: int, size_bytes: int) -> None:
        self._step("cutting a snapshot's part")
        super().truncate(file, size_bytes)

    def write(self, file: int, data: bytes) -> None:
        self._step("writing a snapshot", needs_space=True)
        self._unsynced.add(self._names[file])
        super().write(file, data)

    def sync(self, file: int) -> None:
        self._step("syncing a snapshot")
        self._disk.work(self._disk.sync_s)
        self._unsynced.discard(self._names[file])

    def rename(self, directory: int, old: str, new: str) -> None:
        self._step("naming a snapshot")
        path = self.directory / new
        replaced = path.read_bytes() if path.exists() and new not in self._unsynced else None
        super().rename(directory, old, new)
        self._renamed.append((old, new, replaced, new in self.flipped))
        self.flipped.discard(new)
        self._unsynced.discard(new)
        if old in self._unsynced:
            self._unsynced.discard(old)
            self._unsynced.add(new)

    def sync_directory(self, directory: int) -> None:
        self._step("syncing the snapshots' directory")
        self._disk.work(self._disk.sync_s)
        self._renamed.clear()

    def remove(self, directory: int, name: str) -> None:
        if self._disk.dead:
            return
        self._step("removing a snapshot")
        super().remove(directory, name)
        self._unsynced.discard(name)
        self.flipped.discard(name)

    def lose_power(self) -> None:
        for name in sorted(self._unsynced):
            path = self.directory / name
            if path.exists():
                os.truncate(path, self._disk.rng.randrange(path.stat().st_size + 1))
        for old, new, replaced, was_flipped in reversed(self._renamed):
            if (self.directory / new).exists() and self._disk.rng.random() < 0.5:
                os.rename(self.directory / new, self.directory / old)
                if replaced is not None:
                    (self.directory / new).write_bytes(replaced)
                    if was_flipped:
                        self.flipped.add(new)
        self._unsynced.clear()
        self._names.clear()
        self._renamed.clear()

    def flip_a_bit(self) -> str | None:
        """Damage one finalized snapshot; return its name, None if there is none."""
        names = self._sealed()
        if not names:
            return None
        name = self._disk.rng.choice(names)
        data = bytearray((self.directory / name).read_bytes())
        if not data:
            return None
        data[self._disk.rng.randrange(len(data))] ^= 1 << self._disk.rng.randrange(8)
        (self.directory / name).write_bytes(data)
        self.flipped.add(name)
        return name

    @property
    def sound(self) -> list[int]:
        """The entries after which the finalized snapshots that were not damaged were taken."""
        names = (SnapshotName.parse(name) for name in self._sealed() if name not in self.flipped)
        return [name.index for name in names if name is not None]

    def _sealed(self) -> list[str]:
        return sorted(name for name in os.listdir(self.directory) if not name.startswith("."))

    def _step(self, where: str, *, needs_space: bool = False) -> None:
        self._disk.step(where)
        if needs_space and self._disk.files_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
