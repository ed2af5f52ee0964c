"""Removing a directory tree that somebody else filled: by descriptors, never through a link, in constant depth.

A tree may be deeper than there are descriptors, and its owner may still be changing it. So a subdirectory that is not
empty is moved to the top under a name of our own and emptied there: whatever the shape, two directories are open at a
time. On btrfs its owner may have made subvolumes in it: they can be moved to the top, but what is in one cannot leave
it, so each is a top of its own while it is emptied, and a third directory is open."""

from __future__ import annotations

import contextlib
import errno
import os
import uuid
from collections.abc import Iterator
from typing import Final, NamedTuple

from cluster.agent.files import subvolumes
from cluster.system import closing, names_in, open_directory

KEPT_NAMED_MAX: Final = 8
"""Things that may not be removed that are named, count: what a message has room for."""

_NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EBUSY})
"""What the kernel says of what is not this user's to remove; of a file in a sticky directory, when it is tried as a
directory."""


class RemovalFailed(Exception):
    """Something could not be removed; the message names it."""


def remove_tree(parent: int, name: str, *, shown: str, lasting: bool = True) -> None:
    """Remove the directory `name` in the open directory `parent` with everything in it.

    Nothing to do if it is not there. One that is not removed as `lasting` may come back in a power cut.

    RemovalFailed names what could not be removed; calling again goes on from there.
    """
    try:
        with _entered(parent, name) as top:
            _empty(top, shown)
        os.rmdir(name, dir_fd=parent)
        if lasting:
            os.fsync(parent)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error


def empty_directory(directory: int, *, shown: str, lasting: bool = True) -> None:
    """Remove everything in the open directory; RemovalFailed names what could not be removed.

    What is not removed as `lasting` may come back in a power cut.
    """
    try:
        _empty(directory, shown)
        if lasting:
            os.fsync(directory)
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be emptied: {error.strerror}") from error


def remove_removable(directory: int, *, shown: str) -> list[str]:
    """Remove from the open directory what this process may remove; return what it may not, by name and owner, the first
    KEPT_NAMED_MAX of it. RemovalFailed for every other reason.
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
    """Where what is not empty is moved to: open directories."""

    outer: int
    """Subvolumes."""
    inner: int
    """Directories; another one while a subvolume is emptied."""


def _clear(top: _Tops, directory: int, shown: str, kept: list[str] | None) -> bool:
    """Remove what is in `directory`, one level deep; True if something was moved to a top and has to be looked at."""
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
    """Note what may not be removed; RemovalFailed where nothing is to be kept, or that is not the reason."""
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
        # EROFS: a subvolume that its owner has made read-only.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EROFS):
            raise
    moved = False
    with _entered(directory, name) as inner:
        is_subvolume = os.fstat(inner).st_dev != os.fstat(directory).st_dev and subvolumes.is_subvolume(inner)
        target = top.outer if is_subvolume else top.inner
        if directory != target:
            # Its turn comes when that top is listed again.
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
    """Remove what is in the subvolume that is the inner top; True if the outer one has to be looked at again."""
    before, moved = list(kept or ()), False
    while _clear(top, top.inner, shown, kept):
        moved = True
        if kept is not None:
            kept[:] = before
    return moved


@contextlib.contextmanager
def _entered(parent: int, name: str) -> Iterator[int]:
    """Open a directory, first taking back the permissions that its owner denied himself."""
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
