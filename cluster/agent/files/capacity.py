"""What the file system holds a buffer to its capacity by: found out, and buffers made, limited and removed with it."""

from __future__ import annotations

import contextlib
import os
from typing import Final, NamedTuple

from cluster.agent.files import project_quota, subvolumes
from cluster.agent.files.removal import remove_tree
from cluster.system import closing, open_directory

WATCH: Final = "watch"
PROJECT_QUOTA: Final = "project_quota"
SUBVOLUME_QUOTA: Final = "subvolume_quota"
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


def make(parent: int, name: str, control: str) -> None:
    """Make a buffer, private and empty, in an open directory. FileExistsError, OSError."""
    if control == SUBVOLUME_QUOTA:
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


def remove(parent: int, name: str, *, shown: str) -> None:
    """Remove a buffer with all that is in it and what limited it, whichever control it was made under. RemovalFailed.

    Nothing to do if it is not there.
    """
    project = group = 0
    with contextlib.suppress(OSError), closing(open_directory(name, dir_fd=parent)) as directory:
        project = project_quota.project_of(directory)
        if subvolumes.is_subvolume(directory):
            group = subvolumes.group_of(directory)
    remove_tree(parent, name, shown=shown)
    with contextlib.suppress(OSError):
        project_quota.release(parent, project)
    if group:
        subvolumes.release(parent, group)
