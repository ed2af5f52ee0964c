"""Capacity enforcement by the filesystem: detect the mechanism, and create, limit and remove buffers with it."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.cluster.agent.files import images, project_quota, subvolumes
from forebay.cluster.agent.files.images import ImageFailed
from forebay.cluster.agent.files.removal import RemovalFailed, remove_tree
from forebay.cluster.system import closing, names_in, open_directory

WATCH: Final = "watch"
PROJECT_QUOTA: Final = "project_quota"
SUBVOLUME_QUOTA: Final = "subvolume_quota"
IMAGE: Final = "image"
"""Words of CAPACITY_CONTROLS (replica.model). With the first, the filesystem enforces nothing."""

_PRIVATE: Final = 0o700

NAMES_BYTES: Final = 8 * 1024**2
"""Allowance for metadata in a subvolume: btrfs counts names and attributes, about 800 bytes for each of the 10,000
files any buffer may hold.
"""


class CapacityControl(NamedTuple):
    """Enforcement mechanism of an agent's filesystem."""

    word: str
    why_watch: str = ""
    """Reason why the filesystem cannot enforce limits, if the word is WATCH."""


def find_control(directory: int) -> CapacityControl:
    """Return the mechanism for buffers created in an open directory by this process."""
    if project_quota.is_enforced(directory):
        return CapacityControl(PROJECT_QUOTA)
    why = subvolumes.why_unlimited(directory)
    if not why:
        return CapacityControl(SUBVOLUME_QUOTA)
    if not subvolumes.is_on_btrfs(directory):
        why = "its filesystem does not enforce project quotas"
    return CapacityControl(WATCH, why)


def hold_by_images(directory: int) -> CapacityControl:
    """Use an image for each buffer created in an open directory.

    Raises:
        ImageFailed: This process cannot create or mount images.
    """
    images.probe(directory)
    return CapacityControl(IMAGE)


def see_all_mounted(parent: int) -> Iterator[str]:
    """Mount all images of an open directory, for example after a reboot; yield the errors."""
    try:
        for name in images.names(parent):
            try:
                images.see_mounted(parent, name)
            except ImageFailed as error:
                yield str(error)
    except OSError as error:
        yield f"the images of buffers cannot be listed: {error.strerror}"


def see_mounted(parent: int, name: str) -> None:
    """Mount the named buffer in an open directory if it is an unmounted image.

    Raises:
        ImageFailed: The image cannot be mounted.
    """
    images.see_mounted(parent, name)


def open_buffer(parent: int, name: str) -> int:
    """Return a descriptor of a buffer in an open directory, mounting its image if necessary.

    Raises:
        ImageFailed: The image cannot be mounted.
        OSError: The buffer cannot be opened.
    """
    images.see_mounted(parent, name)
    return open_directory(name, dir_fd=parent)


def make(parent: int, name: str, control: str, most_bytes: int) -> None:
    """Create a private, empty buffer in an open directory; call `hold` next. Idempotent until then.

    Raises:
        FileExistsError: The buffer exists.
        ImageFailed: The image cannot be created.
        OSError: The buffer cannot be created.
    """
    if control == IMAGE:
        images.make(parent, name, most_bytes)
    elif control == SUBVOLUME_QUOTA:
        subvolumes.create(parent, name)
        # Other users could look into it until now, but it was empty.
        os.chmod(name, _PRIVATE, dir_fd=parent)
    else:
        os.mkdir(name, _PRIVATE, dir_fd=parent)


def hold(directory: int, control: str, seed: str, most_bytes: int) -> None:
    """Limit the bytes an open buffer may take on its filesystem; `seed` identifies it.

    A buffer created under another mechanism is left to the watch.

    Raises:
        OSError: The limit cannot be set.
    """
    if control == PROJECT_QUOTA:
        project_quota.hold(directory, seed, most_bytes)
    elif control == SUBVOLUME_QUOTA and subvolumes.is_subvolume(directory):
        subvolumes.limit(directory, most_bytes + NAMES_BYTES)


def hold_inodes(directory: int, control: str, more: int) -> None:
    """Limit an open buffer to `more` inodes beyond its current ones, if the filesystem can.

    Raises:
        OSError: The limit cannot be set.
    """
    if control == PROJECT_QUOTA:
        project_quota.hold_inodes(directory, more)


def move(parent: int, name: str, new: str) -> None:
    """Rename a buffer in its open directory.

    Raises:
        FileNotFoundError: There is no such buffer.
        OSError: The buffer cannot be renamed.
    """
    if images.is_there(parent, name):
        images.move(parent, name, new)
    else:
        os.rename(name, new, src_dir_fd=parent, dst_dir_fd=parent)
    os.fsync(parent)


def remove(parent: int, name: str, *, shown: str) -> None:
    """Remove a buffer with its content and limits, whichever mechanism it was created under. A missing buffer is not an
    error.

    Raises:
        RemovalFailed: The buffer cannot be removed.
    """
    with _removing(parent, name, shown) as is_image:
        if is_image:
            images.remove(parent, name)
        else:
            remove_tree(parent, name, shown=shown)


def remove_empty(parent: int, name: str, *, shown: str) -> None:
    """Remove an empty buffer and its limits. A missing buffer is not an error.

    Raises:
        RemovalFailed: The buffer is not empty or cannot be removed.
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
    """Yield whether a buffer is an image; release its limits after its removal.

    Raises:
        RemovalFailed: The buffer cannot be removed.
    """
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
