"""Persistent buffers of the native provider: a directory each in the agent's own, which outlives the jobs that use it.

The owner and its group may read and write it; the owner may change that. Nothing is ever removed through a link.
"""

from __future__ import annotations

import contextlib
import os
from typing import Final

from cluster.agent.files import PERSISTENT, RemovalFailed, remove_tree
from cluster.agent.processes import account_for
from cluster.agent.worker.work import Work
from cluster.system import closing, open_directory
from replica.messages import OperationFailed
from replica.values import name_fault

MODE: Final = 0o770
"""Of the directory of a persistent buffer: its user and their group."""


def carry_out(work: Work) -> OperationFailed | None:
    """Destroy and create what the order says, destroying first; return what failed. Repeating it does no harm."""
    order = work.order
    if not (order.creates or order.destroys):
        return None
    with closing(open_directory(os.path.join(work.home, PERSISTENT))) as parent:
        for unwanted in order.destroys:
            failed = _destroy(parent, unwanted.name)
            if failed is not None:
                return failed
        for wanted in order.creates:
            failed = _create(parent, wanted.name, work)
            if failed is not None:
                return failed
    return None


def _destroy(parent: int, name: str) -> OperationFailed | None:
    try:
        _check(name)
        remove_tree(parent, name, shown=f"the persistent buffer {name}")
    except (RemovalFailed, ValueError) as error:
        return OperationFailed(str(error), operation="destroy_persistent")
    return None


def _create(parent: int, name: str, work: Work) -> OperationFailed | None:
    account = account_for(work.accounts, work.order.user)
    try:
        _check(name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=parent)
        with closing(open_directory(name, dir_fd=parent)) as directory:
            if account.switch:
                os.fchown(directory, account.uid, account.gid)
            os.fchmod(directory, MODE)
            os.fsync(directory)
        os.fsync(parent)
    except ValueError as error:
        return OperationFailed(str(error), final=True, operation="create_persistent")
    except OSError as error:
        sentence = f"the persistent buffer {name} cannot be made: {error.strerror}"
        return OperationFailed(sentence, operation="create_persistent")
    return None


def _check(name: str) -> None:
    """Raise ValueError for what cannot be the name of a directory here; the controller has checked it before."""
    fault = name_fault(name)
    if fault is not None or "/" in name or name in (".", ".."):
        raise ValueError(f"{name!r} cannot name a persistent buffer: it {fault or 'names another directory'}")
