"""Snapshot directory of one replica: finds the newest valid snapshot, saves in the background, receives and prunes."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from forebay.snapshots.finalize import (
    DISK,
    TEMPORARY_SUFFIX,
    SnapshotAbandoned,
    SnapshotDisk,
    SnapshotFailed,
    SnapshotName,
    failing,
    failure,
    open_directory,
    remove_if_abandoned,
    reopen_temporary,
    write_snapshot,
)
from forebay.snapshots.image import Image
from forebay.snapshots.receive import RECEIVING_SUFFIX, Receiver, receiving_name
from forebay.snapshots.restore import SnapshotRefused, load_open, open_snapshot, sound_prefix_bytes

LOGGER = logging.getLogger(__name__)

KEPT_DEFAULT = 2
"""Number of snapshots kept by default: the newest, and one in case the newest is damaged."""

KEPT_MAX = 100
"""Maximum number of snapshots an operator may keep: each may take gigabytes."""

BREATH_S = 0.000_2
"""Pause of the background writer after each slice, seconds. The pause lets the event loop run at once, instead of after
the 5 ms of Python's thread switching. For 100,000 jobs the pauses add about 0.1 s.
"""


class SkippedSnapshot(NamedTuple):
    """Rejected snapshot with the reason."""

    path: Path
    sentence: str


class StoredSnapshot(msgspec.Struct, frozen=True):
    """Snapshot that this process has verified or written, and may therefore send to a peer."""

    path: Path
    index: int
    term: int
    size_bytes: int


class BackgroundRunner(Protocol):
    """Executor that runs slow calls outside the event loop, one at a time: a thread, or a simulated thread."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any) -> Future[Any]: ...
    def shutdown(self, wait: bool = True) -> None: ...


class Partial(NamedTuple):
    """Snapshot that an earlier process received in part, and the size of its valid part."""

    name: SnapshotName
    sound_bytes: int


