"""Snapshot directory of one replica: newest valid snapshot, saving in the background, receiving, and pruning."""

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
"""Snapshots kept: the newest, and one as a fallback if disk blocks of the newest go bad."""

KEPT_MAX = 100
"""Maximum number of snapshots an operator may keep: each may take gigabytes."""

BREATH_S = 0.000_2
"""Pause of the background writer after each slice, seconds. It gives the interpreter to the event loop at once, which
would otherwise wait for the 5 ms of Python's thread switching. Costs about 0.1 s for 100,000 jobs.
"""


class SkippedSnapshot(NamedTuple):
    """Skipped snapshot with the reason."""

    path: Path
    sentence: str


class StoredSnapshot(msgspec.Struct, frozen=True):
    """Finalized snapshot that this process has verified or written, and may send to a peer."""

    path: Path
    index: int
    term: int
    size_bytes: int


class BackgroundRunner(Protocol):
    """Runs slow work outside the loop, one piece after the other: a thread, or a simulated one."""

    def submit(self, call: Callable[..., Any], /, *arguments: Any) -> Future[Any]: ...
    def shutdown(self, wait: bool = True) -> None: ...


class Partial(NamedTuple):
    """Snapshot received in part by an earlier process, and the size of its sound part."""

    name: SnapshotName
    sound_bytes: int


class SnapshotStore:
    """Snapshot directory of one replica. Used from one thread, except for its own background thread."""

    def __init__(
        self,
        directory: Path,
        keep: int = KEPT_DEFAULT,
        *,
        cluster_id: str | None = None,
        disk: SnapshotDisk = DISK,
        background: BackgroundRunner | None = None,
    ) -> None:
        """Open the directory, creating it if missing, and remove the remains of dead writers.

        The newest partly received snapshot is kept as far as it is sound, for `receive` to continue; reading it is the
        slow part of opening. `cluster_id`: reject snapshots of other clusters; None accepts any. `background`: runs
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
        """Sound snapshots that were read again because a peer rejected them."""
        self._stop = threading.Event()
        self._saving: Future[Path] | None = None
        self._receiver: Receiver | None = None
        self.partial: Partial | None = None
        """Snapshot received in part by an earlier process; there is at most one."""
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
        """Return the newest snapshot that is sound and for which `why_not` returns None, or None.

        `skipped` lists the others with the reason; they are not sent to peers, and pruning does not keep them.
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
        """Return the image of one snapshot, and record whether it is sound.

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
        """Record that a snapshot is unusable here, sound or not: it is not sent, and pruning does not keep it."""
        with self._lock:
            self._skipped[name] = sentence
            self._sound.discard(name)

    def newest(self) -> StoredSnapshot | None:
        """Return the newest snapshot that this process wrote, received or loaded; reads no content."""
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
        """Read the snapshots of `index` again in the background, each once, to find damage."""
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
        """Write the image in a thread, then prune. The future returns its path or raises SnapshotFailed.

        While another save runs, return that save's future and do not write `image`: the next snapshot covers it.
        """
        if self._stop.is_set():
            raise SnapshotFailed(f"{self._directory}: the store is closed")
        if self._saving is None or self._saving.done():
            self._saving = self._executor.submit(self._save, image)
        return self._saving

    def prune(self) -> list[Path]:
        """Remove snapshots older than the newest `keep` that were not rejected; return the removed paths.

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
        """Prune in the background: removing a large file takes long. Failures are logged and retried later."""

        def prune() -> None:
            try:
                self.prune()
            except SnapshotFailed as error:
                LOGGER.error("older snapshots could not be removed: %s", error)

        if not self._stop.is_set():
            self._executor.submit(prune)

    def receive(self, index: int, term: int) -> Receiver:
        """Return a receiver for a peer's snapshot; abandon one that was still being received.

        Continues if an earlier process received a part of this snapshot; a part of another one is removed.

        Raises:
            SnapshotFailed: The disk fails, or the abandoned snapshot is still being verified: memory holds only one.
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
                return f"it was announced as {index} of term {term}; it contains {image.index} of {image.term}"
            return self._foreign(image)

        # Do not prune yet: until the caller has adopted the snapshot durably, a restart may need an older one.
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
        """Remove the remains of dead writers, except the newest part of a snapshot newer than the existing ones."""
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
        """Return the size of a part's sound prefix, bytes; 0 if a live process writes it."""
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
            with suppress(OSError):  # it blocks nothing, and the next start tries again
                remove_if_abandoned(self._disk, folder, receiving_name(name))
        finally:
            os.close(folder)


def _temporaries(names: Iterable[str], suffix: str) -> list[SnapshotName]:
    """Return the snapshots with a temporary file of this suffix."""
    hidden = [name[1 : -len(suffix)] for name in names if name.startswith(".") and name.endswith(suffix)]
    return [name for name in map(SnapshotName.parse, hidden) if name is not None]
