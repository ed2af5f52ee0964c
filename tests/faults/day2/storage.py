"""Rows about the storage of replicas: archives, a full journal, and a full disk."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Final

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.requests import CancelRequest, UpdateCommand
from forebay.cluster.server.tlog import CHECKPOINT_NAME, LOG_DIRECTORY
from tests.faults.day2.day import Day, check
from tests.faults.day2.load import request_of
from tests.faults.day2.site import Site, until
from tests.faults.local_cluster import REPLICAS, USER

BULK: Final = 60
COMMENT: Final = "x" * 1000
"""What fills a journal: so many changes of a comment are an entry."""

OK: Final = 200

ASKED_EVERY: Final = 10
"""After how many entries it is tried whether a user is refused, count."""

JOURNAL_FULL: Final = "journal_full"
EXIT_REFUSED: Final = 66
EXIT_FAULT: Final = 70

RETAIN_EVERY_S: Final = 5.0
"""Time between two tries, seconds: each reads archives."""

RETAINED_S: Final = 240.0
"""How long it may take until a state's digest and a checkpoint are recorded behind the last snapshot, seconds."""

KEEP: Final = "1MiB"
"""What `audit retain` leaves of the ledger."""

FILLING: Final = "filling"
"""File that takes what is free on a replica's disk."""


async def archive(day: Day) -> str:
    """A replica that runs is archived, and the archive is verified alone and with the ledger behind it."""
    site = day.site
    into = site.directory / "archives" / "r1" / "a"
    into.parent.mkdir(parents=True, exist_ok=True)
    names = {"/archive/a": str(into)}

    async def published() -> bool:
        return (site.home("r1") / LOG_DIRECTORY / CHECKPOINT_NAME).exists()

    await until(published, "the cluster has published a checkpoint")
    await day.types(at="r1", names=names)
    await day.load.commits()
    await day.types(at="r1", names=names)
    keys = await _keys(site)
    alone = ["audit", "verify", "--archive", str(into), "--keys", str(keys), "--json"]
    found = (await site.typed(alone, at="r1")).json()
    await site.typed(["audit", "verify", "--name", "r1", "--archive", str(into), "--complete"], at="r1")
    held = found["archive"]
    check(found["verified"] and held["entries"] == held["last_index"], f"the archive begins late or is unsound: {held}")
    return f"{held['entries']} entries archived in {held['segments']} segments, verified alone and with the ledger"


async def journal_full(day: Day) -> str:
    """Fill the journals until users are rejected; archive and prune them, and check that users are accepted."""
    site = day.site
    keys = await _keys(site)
    for host in site.hosts():
        archives = [site.directory / "archives" / host / name for name in ("a", "b")]
        for one in archives:
            one.parent.mkdir(parents=True, exist_ok=True)
        file = site.machine(host) / "forebay.toml"
        listed = ", ".join(f'"{one}"' for one in archives)
        table = f'\n[retention]\narchives = [{listed}]\nkeys = "{keys}"\nkeep = "{KEEP}"\n'
        if "[retention]" not in file.read_text():
            file.write_text(file.read_text() + table)
    await _filled(site)
    full = {name: await _fill(site, name) for name in REPLICAS}
    for host in site.hosts():
        await _retained(day, host)

    async def room() -> bool:
        return all([await _fill(site, name) < full[name] / 2 for name in REPLICAS])

    day.load.unrecord()
    await until(room, f"journals are less than half as full as at {full}")
    await day.load.commits()
    return f"journals were {max(full.values()):.0%} full and refused users, pruned they do not"


async def disk_full(day: Day) -> str:
    """A replica's disk is full: it ends, and does not start before there is room; its peers go on meanwhile."""
    site = day.site
    filling = site.home("r1") / FILLING
    free = os.statvfs(site.home("r1"))
    with filling.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_bsize)
    ended = await site.ended_with("r1")
    check(ended == EXIT_FAULT, f"r1 ended with {ended}: {site.last_words('r1')}")
    await day.load.commits()
    site.start("r1")
    refused = await site.ended_with("r1")
    check(refused in (EXIT_REFUSED, EXIT_FAULT), f"r1 ended with {refused}: {site.last_words('r1')}")
    filling.unlink()
    words = day.command().words({})
    check(words == ["run", "replica", "--name", "r1"], f"what is typed here is not {words}")
    site.start("r1")
    await site.ready("r1")
    return f"r1 ended with {ended} and, started while its disk was full, with {refused}; with room it caught up"


async def _retained(day: Day, host: str) -> None:
    """Type the row's command on a machine, with its replica's name, until it has nothing more to say: what may go is
    bound by what the leader writes down about once a minute."""
    words = [host if word == "r1" else word for word in day.command().words({})]

    async def ends() -> bool:
        return (await day.site.typed(words, at=host, code=None)).code == 0

    await until(ends, f"`forebay {' '.join(words)}` ends with 0", patience_s=RETAINED_S, every_s=RETAIN_EVERY_S)


async def _keys(site: Site) -> Path:
    """Write what `audit keys` prints into a file."""
    keys = site.directory / "ledger.keys"
    keys.write_text((await site.typed(["audit", "keys"])).out)
    return keys


async def _fill(site: Site, name: str) -> float:
    assert site.config is not None
    async with site.client() as client:
        return (await client.call(ops.SHOW_STATUS, replica=site.config.replica(name).api)).journal_fill


async def _filled(site: Site) -> None:
    """Change a job over and over, as an operator, until users are refused because journals are full."""
    async with site.client(USER) as user, site.client() as operator:
        job = (await user.call(ops.SUBMIT_JOB, request_of(user, "#!/bin/sh\ntrue\n", "changed", site.work))).job_id
        for number in itertools.count():
            changes = [
                UpdateCommand(command_id=operator.new_command_id(), job_id=job, comment=f"{number}-{at} {COMMENT}")
                for at in range(BULK)
            ]
            results = (await operator.commands(changes)).results
            check(all(one.status == OK for one in results), f"an operator was refused: {results[-1]}")
            if number % ASKED_EVERY == 0 and await _refused(user, site):
                await user.call(ops.CANCEL_JOB, CancelRequest(command_id=user.new_command_id()), id=job)
                return


async def _refused(user: Client, site: Site) -> bool:
    """Say whether a user is refused because a journal is full."""
    try:
        job = (await user.call(ops.SUBMIT_JOB, request_of(user, "#!/bin/sh\ntrue\n", "one", site.work))).job_id
        await user.call(ops.CANCEL_JOB, CancelRequest(command_id=user.new_command_id()), id=job)
    except ApiError as error:
        if error.code == JOURNAL_FULL:
            return True
        raise
    return False
