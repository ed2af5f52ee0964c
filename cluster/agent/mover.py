"""Copying files so that a destination is absent, old or complete, and is what was read.

Each file is written to a temporary name beside its destination, synced, read back and compared with what was read
(XXH3-128), and only then renamed. A source that changes under the copy is read once more, then refused. Links, devices,
pipes and sockets are refused by name; set-id bits are never copied."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import xxhash

from cluster.agent.beneath import Identity, identity_of, join, kind_of
from cluster.agent.durable import write_all
from cluster.agent.leftovers import part_name
from cluster.agent.limits import COPY_CHUNK_BYTES, COPY_TRIES_MAX, DIRECTORY_DEPTH_MAX, DIRECTORY_ENTRIES_MAX
from cluster.agent.progress import Counters, SharedCounters
from cluster.clock import Clock

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MODE_BITS: Final = 0o777
"""What is copied of a mode: set-user-id, set-group-id and sticky are not."""


class TransferFailed(Exception):
    """A transfer that cannot be done; the message names the file and says why."""


class ReadBackFailed(TransferFailed):
    """What is on the disk is not what was written; another try may find a better place."""


class _SourceChanged(Exception):
    pass


class Amount(NamedTuple):
    """How much a transfer moves."""

    files: int
    size_bytes: int


class Throttle:
    """Holds a copy down to a rate."""

    def __init__(self, rate_bytes_s: int, clock: Clock) -> None:
        """Allow `rate_bytes_s` bytes per second; 0 is no limit."""
        self._rate_bytes_s = rate_bytes_s
        self._clock = clock
        self._begin_s = clock.monotonic_s()
        self._bytes = 0
        self._never = threading.Event()

    def chunk_bytes(self) -> int:
        """Return how much to read at once: a tenth of a second's worth at most."""
        return min(COPY_CHUNK_BYTES, max(4096, self._rate_bytes_s // 10)) if self._rate_bytes_s else COPY_CHUNK_BYTES

    def take(self, size_bytes: int) -> None:
        """Count bytes that were moved, and wait until they are due."""
        if not self._rate_bytes_s:
            return
        self._bytes += size_bytes
        ahead_s = self._bytes / self._rate_bytes_s - (self._clock.monotonic_s() - self._begin_s)
        if ahead_s > 0:
            self._never.wait(ahead_s)


class Mover:
    """Copies the files of one operation and keeps its counters."""

    def __init__(
        self,
        job: int,
        counters: SharedCounters,
        throttle: Throttle,
        *,
        home: Identity,
        storage_id: str,
        limit_bytes: int = 0,
        on_directory: Callable[[str], None] | None = None,
    ) -> None:
        """Begin an operation of `job`; more than `limit_bytes` in all is refused (0: no limit).

        `home` is the agent's own directory: no tree that holds it is copied from or into it. `storage_id` is part of
        temporary names. `on_directory` is told the path of each directory before a temporary file is made in it.
        """
        self._job = job
        self._storage_id = storage_id
        self._on_directory = on_directory
        self._shared = counters
        self._throttle = throttle
        self._home = home
        self._limit_bytes = limit_bytes
        self.counters = Counters()
        self._digest = xxhash.xxh3_128()

    @property
    def digest(self) -> str:
        """XXH3-128 over the names and contents of everything copied so far, hexadecimal."""
        return self._digest.hexdigest()

    def expect(self, amount: Amount) -> None:
        """Add to the totals that progress is shown against."""
        totals = self.counters
        self._publish(
            totals._replace(
                files_total=totals.files_total + amount.files, bytes_total=totals.bytes_total + amount.size_bytes
            )
        )

    def measure_file(self, directory: int, name: str, shown: str) -> Amount:
        """Return the size of one regular file; TransferFailed if it is missing or is something else."""
        try:
            status = os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise TransferFailed(_trouble(shown, error)) from error
        _check_regular(status.st_mode, shown)
        return Amount(1, status.st_size)

    def measure_tree(self, directory: int, shown: str) -> Amount:
        """Return how much the open directory holds; TransferFailed names what cannot be copied."""
        return self._measure(directory, shown, 1)

    def _measure(self, directory: int, shown: str, depth: int) -> Amount:
        files, size_bytes = 0, 0
        for name in _entries(directory, shown, depth):
            path = join(shown, (name,))
            status = _status(directory, name, path)
            if stat.S_ISDIR(status.st_mode):
                with self._subdirectory(directory, name, path) as inner:
                    amount = self._measure(inner, path, depth + 1)
            else:
                _check_regular(status.st_mode, path)
                amount = Amount(1, status.st_size)
            files, size_bytes = files + amount.files, size_bytes + amount.size_bytes
        return Amount(files, size_bytes)

    def copy_tree(self, source: int, destination: int, source_shown: str, destination_shown: str) -> None:
        """Copy everything in one open directory into another; what is there already and not named is left alone."""
        self._copy_tree(source, destination, source_shown, destination_shown, 1, "")
        os.fsync(destination)

    def _copy_tree(
        self, source: int, destination: int, source_shown: str, destination_shown: str, depth: int, relative: str
    ) -> None:
        for name in _entries(source, source_shown, depth):
            path, target = join(source_shown, (name,)), join(destination_shown, (name,))
            label = f"{relative}/{name}"
            status = _status(source, name, path)
            if not stat.S_ISDIR(status.st_mode):
                self.copy_file(source, name, destination, name, path, target, label)
                continue
            with self._subdirectory(source, name, path) as inner:
                made = _make_directory(destination, name, target)
                with self._subdirectory(destination, name, target) as below:
                    self._copy_tree(inner, below, path, target, depth + 1, label)
                    if made:
                        # The owner keeps his own permissions, or nobody but root could fill or remove it.
                        os.fchmod(below, stat.S_IMODE(status.st_mode) & _MODE_BITS | 0o700)
                    os.fsync(below)

    def copy_file(
        self,
        source: int,
        name: str,
        destination: int,
        target: str,
        source_shown: str,
        target_shown: str,
        label: str = "",
    ) -> None:
        """Copy one regular file between two open directories, replacing the target at once or not at all.

        The caller syncs the destination directory. `label` is the name that goes into the digest.
        """
        for tried in range(1, COPY_TRIES_MAX + 1):
            before = self.counters
            try:
                self._copy_once(source, name, destination, target, source_shown, target_shown, label)
                return
            except _SourceChanged as error:
                self._publish(before)
                if tried == COPY_TRIES_MAX:
                    raise TransferFailed(
                        f"{source_shown} changed while it was copied, {COPY_TRIES_MAX} times; "
                        "stage it when nobody writes to it"
                    ) from error
            except OSError as error:
                raise TransferFailed(
                    f"{source_shown} cannot be copied to {target_shown}: {_sentence(error)}"
                ) from error

    def _copy_once(
        self, source: int, name: str, destination: int, target: str, source_shown: str, target_shown: str, label: str
    ) -> None:
        _check_target(destination, target, target_shown)
        _check_regular(os.stat(name, dir_fd=source, follow_symlinks=False).st_mode, source_shown)
        temporary = part_name(self._job, self._storage_id, xxhash.xxh3_64_hexdigest(os.fsencode(target)))
        if self._on_directory is not None:
            self._on_directory(target_shown.removesuffix(target).rstrip("/") or "/")
        with contextlib.ExitStack() as stack:
            reading = os.open(name, _READ, dir_fd=source)
            stack.callback(os.close, reading)
            status = os.fstat(reading)
            _check_regular(status.st_mode, source_shown)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary, dir_fd=destination)
            # Made before it is guarded: a signal in between leaves a file that the next attempt removes.
            writing = os.open(
                temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=destination
            )
            stack.callback(os.close, writing)
            stack.callback(_discard, destination, temporary)
            digest = self._pour(reading, writing, source_shown)
            after = os.fstat(reading)
            if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns) or os.fstat(
                writing
            ).st_size != status.st_size:
                raise _SourceChanged
            os.fchmod(writing, stat.S_IMODE(status.st_mode) & _MODE_BITS)
            os.utime(writing, ns=(status.st_atime_ns, status.st_mtime_ns))
            os.fsync(writing)
            if _digest_on_disk(writing) != digest:
                raise ReadBackFailed(f"{target_shown} does not hold what was read from {source_shown}; check the disk")
            os.rename(temporary, target, src_dir_fd=destination, dst_dir_fd=destination)
        self._digest.update(b"%d:" % len(os.fsencode(label)) + os.fsencode(label) + digest)
        self._publish(self.counters._replace(files_done=self.counters.files_done + 1))

    def _pour(self, reading: int, writing: int, shown: str) -> bytes:
        digest = xxhash.xxh3_128()
        chunk_bytes = self._throttle.chunk_bytes()
        while chunk := os.read(reading, chunk_bytes):
            done = self.counters.bytes_done + len(chunk)
            if self._limit_bytes and done > self._limit_bytes:
                raise TransferFailed(
                    f"{shown} grew while it was copied: "
                    f"the transfers need more than the {self._limit_bytes} bytes of the buffer"
                )
            digest.update(chunk)
            write_all(writing, chunk)
            self._publish(self.counters._replace(bytes_done=done))
            self._throttle.take(len(chunk))
        return digest.digest()

    @contextlib.contextmanager
    def _subdirectory(self, directory: int, name: str, shown: str) -> Iterator[int]:
        try:
            descriptor = os.open(name, _DIRECTORY, dir_fd=directory)
        except OSError as error:
            raise TransferFailed(_trouble(shown, error)) from error
        try:
            if identity_of(descriptor) == self._home:
                raise TransferFailed(f"{shown} is the agent's own directory; jobs may not name files in it")
            yield descriptor
        finally:
            os.close(descriptor)

    def _publish(self, counters: Counters) -> None:
        self.counters = counters
        self._shared.write(counters)


