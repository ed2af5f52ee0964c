"""What the file system holds a buffer to its capacity by: found out, and buffers made, limited and removed with it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from cluster.agent.files import images, project_quota, subvolumes
from cluster.agent.files.images import ImageRefused
from cluster.agent.files.removal import RemovalFailed, remove_tree
from cluster.system import closing, names_in, open_directory

WATCH: Final = "watch"
PROJECT_QUOTA: Final = "project_quota"
SUBVOLUME_QUOTA: Final = "subvolume_quota"
IMAGE: Final = "image"
"""Words of CAPACITY_CONTROLS (replica.model). The file system has no part in the first."""

_PRIVATE: Final = 0o700

NAMES_BYTES: Final = 8 * 1024**2
"""What a subvolume may refer to beside the bytes of its files and their part: btrfs counts names and attributes, about
800 bytes for each of the 10,000 files that any buffer may hold."""


class Control(NamedTuple):
    """What there is on an agent's file system."""

    word: str
    why_watch: str = ""
    """Why the file system does not do it, for the word watch."""


def find_control(directory: int) -> Control:
    """Return what holds the buffers that are made in an open directory by this process."""
    if project_quota.is_enforced(directory):
        return Control(PROJECT_QUOTA)
    why = subvolumes.why_unlimited(directory)
    if not why:
        return Control(SUBVOLUME_QUOTA)
    if not subvolumes.is_on_btrfs(directory):
        why = "its file system keeps no project quotas for it"
    return Control(WATCH, why)


def hold_by_images(directory: int) -> Control:
    """Have each buffer that is made in an open directory be an image; ImageRefused if this process cannot."""
    images.probe(directory)
    return Control(IMAGE)


def see_all_mounted(parent: int) -> Iterator[str]:
    """Mount the images of an open directory that are not, after a restart of the machine; give why one cannot be."""
    try:
        for name in images.names(parent):
            try:
                images.see_mounted(parent, name)
            except ImageRefused as error:
                yield str(error)
    except OSError as error:
        yield f"the images of buffers cannot be listed: {error.strerror}"


def see_mounted(parent: int, name: str) -> None:
    """Mount the buffer of this name in an open directory, if it is an image and is not mounted. ImageRefused."""
    images.see_mounted(parent, name)


def open_buffer(parent: int, name: str) -> int:
    """Return a descriptor of a buffer in an open directory, mounted if it is an image. ImageRefused, OSError."""
    images.see_mounted(parent, name)
    return open_directory(name, dir_fd=parent)


def make(parent: int, name: str, control: str, most_bytes: int) -> None:
    """Make a buffer, private and empty, in an open directory; `hold` is to follow. Repeating it does no harm.

    FileExistsError if it is there. ImageRefused, OSError.
    """
    if control == IMAGE:
        images.make(parent, name, most_bytes)
    elif control == SUBVOLUME_QUOTA:
        subvolumes.create(parent, name)
        # It was everybody's to look into for a moment in which nothing was in it.
        os.chmod(name, _PRIVATE, dir_fd=parent)
    else:
        os.mkdir(name, _PRIVATE, dir_fd=parent)


def hold(directory: int, control: str, seed: str, most_bytes: int) -> None:
    """Have an open buffer take at most so many bytes of its file system; `seed` tells it from others. OSError.

    Nothing is done for one that was made under another control: the watch has it.
    """
    if control == PROJECT_QUOTA:
        project_quota.hold(directory, seed, most_bytes)
    elif control == SUBVOLUME_QUOTA and subvolumes.is_subvolume(directory):
        subvolumes.limit(directory, most_bytes + NAMES_BYTES)


def hold_inodes(directory: int, control: str, more: int) -> None:
    """Have an open buffer take at most so many inodes more than it has, where the file system can. OSError."""
    if control == PROJECT_QUOTA:
        project_quota.hold_inodes(directory, more)


def move(parent: int, name: str, new: str) -> None:
    """Give a buffer another name in its open directory. FileNotFoundError, OSError."""
    if images.is_there(parent, name):
        images.move(parent, name, new)
    else:
        os.rename(name, new, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)


def remove(parent: int, name: str, *, shown: str) -> None:
    """Remove a buffer with all that is in it and what limited it, whichever control it was made under. RemovalFailed.

    Nothing to do if it is not there.
    """
    with _removing(parent, name, shown) as is_image:
        if is_image:
            images.remove(parent, name)
        else:
            remove_tree(parent, name, shown=shown)


def remove_empty(parent: int, name: str, *, shown: str) -> None:
    """Remove a buffer in which nothing is, and what limited it. RemovalFailed, also if something is in it.

    Nothing to do if it is not there.
    """
    with _removing(parent, name, shown) as is_image:
        if is_image:
            with closing(open_buffer(parent, name)) as directory:
                if names_in(directory):
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
            images.remove(parent, name)
        else:
            os.rmdir(name, dir_fd=parent)
            os.fsync(parent)


@contextlib.contextmanager
def _removing(parent: int, name: str, shown: str) -> Iterator[bool]:
    """Give whether a buffer is an image; release what limited it when it has been removed. RemovalFailed."""
    project = group = 0
    try:
        is_image = images.is_there(parent, name)
        if not is_image:
            with contextlib.suppress(OSError), closing(open_directory(name, dir_fd=parent)) as directory:
                project = project_quota.project_of(directory)
                if subvolumes.is_subvolume(directory):
                    group = subvolumes.group_of(directory)
        yield is_image
    except FileNotFoundError:
        return
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error
    with contextlib.suppress(OSError):
        project_quota.release(parent, project)
    if group:
        subvolumes.release(parent, group)
