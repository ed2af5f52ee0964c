"""Removal of directory trees created by users: by descriptors, never through a link, with constant depth.

A tree may be deeper than the limit on descriptors, and its owner may still be changing it. A non-empty subdirectory is
therefore moved to the top under a new name and emptied there, so that only two directories are open at a time. On btrfs
the owner may have created subvolumes. They can be moved to the top, but their content cannot leave them, so each is a
top of its own while it is emptied, and a third directory is open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.cluster.agent.adapters import subvolumes
from forebay.cluster.system import closing, names_in, open_directory

KEPT_NAMED_MAX: Final = 8
"""Names in the result of remove_removable, count: as many as fit into a message."""

_NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EBUSY})
"""Errors that mean a lack of permission; ENOTDIR occurs for a file in a sticky directory."""


class RemovalFailed(Exception):
    """A file cannot be removed; the message names it."""


def remove_tree(parent: int, name: str, *, shown: str, lasting: bool = True) -> None:
    """Remove the directory `name` in the open directory `parent` with its content, if it exists.

    Unless `lasting`, it may reappear after a power failure. An interrupted removal can be repeated.

    Raises:
        RemovalFailed: A file cannot be removed; the message names it.
    """
    try:
        with _open_writable(parent, name) as top:
            _empty(top, shown)
        os.rmdir(name, dir_fd=parent)
        if lasting:
            os.fsync(parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error


def empty_directory(directory: int, *, shown: str, lasting: bool = True) -> None:
    """Remove the content of an open directory. Unless `lasting`, it may reappear after a power failure.

    Raises:
        RemovalFailed: A file cannot be removed; the message names it.
    """
    try:
        _empty(directory, shown)
        if lasting:
            os.fsync(directory)
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be emptied: {error.strerror}") from error


def remove_removable(directory: int, *, shown: str) -> list[str]:
    """Remove what this process may remove from an open directory; return paths and owners of the rest, at most
    KEPT_NAMED_MAX.

    Raises:
        RemovalFailed: A file cannot be removed for another reason.
    """
    kept: list[str] = []
    try:
        _empty(directory, shown, kept)
        os.fsync(directory)
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be emptied: {error.strerror}") from error
    return kept


def _empty(top: int, shown: str, kept: list[str] | None = None) -> None:
    while True:
        if kept is not None:
            kept.clear()
        moved = _clear(_Tops(top, top), top, shown, kept)
        if not moved:
            return


class _Tops(NamedTuple):
    """Open directories that non-empty directories are moved to."""

    outer: int
    """Target for subvolumes."""
    inner: int
    """Target for directories; a different one while a subvolume is emptied."""


def _clear(top: _Tops, directory: int, shown: str, kept: list[str] | None) -> bool:
    """Remove the entries of `directory`, one level deep; return True if entries were moved to a top, which must be
    revisited.
    """
    moved = False
    for name in names_in(directory):
        try:
            os.unlink(name, dir_fd=directory)
            continue
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EISDIR, errno.EPERM):
                _keep(directory, name, shown, kept, error)
                continue
        try:
            moved = _clear_subdirectory(top, directory, name, shown, kept) or moved
        except FileNotFoundError:
            continue
        except OSError as error:
            _keep(directory, name, shown, kept, error)
    return moved


def _keep(directory: int, name: str, shown: str, kept: list[str] | None, error: OSError) -> None:
    """Record an entry that may not be removed.

    Raises:
        RemovalFailed: Nothing may be kept, or the error has another reason.
    """
    if kept is None or error.errno not in _NOT_ALLOWED:
        raise RemovalFailed(f"{shown}/{name} cannot be removed: {error.strerror}") from error
    if len(kept) < KEPT_NAMED_MAX:
        owner = os.stat(name, dir_fd=directory, follow_symlinks=False).st_uid
        kept.append(f"{shown}/{name} (of user {owner})")


def _clear_subdirectory(top: _Tops, directory: int, name: str, shown: str, kept: list[str] | None) -> bool:
    try:
        os.rmdir(name, dir_fd=directory)
        return False
    except OSError as error:
        # EROFS: the owner made a subvolume read-only.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EROFS):
            raise
    moved = False
    with _open_writable(directory, name) as inner:
        is_subvolume = os.fstat(inner).st_dev != os.fstat(directory).st_dev and subvolumes.is_subvolume(inner)
        target = top.outer if is_subvolume else top.inner
        if directory != target:
            # It is processed when that top is listed again.
            os.rename(name, f".forebay-gone-{uuid.uuid4().hex}", src_dir_fd=directory, dst_dir_fd=target)
            return True
        before = len(kept or ())
        below = f"{shown}/{name}"
        if is_subvolume:
            moved = _clear_subvolume(_Tops(top.outer, inner), below, kept)
        else:
            moved = _clear(top, inner, below, kept)
    if kept is not None and len(kept) > before:
        return moved
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(name, dir_fd=directory)
    return moved


def _clear_subvolume(top: _Tops, shown: str, kept: list[str] | None) -> bool:
    """Empty the subvolume that is the inner top; return True if the outer top must be revisited."""
    before, moved = list(kept or ()), False
    while _clear(top, top.inner, shown, kept):
        moved = True
        if kept is not None:
            kept[:] = before
    return moved


@contextlib.contextmanager
def _open_writable(parent: int, name: str) -> Iterator[int]:
    """Open a directory after restoring permissions that its owner had removed."""
    with closing(os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)) as handle:
        with contextlib.suppress(PermissionError):
            try:
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
            except OSError as error:
                if error.errno != errno.EROFS or not subvolumes.make_writable(handle):
                    raise
                os.chmod(f"/proc/self/fd/{handle}", 0o700)
        descriptor = open_directory(".", dir_fd=handle)
    with closing(descriptor):
        yield descriptor
