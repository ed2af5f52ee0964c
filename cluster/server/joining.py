"""Joining: a replica without data becomes a member of an existing cluster, under a new ID.

The operator adds the replica first (`forebay cluster add`, or `cluster replace` after a loss of data), and the cluster
assigns a new ID. This permits one start without data: the replica requests its ID, writes it durably to a note, and
starts. With `--join` the replica waits longer for an answer and reports why it may not join. On a replica that has
already joined, `--join` has no effect.

If the process is killed in between, the next start continues, with or without `--join`: a file `joining` exists until
the note and the first-start mark are written. The file contains the replica's former ID, so that a replica that lost
its data is not mistaken for a new one.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import TlsError, is_name
from forebay.cluster.server.storage import (
    FILE_REMEDY,
    StorageRefused,
    allow_first_start,
    any_of,
    first_start_mark,
    identity_of,
    member_note,
    starting,
)
from forebay.cluster.system import Clock, make_private_directory, replace_private
from forebay.wal import FIRST_INCARNATION
from forebay.wal import directory as directories

LOGGER: Final = logging.getLogger(__name__)

ASK_S: Final = 30.0
"""Time limit for the cluster's answer with `--join`, seconds: several elections; an operator is waiting."""


PERMIT_S: Final = 10.0
"""Time limit for an answer to a replica without data that starts without `--join`, seconds: several elections."""

JOINING_NAME: Final = "joining"
"""File that exists while a replica joins: its former ID, empty if it had none."""


class JoiningRefused(Exception):
    """The replica cannot join now; the message includes the remedy."""


class _NobodyAnswered(JoiningRefused):
    """No replica answered the join request, which may be repeated."""


async def join(config: Config, name: str, *, clock: Clock) -> str:
    """Request the ID of replica `name`, write it to the note, and permit a start without data; return the ID.

    Raises:
        JoiningRefused: The replica cannot join now.
        StorageRefused: The replica's directory or a file in it cannot be used.
    """
    note, joining = member_note(config, name), _joining(config, name)
    with starting(config, name, make=True):
        _refuse_if_data(config, name)
        if not joining.exists():
            _write(joining, identity_of(config, name) if note.exists() else "")
    try:
        noted = await _ask(config, name, clock, ASK_S)
    except _NobodyAnswered:
        raise
    except JoiningRefused:
        _remove(joining)
        raise
    with starting(config, name, make=True):
        # Another process may have joined and started meanwhile: a mark must not lie beside its data.
        _refuse_if_data(config, name)
        identity = noted.partition(" ")[0]
        if joining.exists() and joining.read_text(encoding="utf-8").strip() == identity:
            _remove(joining)
            raise JoiningRefused(
                f"{name} joined as {identity} before, and has lost its data; run `forebay cluster replace {name}` and "
                "start it again"
            )
        _write(note, noted)
        allow_first_start(config, name)
        _remove(joining)  # durable before there is data that could be lost
    return identity


def has_joined(config: Config, name: str) -> bool:
    """Return whether replica `name` has data, so that `--join` has no effect."""
    return any_of(config.wal_directory(name)) is not None


async def is_permitted(config: Config, name: str, *, clock: Clock) -> bool:
    """Return whether the cluster has added or replaced replica `name`, which has neither run nor joined since.

    Nothing is written.
    """
    kept = (config.wal_directory(name), config.snapshot_directory(name))
    if any(any_of(directory) is not None for directory in kept) or first_start_mark(config, name).exists():
        return False
    try:
        await _ask(config, name, clock, PERMIT_S)
    except JoiningRefused as error:
        LOGGER.info("%s has no data, and may not join: %s", name, error)
        return False
    return True


def is_joining(config: Config, name: str) -> bool:
    """Return whether replica `name` began to join and does not have its ID yet."""
    kept = (config.wal_directory(name), config.snapshot_directory(name))
    return _joining(config, name).exists() and all(any_of(directory) is None for directory in kept)


def _joining(config: Config, name: str) -> Path:
    return config.storage.directory / name / JOINING_NAME


def _refuse_if_data(config: Config, name: str) -> None:
    """Reject a join if the directory has data of a former member, which an investigation may need."""
    for directory in (config.wal_directory(name), config.snapshot_directory(name)):
        if any_of(directory) is None:
            continue
        raise JoiningRefused(
            f"{directory} holds data, so {name} cannot join as a new member; if another process of {name} has joined "
            f"just now, start it again, otherwise move its directory {directory.parent} away"
        )


async def _ask(config: Config, name: str, clock: Clock, deadline_s: float) -> str:
    """Return the ID that the cluster assigned to this replica, with the incarnation if it is not the first."""
    try:
        async with Client.from_config(config, name, clock=clock, deadline_s=deadline_s) as client:
            answer = await client.call(ops.LIST_MEMBERS)
    except (ApiError, TlsError) as error:
        raise _NobodyAnswered(f"no replica returned the ID of {name}: {error}") from error
    found = next((member for member in answer.members if member.name == name), None)
    if found is None:
        raise JoiningRefused(f"{name} is not a member; run `{config.replica(name).add_command}` first")
    if found.votes:
        raise JoiningRefused(
            f"{name} is a voter, and must not start without its votes and entries; if its data is lost, run `forebay "
            f"cluster replace {name}` first"
        )
    base, _, number = found.id.partition("#")
    if base != name or not is_name(base) or not number.isdigit():
        raise JoiningRefused(
            f"the cluster knows {name} as {found.id!r}, which is not the ID of a joining member; run `forebay cluster "
            f"replace {name}` and start it again"
        )
    return found.id if answer.incarnation == str(FIRST_INCARNATION) else f"{found.id} {answer.incarnation}"


def _remove(joining: Path) -> None:
    """Remove a file, durable on return."""
    try:
        joining.unlink(missing_ok=True)
        directories.sync(joining.parent)
    except OSError as error:
        raise StorageRefused(f"{joining} cannot be removed ({error.strerror}); {FILE_REMEDY}") from error


def _write(note: Path, identity: str) -> None:
    """Write an ID to a file, atomic and durable on return."""
    try:
        make_private_directory(note.parent)
        replace_private(note, f"{identity}\n".encode("ascii"))
    except OSError as error:
        raise StorageRefused(f"{note} cannot be written ({error.strerror}); {FILE_REMEDY}") from error
