"""Capacity enforcement by the filesystem: detect the mechanism, and create, limit and remove buffers with it.

A mechanism is an image (`images`) or an adapter of a kind of filesystem (`cluster.agent.adapters`).
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from forebay.cluster.agent.adapters import (
    NO_TOOLS,
    UNUSABLE,
    AdapterFailed,
    BtrfsAdapter,
    BufferLimit,
    ProjectAdapter,
    QuotaAdapter,
    Tools,
    quota_adapter,
    subvolumes,
)
from forebay.cluster.agent.files import images
from forebay.cluster.agent.files.images import ImageFailed
from forebay.cluster.agent.files.removal import RemovalFailed, empty_directory, remove_tree
from forebay.cluster.system import closing, names_in, open_directory
from forebay.replica.model import QUOTA_AUTO, QUOTA_NONE

WATCH: Final = "watch"
PROJECT_QUOTA: Final = "project_quota"
SUBVOLUME_QUOTA: Final = "subvolume_quota"
IMAGE: Final = "image"
"""Words of CAPACITY_CONTROLS (replica.model). With the first, the filesystem enforces nothing. The other adapters have
the word that configures them.
"""

_ADAPTERS: Final = {PROJECT_QUOTA: ProjectAdapter.word, SUBVOLUME_QUOTA: BtrfsAdapter.word}

_PRIVATE: Final = 0o700


class CapacityControl(NamedTuple):
    """Enforcement mechanism of an agent's filesystem."""

    word: str
    why_watch: str = ""
    """Reason why the filesystem cannot enforce limits, if the word is WATCH."""


def find_control(directory: int, quota: str = QUOTA_AUTO, tools: Tools = NO_TOOLS) -> CapacityControl:
    """Return the mechanism for buffers created in an open directory by this process.

    Raises:
        AdapterFailed: The filesystem cannot be used with the configured `quota`.
    """
    if quota == QUOTA_NONE:
        return CapacityControl(WATCH, 'it is configured with quota = "none"')
    if quota != QUOTA_AUTO:
        why = quota_adapter(quota, tools).check(directory)
        if why:
            raise AdapterFailed(f'buffers cannot be limited with quota = "{quota}": {why}', UNUSABLE)
        words = {adapter: word for word, adapter in _ADAPTERS.items()}
        return CapacityControl(words.get(quota, quota))
    why = ProjectAdapter().check(directory)
    if not why:
        return CapacityControl(PROJECT_QUOTA)
    if subvolumes.is_on_btrfs(directory):
        why = BtrfsAdapter().check(directory)
    return CapacityControl(WATCH, why) if why else CapacityControl(SUBVOLUME_QUOTA)


def _adapter(control: str, tools: Tools) -> QuotaAdapter | None:
    """Return the adapter of a mechanism; None: a plain directory or an image."""
    return None if control in (WATCH, IMAGE) else quota_adapter(_ADAPTERS.get(control, control), tools)


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


def make(parent: int, name: str, control: str, most_bytes: int, tools: Tools = NO_TOOLS) -> None:
    """Create a private, empty buffer in an open directory; call `hold` next. Idempotent until then.

    Raises:
        FileExistsError: The buffer exists.
        ImageFailed: The image cannot be created.
        AdapterFailed: The filesystem's tool failed.
        OSError: The buffer cannot be created.
    """
    adapter = _adapter(control, tools)
    if control == IMAGE:
        images.make(parent, name, most_bytes)
    elif adapter is not None:
        adapter.create(parent, name)
    else:
        os.mkdir(name, _PRIVATE, dir_fd=parent)


def hold(directory: int, control: str, seed: str, most_bytes: int, tools: Tools = NO_TOOLS) -> None:
    """BufferLimit the bytes an open buffer may take on its filesystem; `seed` identifies it.

    A buffer created under another mechanism is left to the watch.

    Raises:
        AdapterFailed: The limit cannot be set.
        OSError: The limit cannot be set.
    """
    adapter = _adapter(control, tools)
    if adapter is not None:
        adapter.apply(directory, seed, BufferLimit(size_bytes=most_bytes))


