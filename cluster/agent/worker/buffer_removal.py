"""Removal of a buffer with no more rights than its user has, also while the user's processes still move things into it.

The user's pass empties the directory. The directory is then taken away from the user by descriptor, so that nothing can
be moved in any more, and only what is empty is removed: root deletes no file and no directory that the user might not
have been allowed to delete. What came in between is looked at once more, with the user's rights; what those do not
remove is kept in a directory that only root can enter, and is reported.
"""

from __future__ import annotations

import os
from typing import Final

from cluster.agent.files import KEPT_NAMED_MAX, RemovalFailed, capacity, remove_removable
from cluster.agent.processes import AccountRefused, account_for, acting_as
from cluster.agent.worker.work import Work
from cluster.system import closing, die_with_parent, names_in

PASSES_MAX: Final = 8
"""How often a buffer is given back to its user and emptied once more, count: a process of the user may be moving files
into it all the time."""

_PRIVATE: Final = 0o700


def remove_as_user(work: Work, parent: int, name: str, *, user: str | None, shown: str) -> list[str]:
    """Remove the buffer `name` in the open directory `parent`; return what its user may not remove, by name and owner.

    What is kept lies in a directory that is the agent's from then on. A buffer that an earlier attempt took away is
    given back to `user` for the pass; with None it is removed only if it is empty. Nothing to do if there is no buffer.

    Raises:
        RemovalFailed: something else failed; the message names it.
        ImageRefused: the buffer is an image that cannot be mounted.
    """
    try:
        with closing(capacity.open_buffer(parent, name)) as directory:
            kept = _empty(work, directory, user, shown)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error
    if not kept:
        capacity.remove_empty(parent, name, shown=shown)
    return kept


def remove_as_operator(work: Work, parent: int, name: str, *, shown: str) -> None:
    """Remove a buffer with everything that was in it when it was taken away from its user. RemovalFailed, ImageRefused.

    Nothing to do if there is no buffer.
    """
    try:
        with closing(capacity.open_buffer(parent, name)) as directory:
            _take_away(work, directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise RemovalFailed(f"{shown} cannot be removed: {error.strerror}") from error
    capacity.remove(parent, name, shown=shown)


def _empty(work: Work, directory: int, user: str | None, shown: str) -> list[str]:
    """Empty an open directory as its owner and take it away; return what the owner may not remove."""
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
    raise RemovalFailed(f"{shown} is filled as fast as it is emptied; end the processes of its user on this node")


def _owner(work: Work, directory: int, user: str | None) -> tuple[int, int] | None:
    """Return the user and group ID that an open directory is emptied with, None if no user is known."""
    status = os.fstat(directory)
    if work.accounts != "switch" or status.st_uid != os.geteuid():
        return status.st_uid, status.st_gid
    try:
        account = None if user is None else account_for(work.accounts, user)
    except AccountRefused:
        return None
    return None if account is None else (account.uid, account.gid)


def _remove_as(work: Work, directory: int, owner: tuple[int, int], shown: str) -> list[str]:
    try:
        if work.accounts == "switch":
            os.fchown(directory, *owner)
        os.fchmod(directory, _PRIVATE)
        with acting_as(*owner):
            die_with_parent(work.agent)
            return remove_removable(directory, shown=shown)
    finally:
        # The kernel forgets it whenever the rights of a process change.
        die_with_parent(work.agent)


def _take_away(work: Work, directory: int) -> None:
    """Let nobody but the agent change an open directory. A process that has it open loses its rights, too.

    The owner goes first: afterwards nobody but the agent can undo the mode, which also cuts off access lists.
    """
    if work.accounts == "switch":
        os.fchown(directory, os.geteuid(), os.getegid())
        os.fchmod(directory, _PRIVATE)
