"""Joining: how a replica without data becomes a member of an existing cluster, under an id that was never used before.

The cluster adds it first (`forebay cluster add`, or `cluster replace` for one that lost its data) and gives it a new
id. That record is the permit to start once without data: the replica asks for its id, notes it durably, and starts.
From then on the note says who it is. `--join` has it wait longer for an answer and report why it may not join; on a
replica that has joined already it has no effect.

Killed at any time in between it goes on joining when it is started again, with `--join` or without: a file `joining`
is there until note and mark of a first start are. It says as whom the replica had joined before, so that whoever lost
his data is not taken for one who had none yet.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from cluster.client import ApiError, Client
from cluster.config import Config
from cluster.schemas import operations as ops
from cluster.security import TlsRefused, is_name
from cluster.server.storage import (
    StorageRefused,
    allow_first_start,
    any_of,
    first_start_mark,
    identity_of,
    member_note,
    starting,
)
from cluster.system import Clock, make_private_directory, replace_private
from wal import FIRST_INCARNATION
from wal import directory as directories

LOGGER: Final = logging.getLogger(__name__)

ASK_S: Final = 30.0
"""How long the cluster may take to say who this replica is, seconds: some elections, and the operator's patience."""


PERMIT_S: Final = 10.0
"""Time limit for an answer to a replica without data that starts without `--join`, seconds: some elections."""

JOINING_NAME: Final = "joining"
"""The file that is there while a replica joins: it holds the id of its former life, nothing if there was none."""


class JoiningRefused(Exception):
    """This replica cannot join now; the message is a sentence with the remedy."""


class _NobodyAnswered(JoiningRefused):
    """No replica could say who this one is: it may ask again."""


async def join(config: Config, name: str, *, clock: Clock) -> str:
    """Ask the cluster who replica `name` is to be, note it, and let it start without data; return its id.

    JoiningRefused, StorageRefused.
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
        # Another process may have joined and started while this one asked: the mark would outlive its data.
        _refuse_if_data(config, name)
        identity = noted.partition(" ")[0]
        if joining.exists() and joining.read_text(encoding="utf-8").strip() == identity:
            _remove(joining)
            raise JoiningRefused(
                f"{name} joined as {identity} before and lost its data since; run `forebay cluster replace {name}` and "
                "start it again"
            )
        _write(note, noted)
        allow_first_start(config, name)
        _remove(joining)  # durably, before there is data that could be lost
    return identity


def has_joined(config: Config, name: str) -> bool:
    """Return whether replica `name` has data: `--join` has no effect then."""
    return any_of(config.wal_directory(name)) is not None


async def is_permitted(config: Config, name: str, *, clock: Clock) -> bool:
    """Return whether replica `name` has neither run nor joined, and the cluster has added or replaced it.

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
    """Whether replica `name` was started with `--join` and has not come as far as to know who it is."""
    kept = (config.wal_directory(name), config.snapshot_directory(name))
    return _joining(config, name).exists() and all(any_of(directory) is None for directory in kept)


def _joining(config: Config, name: str) -> Path:
    return config.storage.directory / name / JOINING_NAME


def _refuse_if_data(config: Config, name: str) -> None:
    """What a former life left would stand against this start; it is kept for an examination, elsewhere."""
    for directory in (config.wal_directory(name), config.snapshot_directory(name)):
        if any_of(directory) is None:
            continue
        raise JoiningRefused(
            f"{directory} holds data, so {name} cannot join as a new member; if another process of {name} has joined "
            f"just now, start it again, otherwise move its directory {directory.parent} away"
        )


async def _ask(config: Config, name: str, clock: Clock, deadline_s: float) -> str:
    """Return the id under which the cluster has added this replica, and behind it the cluster's incarnation if that is
    not the first one.
    """
    try:
        async with Client.from_config(config, name, clock=clock, deadline_s=deadline_s) as client:
            answer = await client.call(ops.LIST_MEMBERS)
    except (ApiError, TlsRefused) as error:
        raise _NobodyAnswered(f"no replica could say who {name} is: {error}") from error
    found = next((member for member in answer.members if member.name == name), None)
    if found is None:
        raise JoiningRefused(f"{name} is no member; run `{config.replica(name).add_command}` first")
    if found.votes:
        raise JoiningRefused(
            f"{name} is a member that votes, and what it promised must not be forgotten; if its data is lost, run "
            f"`forebay cluster replace {name}` first"
        )
    base, _, number = found.id.partition("#")
    if base != name or not is_name(base) or not number.isdigit():
        raise JoiningRefused(f"the cluster knows {name} as {found.id!r}, which is no id of somebody who joins")
    return found.id if answer.incarnation == str(FIRST_INCARNATION) else f"{found.id} {answer.incarnation}"


def _remove(joining: Path) -> None:
    """Remove it durably."""
    try:
        joining.unlink(missing_ok=True)
        directories.sync(joining.parent)
    except OSError as error:
        raise StorageRefused(f"{joining} cannot be removed ({error.strerror})") from error


def _write(note: Path, identity: str) -> None:
    """Write an id into a file durably, whole or not at all."""
    try:
        make_private_directory(note.parent)
        replace_private(note, f"{identity}\n".encode("ascii"))
    except OSError as error:
        raise StorageRefused(f"{note} cannot be written ({error.strerror})") from error
