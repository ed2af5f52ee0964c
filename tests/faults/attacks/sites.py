"""Attacked clusters of real processes, and the interface of an attack.

An attack is a coroutine of a cluster and a size. It returns counts of what it did, and raises RunFailed, with what it
got, where it was not refused.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.schemas.requests import BulkCommand, UpdateCommand
from forebay.cluster.security.tls import client_context
from forebay.cluster.system.address import Address
from tests.account import KNOWN
from tests.faults import verify
from tests.faults.bare import BareCluster, held_job
from tests.faults.local_cluster import AGENTS, REPLICAS, LocalCluster
from tests.faults.local_cluster import RunFailed as RunFailed

PATIENCE_S: Final = 120.0
"""How long what must happen may take, seconds: a bound against hanging, not a measure of speed."""

IS_ROOT: Final = os.geteuid() == 0

MAIL_PROGRAM: Final = """#!/bin/sh
# Reads a recipient as GNU mailutils does: after a | stands a command, and a path is a file that the mail is added to.
for last; do :; done
case "$last" in
"|"*) sh -c "${{last#|}}" ;;
/*) cat >>"$last" ;;
esac
printf '%s\\n' "$last" >>'{sent}'
"""

LUA_NAME: Final = "burst_buffer.lua"
"""The site's own program, in the directory of the cluster; nobody uses it until an operator chooses the provider."""

LUA_FUNCTIONS: Final = (
    "job_process", "pools", "job_teardown", "setup", "data_in", "real_size", "paths", "pre_run", "post_run", "data_out",
    "get_status",
)  # fmt: skip

Reader: TypeAlias = asyncio.StreamReader
Writer: TypeAlias = asyncio.StreamWriter


def replicas(directory: Path) -> BareCluster:
    """Return three replicas that send mail with a program that reads addresses as GNU mailutils does."""
    site = BareCluster(directory)
    # A storm keeps the machine busy: who leads is to be deposed for being held, not for being one of many.
    site.found(settings="election_min_ms = 1000\nelection_max_ms = 2000")
    program = directory / "mail"
    program.write_text(MAIL_PROGRAM.format(sent=directory / "sent"))
    program.chmod(0o755)
    _append(site, f'[mail]\nprogram = "{program}"\n\n[limits]\ncommands_per_minute = 1000000')
    site.start_all()
    return site


def small_journals(directory: Path) -> BareCluster:
    """Return three replicas whose journals are as small as can be, and that count nothing of what a user asks."""
    site = BareCluster(directory)
    site.found(settings='map_size = "16MiB"')
    _append(site, '[limits]\ncommands_per_minute = 10000000\ncommand_bytes_per_minute = "1TiB"\nscripts = "1TiB"')
    site.start_all()
    return site


def whole(directory: Path) -> LocalCluster:
    """Return replicas and agents as `forebay cluster init` makes them where it is told nothing of accounts."""
    user = pwd.getpwnam(KNOWN) if IS_ROOT else pwd.getpwuid(os.geteuid())
    # Their users pass through it on the way to their buffers.
    directory.mkdir(mode=0o755)
    site = LocalCluster(directory, user=user.pw_name)
    # The full size of one attack fills a buffer of 391 MiB.
    site.found({"fast": "512MiB/1MiB,default"}, "2GiB", accounts=None)
    # Whoever jobs run as says here what he could do.
    site.work.chmod(0o777)
    lua = directory / LUA_NAME
    lua.write_text("".join(f"function slurm_bb_{name}(...) return slurm.SUCCESS, '' end\n" for name in LUA_FUNCTIONS))
    with site.file.open("a") as file:
        file.write(f'\n[provider]\nlua_script = "{lua}"\n')
    site.start_all()
    return site


def _append(site: BareCluster, text: str) -> None:
    with site.file.open("a") as file:
        file.write(f"\n{text}\n")
    site.config = site.config.load(site.file)


async def until(what: str, condition: Callable[[], bool]) -> None:
    """Wait until a condition holds; RunFailed says what did not become so."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise RunFailed(f"{what} did not come within {PATIENCE_S:g} s") from None


async def connected(site: BareCluster, name: str, who: str) -> tuple[Reader, Writer]:
    """Connect to a replica's API as `who`; OSError or ssl.SSLError where it refuses."""
    place: Address = site.config.replica(name).api
    context = client_context(site.config.tls_files(who))
    return await asyncio.open_connection(place.host, place.port, ssl=context, server_hostname=place.host)


async def ended(reader: Reader) -> bytes:
    """Read until a connection ends, and return what came; RunFailed if it stays open."""
    found = b""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    part = await reader.read(65536)
                except (OSError, ssl.SSLError):
                    return found
                if not part:
                    return found
                found += part
    except TimeoutError:
        raise RunFailed(f"a connection is still open after {PATIENCE_S:g} s") from None


async def works(site: BareCluster, client: Client) -> int:
    """Submit an honest job and return its number; RunFailed if that is refused, or a replica has ended."""
    try:
        job = await client.call(ops.SUBMIT_JOB, held_job(client, "honest"))
    except ApiError as error:
        raise RunFailed(f"an honest submit was refused: {error}") from error
    site.check_running()
    return job.job_id


async def history(client: Client, events: int) -> None:
    """Put so many events at least into the history, with commands that are like any others."""
    job = (await client.call(ops.SUBMIT_JOB, held_job(client, "history"))).job_id
    for _ in range(0, events, 1000):
        commands: Sequence[BulkCommand] = [
            UpdateCommand(command_id=client.new_command_id(), job_id=job, comment=f"{number}") for number in range(1000)
        ]
        await client.commands(commands)


def logged(site: BareCluster) -> str:
    """Return all that the replicas have said."""
    return "".join(site.log(name).read_text(errors="replace") for name in REPLICAS)


async def nodes_are_there(client: Client) -> None:
    """Wait until the agents of all nodes have registered; RunFailed if they do not."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while len((await client.call(ops.LIST_NODES)).nodes) < len(AGENTS):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise RunFailed(f"the agents have not registered within {PATIENCE_S:g} s") from None


async def submitted(
    site: LocalCluster, client: Client, name: str, *lines: str, time_limit_s: int = 600, may_be_refused: bool = False
) -> int:
    """Submit a script of these lines and return the job's number, 0 where it is refused and may be."""
    request = SubmitRequest(
        command_id=client.new_command_id(),
        script="\n".join(("#!/bin/sh", *lines, "")),
        time_limit_s=time_limit_s,
        workdir=str(site.work),
        name=name,
    )
    try:
        return (await client.call(ops.SUBMIT_JOB, request)).job_id
    except ApiError:
        if may_be_refused:
            return 0
        raise


async def run_job(site: LocalCluster, client: Client, name: str, *lines: str) -> JobView:
    """Submit a script as the cluster's user and return the job when it and its buffer are over."""
    return await seen(client, await submitted(site, client, name, *lines), verify.over)


async def seen(client: Client, job: int, condition: Callable[[JobView], bool]) -> JobView:
    """Wait until a job is as the condition says, and return it; RunFailed if it never is."""
    view: JobView | None = None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                view = await client.call(ops.SHOW_JOB, id=job)
                if condition(view):
                    return view
                await asyncio.sleep(0.1)
    except TimeoutError:
        raise RunFailed(f"job {job} is not over after {PATIENCE_S:g} s: {view}") from None
