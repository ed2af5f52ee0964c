"""Rows about replicas: adding, removing, leading, upgrading and moving."""

from __future__ import annotations

import re
import shlex
from typing import Final

from forebay.cluster.client import ApiError
from forebay.cluster.schemas import operations as ops
from forebay.cluster.system import Address
from tests.faults.day2.day import Day, check
from tests.faults.day2.site import FOURTH, Site, until
from tests.faults.local_cluster import AGENTS, REPLICAS

EXIT_REMOVED: Final = 77

MENDS: Final = re.compile(r"`forebay (cluster update [^`]+)`")
"""How `cluster members` says what is left to write down."""


async def replace(day: Day) -> str:
    """A replica's process and disk are gone; it comes back as somebody new."""
    site = day.site
    await site.kill_now("r2")
    site.lose_disk("r2")
    await day.load.commits()
    said = await day.types()
    check("forebay run replica --name r2" in said.err, f"it does not say how to start it: {said.err}")
    new = await site.join("r2")
    check(new.startswith("r2#"), f"it came back as {new}")
    return f"r2 lost its disk and votes again as {new}"


async def add(day: Day) -> str:
    """A machine more: its certificate and its configuration first."""
    site = day.site
    check(FOURTH not in site.members, f"{FOURTH} is a member already")
    await site.prepare_fourth()
    said = await day.types()
    check("forebay run replica --name r4" in said.err, f"it does not say how to start it: {said.err}")
    new = await site.join(FOURTH)
    return f"four vote, {new} among them"


async def remove(day: Day) -> str:
    """Who is removed is told, and ends by itself."""
    site = day.site
    if FOURTH not in site.members:
        await site.prepare_fourth()
        await site.add(FOURTH)
    await day.types()
    code = await site.ended_with(FOURTH)
    check(code == EXIT_REMOVED, f"{FOURTH} ended with {code}: {site.last_words(FOURTH)}")
    await site.retire_fourth()
    return f"three vote, {FOURTH} ended with {code}"


async def transfer(day: Day) -> str:
    """The one that is named leads."""
    site = day.site
    if await site.leader() == "r2":
        await site.typed(["cluster", "transfer", "r3"])
    await day.types()
    leader = await site.leader()
    check(leader == "r2", f"{leader} leads")
    return "r2 leads"


async def upgrade(day: Day) -> str:
    """Each replica, the leader last, and then each agent is stopped and started from another directory. The release
    there is this one: what two releases agree on is shown by tests/golden."""
    site = day.site
    release = site.directory / "release"
    site.install(release)
    leader = await site.leader()
    followers = [name for name in REPLICAS if name != leader]
    asked = ["--data", str(site.home(followers[0])), "--release", str(release)]
    await site.typed(["audit", "redecide", *asked], at=followers[0])
    await site.typed(["audit", "replay", *asked], at=followers[0])
    await site.typed(["cluster", "feature-level"])
    handed_over: list[str] = []
    for name in (*followers, leader):
        while await site.leader() == name:
            await day.types()
            handed_over.append(name)
        await site.stop(name)
        site.releases[name] = release
        site.start(name)
        await site.ready(name)
        await day.load.commits()
    for name in AGENTS:
        await site.stop(name)
        site.releases[name] = release
        site.start(name)

    async def run_from_there() -> bool:
        return all(site.interpreter(name).startswith(str(release)) for name in (*REPLICAS, *AGENTS))

    await until(run_from_there, f"all replicas and agents run from {release}")
    check(handed_over, "nobody led when it was to be stopped, so nothing was handed over: once more")
    return f"{', '.join((*followers, leader))} and the agents run from another directory, {handed_over} handed over"


async def renumber_one(day: Day) -> str:
    """One replica moves to the address of the document while the others go on."""
    site, former = day.site, day.site.net.addresses["r2"]
    new = _address_in(day.command().words({}))
    await _certified(site, "r2", former, new)
    site.net.give("r2", new)
    await day.types()
    site.edit((f'"{former}:', f'"{new}:'))
    await site.stop("r2")
    site.start("r2")
    site.hang_up(name for name in site.processes if name != "r2")
    day.load.move()
    site.net.keep("r2", new)
    await site.whole("r2 has moved")
    await _reached(site, "r2", former, new)
    return f"r2 moved from {former} to {new}, which answers"


async def renumber_all(day: Day) -> str:
    """All machines move at once, and the ledger follows by what `cluster members` says."""
    site = day.site
    moves = {name: (site.net.addresses[name], f"10.2.0.{number}") for number, name in enumerate(REPLICAS, 1)}
    for name, (former, new) in moves.items():
        await _certified(site, name, former, new)
    await site.stop(*AGENTS, *REPLICAS)
    for name, (former, new) in moves.items():
        site.net.give(name, new)
        site.net.keep(name, new)
        site.edit((f'"{former}:', f'"{new}:'))
    day.load.move()
    for name in (*REPLICAS, *AGENTS):
        site.start(name)
    await site.whole("all have moved")
    left = MENDS.findall((await day.types()).err)
    check(len(left) == len(REPLICAS), f"`cluster members` has {len(left)} commands for {len(REPLICAS)} moves")
    for line in left:
        await site.typed(shlex.split(line))
    said = (await day.types()).err
    check("cluster update" not in said, f"written down, and still: {said}")
    for name, (former, new) in moves.items():
        await _reached(site, name, former, new)
    return f"{', '.join(new for _, new in moves.values())} answer, {len(left)} updates that it named were typed"


def _address_in(words: list[str]) -> str:
    return Address.parse(words[words.index("--peer") + 1]).host


async def _certified(site: Site, name: str, former: str, new: str) -> None:
    """Issue a replica's certificate for both hosts, and copy it there."""
    hosts = ["--host", former, "--host", new]
    await site.typed(["cert", "issue", name, "--role", "replica", *hosts, "--replace"])
    site.copy_pair(name)


async def _reached(site: Site, name: str, former: str, new: str) -> None:
    """The new address answers as this replica, the former one does not answer at all."""
    assert site.config is not None
    api = site.config.replica(name).api
    check(api.host == new, f"the operator has {api} for {name}")
    async with site.client() as client:
        said = await client.call(ops.SHOW_STATUS, replica=api)
        check(said.replica == name, f"{said.replica} answers at {api}")
        try:
            await client.call(ops.SHOW_STATUS, replica=Address(former, api.port), deadline_s=1)
        except ApiError:
            return
    check(False, f"somebody answers at {former}")