def _digest_on_disk(descriptor: int) -> bytes:
    # The pages are clean after fsync: dropped, they are read from the disk and not from memory.
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    digest = xxhash.xxh3_128()
    while chunk := os.read(descriptor, COPY_CHUNK_BYTES):
        digest.update(chunk)
    return digest.digest()


def _discard(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)


def _sentence(error: OSError) -> str:
    return error.strerror or str(error)


def _trouble(shown: str, error: OSError) -> str:
    return f"{shown} does not exist" if isinstance(error, FileNotFoundError) else f"{shown}: {_sentence(error)}"


def _status(directory: int, name: str, shown: str) -> os.stat_result:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        raise TransferFailed(_trouble(shown, error)) from error


def _check_regular(mode: int, shown: str) -> None:
    if not stat.S_ISREG(mode):
        kind = kind_of(mode)
        remedy = {
            "directory": "; stage it with type=directory",
            "symbolic link": "; links are not followed: name or copy the file that it points to",
        }.get(kind, "; only regular files and directories are copied")
        raise TransferFailed(f"{shown} is a {kind}{remedy}")


def _check_target(directory: int, name: str, shown: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode):
            raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}; a file can only replace a regular file")


def _entries(directory: int, shown: str, depth: int) -> list[str]:
    if depth > DIRECTORY_DEPTH_MAX:
        raise TransferFailed(f"{shown} lies more than {DIRECTORY_DEPTH_MAX} directories deep; stage a part of the tree")
    names: list[str] = []
    try:
        with os.scandir(directory) as found:
            for entry in found:
                names.append(entry.name)
                if len(names) > DIRECTORY_ENTRIES_MAX:
                    raise TransferFailed(
                        f"{shown} has more than {DIRECTORY_ENTRIES_MAX} entries; pack them into an archive"
                    )
    except OSError as error:
        raise TransferFailed(_trouble(shown, error)) from error
    # Sorted, so that the digest does not depend on the file system.
    names.sort(key=os.fsencode)
    return names


def _make_directory(directory: int, name: str, shown: str) -> bool:
    try:
        os.mkdir(name, 0o700, dir_fd=directory)
        return True
    except FileExistsError:
        mode = _status(directory, name, shown).st_mode
        if not stat.S_ISDIR(mode):
            raise TransferFailed(f"{shown} exists and is a {kind_of(mode)}, not a directory") from None
        return False
    except OSError as error:
        raise TransferFailed(f"the directory {shown} cannot be made: {_sentence(error)}") from error
