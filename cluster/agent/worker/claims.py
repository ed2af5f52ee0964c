"""The staging directories of one transfer: one in each destination directory, claimed before anything is moved.

All of them are claimed at the beginning and kept until the end, so that a late agent which goes on from one destination
to the next finds a newer attempt in each (cluster.agent.transfer.fence).
"""

from __future__ import annotations

import contextlib
import os
from typing import Final, NamedTuple, Self

from cluster.agent.files import Target, opened, opened_parent
from cluster.agent.transfer import Claimant, Item, Kind, TransferFailed, fence, file_message

_CLUSTER_CHARACTERS: Final = 8
"""Digits of a cluster's id in the name of a staging directory, count: clusters may share a destination."""


def claimant_of(cluster: str, job: int, attempt: int, storage_id: str) -> Claimant:
    """Return who claims for an attempt of a job: `storage_id` is the agent's."""
    return Claimant(f"{cluster[:_CLUSTER_CHARACTERS] or 'alone'}-{job}", attempt, storage_id)


class _Claimed(NamedTuple):
    directory: int
    shown: str
    staging: int


class Claims:
    """All of them; as a context manager it closes them, and leaves what is in them to the next attempt."""

    def __init__(self, claimant: Claimant) -> None:
        """Begin with none."""
        self._claimant = claimant
        self._claimed: dict[tuple[int, tuple[str, ...]], _Claimed] = {}

    def __enter__(self) -> Self:
        """Give itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close what is open."""
        while self._claimed:
            claimed = self._claimed.popitem()[1]
            os.close(claimed.staging)
            os.close(claimed.directory)

    def add(self, directory: int, shown: str) -> int:
        """Claim an open directory, and return its staging directory. Fenced, FenceFailed or OSError."""
        return self._claim((directory, ()), os.dup(directory), shown)

    def stage(self, item: Item) -> Item:
        """Return the item with the staging directory of its destination, which is made if it is missing.

        Its source is looked at first: what is not there makes no directory. TransferFailed or PathRefused names what is
        wrong; Fenced, FenceFailed or OSError.
        """
        look_at(item)
        destination, barred = item.destination, item.destination_barred
        parts = destination.parts if item.kind is Kind.DIRECTORY else destination.parts[:-1]
        key = (destination.anchor, parts)
        known = self._claimed.get(key)
        if known is None:
            if item.kind is Kind.FILE and not destination.parts:
                return item
            target = Target(os.dup(destination.anchor), destination.shown, parts)
            with opened(target, forbidden=barred, create=True) as directory:
                staging = self._claim(key, os.dup(directory), target.path)
        else:
            staging = known.staging
        return item._replace(staging=staging)

    def release(self) -> None:
        """Remove them, and what is in them: everything was moved, or nobody wants it. OSError or FenceFailed."""
        for claimed in self._claimed.values():
            fence.sweep(claimed.directory, claimed.shown, self._claimant)

    def tidy(self) -> None:
        """Remove those that are empty; what is in the others the next attempt goes on with."""
        with contextlib.suppress(OSError):
            for claimed in self._claimed.values():
                fence.tidy(claimed.directory, self._claimant)

    def _claim(self, key: tuple[int, tuple[str, ...]], directory: int, shown: str) -> int:
        try:
            staging = fence.claim(directory, shown, self._claimant)
        except BaseException:
            os.close(directory)
            raise
        self._claimed[key] = _Claimed(directory, shown, staging)
        return staging


def look_at(item: Item) -> None:
    """Raise TransferFailed or PathRefused if the item's source is not there."""
    source = item.source._replace(anchor=os.dup(item.source.anchor))
    if item.kind is Kind.DIRECTORY:
        with opened(source, forbidden=item.source_barred):
            return
    with opened_parent(source, forbidden=item.source_barred) as (directory, name):
        try:
            os.stat(name, dir_fd=directory, follow_symlinks=False)
        except OSError as error:
            raise TransferFailed(file_message(source.path, error)) from error
