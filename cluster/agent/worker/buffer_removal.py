"""Remove a buffer with only its user's rights, even while the user's processes still move files into it.

A first pass, with the user's rights, empties the directory. The agent then takes the directory over by descriptor, so
that nothing more can be moved in, and removes it only if it is empty. Root thus never deletes a file or directory that
the user may not have been allowed to delete. Content that arrived in between gets another pass with the user's rights;
content that remains is kept in a directory only root can enter, and reported.
"""

from __future__ import annotations

import os
from typing import Final

from forebay.cluster.agent.files import KEPT_NAMED_MAX, RemovalFailed, capacity, remove_removable
from forebay.cluster.agent.processes import AccountRefused, account_for, acting_as
from forebay.cluster.agent.worker.task import WorkerTask
from forebay.cluster.system import closing, die_with_parent, names_in
from forebay.replica.model import QUOTA_AUTO

PASSES_MAX: Final = 8
"""Limit on passes over one buffer, count: a process of the user may keep moving files into it."""

_PRIVATE: Final = 0o700


def remove_as_user(
    work: WorkerTask, parent: int, name: str, *, user: str | None, shown: str, quota: str = QUOTA_AUTO
) -> list[str]:
    """Remove the buffer `name` in the open directory `parent`; return paths and owners of what its user may not remove.

    Kept content lies in a directory owned by the agent. A buffer that an earlier attempt took over is given back to
    `user` for the pass; with None it is removed only if it is empty. A missing buffer is not an error. `quota` is the
    adapter of its shared filesystem.

    Raises:
        RemovalFailed: Something could not be removed for another reason; the message names it.
        ImageFailed: The buffer is an image that cannot be mounted.
    """
    try:
        with closing(capacity.open_buffer(parent, name)) as directory:
            kept = _empty(work, directory, user, shown)
    except FileNotFoundError:
        # An earlier attempt may have been interrupted before it removed the limits.
        kept = []
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error
    if not kept:
        capacity.remove_empty(parent, name, shown=shown, quota=quota, tools=work.tools)
    return kept


def remove_as_operator(work: WorkerTask, parent: int, name: str, *, shown: str, quota: str = QUOTA_AUTO) -> None:
    """Remove a buffer with everything it held when it was taken from its user. A missing buffer is not an error.

    Raises:
        RemovalFailed: The buffer cannot be removed.
        ImageFailed: The buffer is an image that cannot be mounted.
    """
    try:
        with closing(capacity.open_buffer(parent, name)) as directory:
            _take_away(work, directory)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error
    capacity.remove(parent, name, shown=shown, quota=quota, tools=work.tools)


def _empty(work: WorkerTask, directory: int, user: str | None, shown: str) -> list[str]:
    """Empty an open directory as its owner, then take it over; return paths that the owner may not remove."""
    owner = _owner(work, directory, user)
    for _ in range(PASSES_MAX):
        kept: list[str] = []
        try:
            if names := names_in(directory):
                if owner is None:
                    return [f"{shown}/{name}" for name in sorted(names)[:KEPT_NAMED_MAX]]
                kept = _remove_as(work, directory, owner, shown)
        finally:
            _take_away(work, directory)
        if kept or not names_in(directory):
            return kept
    raise RemovalFailed(
        f"files are added to {shown} as fast as they are removed; end the processes of its user on this node"
    )


def _owner(work: WorkerTask, directory: int, user: str | None) -> tuple[int, int] | None:
    """Return the user and group ID to empty an open directory with, or None if the user is unknown."""
    status = os.fstat(directory)
    if work.accounts != "switch" or status.st_uid != os.geteuid():
        return status.st_uid, status.st_gid
    try:
        account = None if user is None else account_for(work.accounts, user)
    except AccountRefused:
        return None
    return None if account is None else (account.uid, account.gid)


def _remove_as(work: WorkerTask, directory: int, owner: tuple[int, int], shown: str) -> list[str]:
    try:
        if work.accounts == "switch":
            os.fchown(directory, *owner)
        os.fchmod(directory, _PRIVATE)
        with acting_as(*owner):
            die_with_parent(work.agent)
            return remove_removable(directory, shown=shown)
    finally:
        # The kernel clears the parent-death signal when credentials change.
        die_with_parent(work.agent)


def _take_away(work: WorkerTask, directory: int) -> None:
    """Restrict an open directory to the agent, also for processes that have it open.

    The owner changes first: afterwards only the agent can change the mode, which also disables access lists.
    """
    if work.accounts == "switch":
        os.fchown(directory, os.geteuid(), os.getegid())
        os.fchmod(directory, _PRIVATE)
