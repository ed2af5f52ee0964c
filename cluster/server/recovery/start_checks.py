"""Start checks: requests to the other replicas before this replica participates.

A founder without data asks whether the others have a history, because a replica that lost its data cannot know that it
did. Founding the cluster needs the votes of all founders (`cluster.consensus.state`), so two of three that lost their
data cannot found a second cluster beside the third. This check reports the problem at once, and leaves no traces.

Every replica asks whether its incarnation of the cluster has ended. The first frame of a peer would report that too
(`cluster.consensus.transport`). But until then, a restored majority of the previous incarnation could continue it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config import Config, ReplicaConfig
from forebay.cluster.schemas import StatusView
from forebay.cluster.schemas import operations as ops
from forebay.cluster.security import TlsError
from forebay.cluster.server.storage import StorageRefused, any_of, first_start_mark, member_note, note_superseded
from forebay.cluster.system import Clock, start_command
from forebay.wal import Incarnation, parse_lineage

LOGGER = logging.getLogger(__name__)

ASK_S: Final = 1.0
"""Time limit for another replica's status, seconds. Replicas that cannot be reached now are checked later, on the links
between replicas.
"""


async def ask_replicas(
    config: Config, name: str, others: Iterable[ReplicaConfig], *, clock: Clock
) -> dict[str, StatusView]:
    """Return the status of the other replicas by name, without those that do not answer within ASK_S."""
    others = tuple(others)
    if not others:
        return {}
    try:
        async with Client.from_config(config, name, clock=clock, deadline_s=ASK_S) as client:
            answers = await asyncio.gather(*(_ask(client, other) for other in others))
    except TlsError as error:
        LOGGER.warning("the other replicas cannot be asked for their status: %s", error)
        return {}
    return {other.name: answer for other, answer in zip(others, answers, strict=True) if answer is not None}


async def refuse_incarnation_over(config: Config, name: str, mine: Incarnation, *, clock: Clock) -> None:
    """Check that no other replica has a later incarnation of the cluster; if one has, record that durably.

    Raises:
        StorageRefused: This replica's incarnation has ended.
    """
    others = [replica for replica in config.replicas if replica.name != name]
    for other, answer in (await ask_replicas(config, name, others, clock=clock)).items():
        theirs = parse_lineage(f"{config.cluster.id}/{answer.incarnation}")
        if answer.cluster_id != config.cluster.id or theirs is None or theirs[1].number <= mine.number:
            continue
        sentence = (
            f"{name} has incarnation {mine} of the cluster, which has ended: {other} has incarnation "
            f"{answer.incarnation}, begun by `forebay cluster recover` after a majority was lost"
        )
        note_superseded(config, name, sentence)
        raise StorageRefused(
            f"{sentence}. The data of {name} may contain the lost entries: keep its directory for an examination "
            f"(`forebay audit dump --data {config.storage.directory / name}`), move it away, run "
            f"`{config.replica(name).add_command}` and start it with `{start_command('replica', name)}`"
        )


async def _ask(client: Client, other: ReplicaConfig) -> StatusView | None:
    try:
        return await client.call(ops.SHOW_STATUS, replica=other.api, deadline_s=ASK_S, once=True)
    except ApiError as error:
        LOGGER.debug("%s did not return its status: %s", other.name, error)
        return None


async def refuse_beside_history(config: Config, name: str, *, first_start: bool, clock: Clock) -> None:
    """Check that replica `name` has data, or that no other replica reports a history.

    Raises:
        StorageRefused: Another replica has a history.
    """
    others = [founder for founder in config.founders if founder.name != name]
    if len(others) == len(config.founders) or not _begins(config, name, first_start=first_start):
        return
    for other, answer in (await ask_replicas(config, name, others, clock=clock)).items():
        if answer.last_index:
            raise StorageRefused(
                f"{name} has no data, and {other} has a history: revision {answer.revision}, {answer.last_index} "
                f"entries. {name} must not begin a second history with the same cluster ID. "
                f"{_remedy(name, other, answer)}"
            )


def _begins(config: Config, name: str, *, first_start: bool) -> bool:
    """Return whether the replica would start without data as a founder."""
    if any_of(config.wal_directory(name)) is not None or member_note(config, name).exists():
        return False
    return first_start or first_start_mark(config, name).exists()


def _remedy(name: str, other: str, answer: StatusView) -> str:
    if answer.leader is not None:
        return (
            f"{answer.leader} leads: run `forebay cluster replace {name}`, and start this replica with "
            f"`{start_command('replica', name)}`"
        )
    return (
        "There is no leader: start the other replicas that have their data, then run `forebay cluster replace "
        f"{name}`. If the data of a majority is lost, `forebay cluster recover --name {other}` on the machine of "
        f"{other} rebuilds the cluster from its data (docs/operate/lost-majority.md)"
    )
