"""First start of a founder: before it makes anything of its own it asks the others whether there is a history.

A replica whose data was lost looks like one that never ran, to itself. To found the cluster takes the word of all
founders (`cluster.consensus.state`), so two of three that lost theirs found nothing beside the history that the third
one has. Who asks first is told at once, by name, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from cluster.client import ApiError, Client
from cluster.config import Config, ReplicaConfig
from cluster.schemas import StatusView
from cluster.schemas import operations as ops
from cluster.security import TlsRefused
from cluster.server.storage import StorageRefused, any_of, first_start_mark, member_note
from cluster.system import Clock

LOGGER = logging.getLogger(__name__)

ASK_S: Final = 1.0
"""How long another founder may take to say whether it has a history, seconds. Who cannot be reached now is asked for
its vote later, which it does not give where it has one."""


async def refuse_beside_history(config: Config, name: str, *, first_start: bool, clock: Clock) -> None:
    """Return if `name` may begin without data as far as the others say, or has data; StorageRefused if not."""
    others = [founder for founder in config.founders if founder.name != name]
    if len(others) == len(config.founders) or not _begins(config, name, first_start=first_start):
        return
    try:
        async with Client.from_config(config, name, clock=clock, deadline_s=ASK_S) as client:
            answers = await asyncio.gather(*(_ask(client, other) for other in others))
    except TlsRefused as error:
        LOGGER.warning("the other founders cannot be asked: %s", error)
        return
    for other, answer in zip(others, answers, strict=True):
        if answer is not None and answer.last_index:
            raise StorageRefused(
                f"{name} has no data, and {other.name} has a history: revision {answer.revision}, "
                f"{answer.last_index} entries. {name} must not begin a second one under the same cluster id. "
                f"{_remedy(name, other.name, answer)}"
            )


def _begins(config: Config, name: str, *, first_start: bool) -> bool:
    """Whether the replica would begin without data as a founder."""
    if any_of(config.wal_directory(name)) is not None or member_note(config, name).exists():
        return False
    return first_start or first_start_mark(config, name).exists()


async def _ask(client: Client, other: ReplicaConfig) -> StatusView | None:
    try:
        return await client.call(ops.SHOW_STATUS, replica=other.api, deadline_s=ASK_S)
    except ApiError as error:
        LOGGER.info("%s does not say whether it is new: %s", other.name, error)
        return None


def _remedy(name: str, other: str, answer: StatusView) -> str:
    if answer.leader is not None:
        return (
            f"{answer.leader} leads: run `forebay member replace {name}`, and start this replica with `forebay serve "
            f"--name {name} --join`"
        )
    return (
        f"Nobody leads: if others can be started with their data, start them, then `forebay member replace {name}`. If "
        f"the data of a majority is lost, `forebay recover --name {other}` on the machine of {other} makes a cluster "
        f'of what is left (docs/operations.md, "A lost majority")'
    )