class SnapshotStore:
    """Snapshot directory of one replica, used by one thread and the store's own background thread."""

    def __init__(
        self,
        directory: Path,
        keep: int = KEPT_DEFAULT,
        *,
        cluster_id: str | None = None,
        disk: SnapshotDisk = DISK,
        background: BackgroundRunner | None = None,
    ) -> None:
        """Open or create the directory, and remove the leftovers of dead writers.

        The valid part of the newest partly received snapshot is kept, for `receive` to continue. Finding the valid part
        is slow for large files. `cluster_id`: reject snapshots of other clusters; None accepts any. `background` runs
        saving and verification; None for a thread.

        Raises:
            SnapshotFailed: The directory cannot be used.
        """
        if not 1 <= keep <= KEPT_MAX:
            raise ValueError(f"{keep} snapshots cannot be kept; use a number from 1 to {KEPT_MAX}")
        self._directory = directory
        self._keep = keep
        self._cluster_id = cluster_id
        self._disk = disk
        self._lock = threading.Lock()
        self._sound: set[SnapshotName] = set()
        self._skipped: dict[SnapshotName, str] = {}
        self._doubted: set[SnapshotName] = set()
        """Snapshots read again because a peer rejected them, and found valid."""
        self._stop = threading.Event()
        self._saving: Future[Path] | None = None
        self._receiver: Receiver | None = None
        self.partial: Partial | None = None
        """Snapshot that an earlier process received in part, or None."""
        self._executor: BackgroundRunner = background or ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="snapshot"
        )
        with failing(directory):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._clean()

    @property
    def directory(self) -> Path:
        """Directory of the snapshots."""
        return self._directory

    @property
    def skipped_snapshots(self) -> tuple[SkippedSnapshot, ...]:
        """Snapshots rejected since the store was opened, newest first, for the operator."""
        with self._lock:
            found = sorted(self._skipped.items(), reverse=True)
        return tuple(SkippedSnapshot(self._directory / str(name), sentence) for name, sentence in found)

    @property
    def saving(self) -> bool:
        """Return whether a background save is running."""
        return self._saving is not None and not self._saving.done()

    def names(self) -> list[SnapshotName]:
        """Return the names in the directory, newest first, without reading the files.

        Raises:
            SnapshotFailed: The directory cannot be read.
        """
        with failing(self._directory):
            found = [SnapshotName.parse(name) for name in os.listdir(self._directory)]
        return sorted((name for name in found if name is not None), reverse=True)

    def newest_usable(self, why_not: Callable[[Image], str | None] = lambda image: None) -> tuple[Path, Image] | None:
        """Return the newest valid snapshot for which `why_not` returns None; None if there is none.

        `skipped_snapshots` lists the others with the reason. They are not sent to peers, and pruning does not keep
        them.
        """
        for name in self.names():
            try:
                image = self.load(name)
            except SnapshotRefused as error:
                LOGGER.warning("snapshot %s is ignored: %s", error.path, error.sentence)
                continue
            path = self._directory / str(name)
            sentence = why_not(image)
            if sentence is None:
                return path, image
            LOGGER.warning("snapshot %s is ignored: %s", path, sentence)
            self.pass_over(name, sentence)
        return None

    def load(self, name: SnapshotName) -> Image:
        """Return the image of one snapshot, and record whether the snapshot is valid.

        Raises:
            SnapshotRefused: The file is not a sound snapshot.
        """
        path = self._directory / str(name)
        folder = open_directory(self._directory)
        try:
            image = load_open(open_snapshot(path, folder), path)
            sentence = self._foreign(image)
            if sentence is not None:
                raise SnapshotRefused(path, sentence)
        except SnapshotRefused as why:
            self.pass_over(name, why.sentence)
            raise
        finally:
            os.close(folder)
        self._trust(name)
        return image

    def pass_over(self, name: SnapshotName, sentence: str) -> None:
        """Record that a snapshot is unusable here: it is not sent to peers, and pruning does not keep it."""
        with self._lock:
            self._skipped[name] = sentence
            self._sound.discard(name)

    def newest(self) -> StoredSnapshot | None:
        """Return the newest snapshot that this process wrote, received or loaded, without reading the file."""
        with self._lock:
            sound = sorted(self._sound, reverse=True)
        for name in sound:
            path = self._directory / str(name)
            try:
                return StoredSnapshot(path, name.index, name.term, os.stat(path, follow_symlinks=False).st_size)
            except FileNotFoundError:
                continue
            except OSError as why:
                raise failure(path, why) from why
        return None

    def doubt(self, index: int) -> None:
        """Read the snapshots of `index` again in the background to find damage, each only once."""
        with self._lock:
            doubted = [name for name in self._sound if name.index == index and name not in self._doubted]
            self._doubted.update(doubted)
        if doubted and not self._stop.is_set():
            self._executor.submit(self._read_again, doubted)

    def _read_again(self, names: list[SnapshotName]) -> None:
        for name in names:
            try:
                self.load(name)
            except SnapshotRefused as error:
                LOGGER.error("snapshot %s is no longer sent: %s", error.path, error.sentence)
            else:
                with self._lock:
                    self._doubted.add(name)

    def save_in_background(self, image: Image) -> Future[Path]:
        """Write the image in a thread, then prune. The future returns the path or raises SnapshotFailed.

        While another save runs, `image` is not written, because the next snapshot covers it: returns the running save's
        future.
        """
        if self._stop.is_set():
            raise SnapshotFailed(f"{self._directory}: the store is closed")
        if self._saving is None or self._saving.done():
            self._saving = self._executor.submit(self._save, image)
        return self._saving

    def prune(self) -> list[Path]:
        """Remove snapshots older than the newest `keep` usable ones; return the removed paths.

        Raises:
            SnapshotFailed: A file cannot be removed.
        """
        removed: list[Path] = []
        kept = 0
        folder = open_directory(self._directory)
        try:
            for name in self.names():
                with self._lock:
                    refused = name in self._skipped
                if kept < self._keep:
                    kept += not refused
                    continue
                path = self._directory / str(name)
                with failing(path), suppress(FileNotFoundError):
                    self._disk.remove(folder, str(name))
                with self._lock:
                    self._sound.discard(name)
                    self._skipped.pop(name, None)
                removed.append(path)
        finally:
            os.close(folder)
        self._forget_old_part()
        return removed

    def prune_in_background(self) -> None:
        """Prune in the background, because removing a large file is slow. Failures are logged and retried later."""

        def prune() -> None:
            try:
                self.prune()
            except SnapshotFailed as error:
                LOGGER.error("older snapshots could not be removed: %s", error)

        if not self._stop.is_set():
            self._executor.submit(prune)

    def receive(self, index: int, term: int) -> Receiver:
        """Return a receiver for a peer's snapshot; abandon a previous unfinished one.

        Continues a part of the same snapshot that an earlier process received. A part of another snapshot is removed.

        Raises:
            SnapshotFailed: The disk fails, or the abandoned snapshot is still being verified (memory holds only one).
        """
        if self._receiver is not None:
            self._receiver.abort()
            if self._receiver.verifying:
                raise SnapshotFailed(
                    f"{self._directory}: the previously received snapshot is still being verified; offer this one "
                    "again in a moment"
                )
        name = SnapshotName(index, term)
        if SnapshotName.parse(str(name)) != name or index < 1 or term < 1:
            raise SnapshotRefused(self._directory, f"there is no snapshot of index {index} and term {term}")

        def accept(image: Image) -> str | None:
            if (image.index, image.term) != (index, term):
                return f"announced as entry {index} of term {term}, but contains entry {image.index} of {image.term}"
            return self._foreign(image)

        # Do not prune yet: a restart may need an older snapshot until the caller has durably adopted this one.
        with self._lock:
            partial, self.partial = self.partial, None
        resumes = partial is not None and partial.name == name
        if partial is not None and not resumes:
            self._remove_part(partial.name)
        self._receiver = Receiver(
            self._directory,
            name,
            accept=accept,
            finished=self._trust,
            disk=self._disk,
            breathe=self._breathe,
            resume_bytes=partial.sound_bytes if partial is not None and resumes else 0,
        )
        return self._receiver

    def verify(self, receiver: Receiver) -> Future[None]:
        """Verify a received snapshot in the background; the future holds the result of `Receiver.verify`.

        Raises:
            SnapshotFailed: The store is closed.
        """
        if self._stop.is_set():
            raise SnapshotFailed(f"{self._directory}: the store is closed")
        return self._executor.submit(receiver.verify)

    def close(self) -> None:
        """Stop a save at its next slice, keep a partly received snapshot for the next process, and join the thread."""
        self._stop.set()
        if self._receiver is not None:
            self._receiver.suspend()
        self._executor.shutdown(wait=True)

    def _save(self, image: Image) -> Path:
        path = write_snapshot(self._directory, image, breathe=self._breathe, disk=self._disk)
        self._trust(SnapshotName(image.index, image.term))
        self.prune()
        return path

    def _breathe(self) -> None:
        if self._stop.wait(BREATH_S):
            raise SnapshotAbandoned(f"{self._directory}: the snapshot was abandoned because the replica is stopping")

    def _trust(self, name: SnapshotName) -> None:
        with self._lock:
            self._sound.add(name)
            self._skipped.pop(name, None)
            self._doubted.discard(name)

    def _foreign(self, image: Image) -> str | None:
        theirs = image.state.cluster_id
        if self._cluster_id is None or not theirs or theirs == self._cluster_id:
            return None
        return f"it belongs to cluster {theirs!r}; this replica belongs to {self._cluster_id!r}"

    def _clean(self) -> None:
        """Remove leftovers of dead writers, except the newest part if it is newer than every snapshot."""
        folder = open_directory(self._directory)
        try:
            left = os.listdir(folder)
            parts = sorted(_temporaries(left, RECEIVING_SUFFIX))
            newest = max(filter(None, map(SnapshotName.parse, left)), default=None)
            if parts and (newest is None or parts[-1] > newest):
                sound_bytes = self._sound_bytes(folder, parts[-1])
                if sound_bytes:
                    self.partial = Partial(parts.pop(), sound_bytes)
            for name in parts:
                remove_if_abandoned(self._disk, folder, receiving_name(name))
            for name in _temporaries(left, TEMPORARY_SUFFIX):
                remove_if_abandoned(self._disk, folder, f".{name}{TEMPORARY_SUFFIX}")
        except OSError as why:
            raise failure(self._directory, why) from why
        finally:
            os.close(folder)

    def _sound_bytes(self, folder: int, name: SnapshotName) -> int:
        """Return the size of a part's valid prefix, bytes; 0 if a live process is writing the part."""
        try:
            file = reopen_temporary(self._disk, folder, receiving_name(name))
        except (FileNotFoundError, BlockingIOError):
            return 0
        try:
            return sound_prefix_bytes(file)
        finally:
            os.close(file)

    def _forget_old_part(self) -> None:
        """Remove a partly received snapshot once a complete one is at least as new."""
        newest = max(self.names(), default=None)
        with self._lock:
            partial = self.partial
            if partial is None or newest is None or newest < partial.name:
                return
            self.partial = None
        self._remove_part(partial.name)

    def _remove_part(self, name: SnapshotName) -> None:
        folder = open_directory(self._directory)
        try:
            with suppress(OSError):  # the leftover does no harm, and the next start tries again
                remove_if_abandoned(self._disk, folder, receiving_name(name))
        finally:
            os.close(folder)


def _temporaries(names: Iterable[str], suffix: str) -> list[SnapshotName]:
    """Return the snapshots with a temporary file of this suffix."""
    hidden = [name[1 : -len(suffix)] for name in names if name.startswith(".") and name.endswith(suffix)]
    return [name for name in map(SnapshotName.parse, hidden) if name is not None]