def hold_inodes(directory: int, control: str, seed: str, more: int, tools: Tools = NO_TOOLS) -> None:
    """BufferLimit an open buffer to `more` inodes beyond its current ones, if the filesystem can.

    Raises:
        AdapterFailed: The limit cannot be set.
        OSError: The limit cannot be set.
    """
    adapter = _adapter(control, tools)
    if adapter is not None:
        adapter.apply(directory, seed, BufferLimit(inodes=adapter.usage(directory).inodes + more))


def keeps_group(control: str, tools: Tools = NO_TOOLS) -> bool:
    """Return whether the group of a buffer carries its limit, so that it must not be given to its user's group."""
    adapter = _adapter(control, tools)
    return adapter is not None and adapter.keeps_group


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


def remove(parent: int, name: str, *, shown: str, quota: str = QUOTA_AUTO, tools: Tools = NO_TOOLS) -> None:
    """Remove a buffer with its content and limits, whichever mechanism of a node it was created under.

    `quota` is the adapter of its shared filesystem. A missing buffer is not an error.

    Raises:
        RemovalFailed: The buffer cannot be removed.
    """
    with _removing(parent, name, shown, quota, tools) as how:
        if how.is_image:
            images.remove(parent, name)
        elif how.removes_directory:
            with closing(open_directory(name, dir_fd=parent)) as directory:
                empty_directory(directory, shown=shown)
        else:
            remove_tree(parent, name, shown=shown)


def remove_empty(parent: int, name: str, *, shown: str, quota: str = QUOTA_AUTO, tools: Tools = NO_TOOLS) -> None:
    """Remove an empty buffer and its limits. A missing buffer is not an error.

    Raises:
        RemovalFailed: The buffer is not empty or cannot be removed.
    """
    with _removing(parent, name, shown, quota, tools) as how:
        if how.is_image or how.removes_directory:
            with closing(open_buffer(parent, name)) as directory:
                if names_in(directory):
                    raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        if how.is_image:
            images.remove(parent, name)
        elif not how.removes_directory:
            os.rmdir(name, dir_fd=parent)
            os.fsync(parent)


class _RemovalWay(NamedTuple):
    """Way to remove a buffer."""

    is_image: bool
    removes_directory: bool
    """True if the adapter removes the directory."""


@contextlib.contextmanager
def _removing(parent: int, name: str, shown: str, quota: str, tools: Tools) -> Iterator[_RemovalWay]:
    """Yield how to remove a buffer; release its limits after its removal, also if an earlier attempt removed it.

    Raises:
        RemovalFailed: The buffer cannot be removed.
    """
    held: list[tuple[QuotaAdapter, str]] = []
    try:
        is_image = images.is_there(parent, name)
        if not is_image:
            held = [(adapter, _handle(adapter, parent, name)) for adapter in _removers(quota, tools)]
            held = [(adapter, handle) for adapter, handle in held if handle]
        with contextlib.suppress(FileNotFoundError):
            yield _RemovalWay(is_image, any(adapter.removes_directory for adapter, _ in held))
        for adapter, handle in held:
            adapter.release(parent, name, handle)
    except AdapterFailed as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error}") from error
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error


def _handle(adapter: QuotaAdapter, parent: int, name: str) -> str:
    """Return the handle of a buffer's quota; "" if it has none or does not exist."""
    try:
        return adapter.find(parent, name)
    except FileNotFoundError:
        return ""


def _removers(quota: str, tools: Tools) -> tuple[QuotaAdapter, ...]:
    """Return the adapters that may have limited a buffer."""
    kernel: tuple[QuotaAdapter, ...] = (ProjectAdapter(), BtrfsAdapter())
    if quota in (QUOTA_AUTO, QUOTA_NONE, *(adapter.word for adapter in kernel)):
        return kernel
    return (quota_adapter(quota, tools),)
