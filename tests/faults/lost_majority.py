"""Repeated loss of a majority under writes.

Three replicas die at random moments, one is recovered, and its announced losses are compared with the clients' records.

Each round: replicas may die before the others, all end with SIGKILL, and a random one is left. What it has is read from
a copy of its directory, by the journal alone. Then `forebay cluster recover` (which is killed as well, at a random
moment, and said again), a start, and: the cluster has exactly the jobs of that copy; every acknowledged one up to the
revision that the plan named is among them; and a directory of the incarnation before ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from forebay.cluster.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.operations import JOBS_LISTED_MAX
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.events import JobSubmitted, jobs_of
from forebay.wal import EntryKind, Environment, Journal, decode_batch, kind_of
from tests.cluster.server.test_membership import Site, members, voters
from tests.cluster.test_serve import ROOT, request
from tests.simulation.lost_majority import Loss
from tests.simulation.lost_majority import lose_majority as played

NAMES = ("r1", "r2", "r3")
WRITERS = 3
ACKNOWLEDGED = (1, 80)
"""How many jobs are acknowledged before the replicas die, count."""

WRITING_S = (0.1, 1.5)
"""How long the clients go on where some are dead, seconds."""

APART_S = (0.0, 0.3)
"""How far apart they die, seconds."""

RECOVERING_S = (0.05, 1.5)
"""After what time a recovery is killed, seconds: it takes about one."""

PATIENCE_S = 240.0
"""How long anything may take that takes a second on an idle machine."""


class Round(msgspec.Struct, kw_only=True):
    """What came of one round."""

    seed: int
    acknowledged: int = 0
    lost: int = 0
    kept: int = 0
    uncertain: int = 0
    killed_recoveries: int = 0
    unacknowledged_kept: int = 0


class Violation(AssertionError):
    """A promise was broken."""


def check(holds: bool, sentence: str) -> None:
    if not holds:
        raise Violation(sentence)


async def offline(config: Config, *words: str, killed_after_s: float | None = None) -> dict[str, Any] | None:
    """Run `forebay cluster recover` on a machine; return what it printed, None where it was killed before."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "forebay.cluster.cli", "--config", str(config.file)),
        *("cluster", "recover", "--json", *words),
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    communicating = asyncio.create_task(process.communicate())
    if killed_after_s is not None:
        await asyncio.wait({communicating}, timeout=killed_after_s)
        if process.returncode is None:
            process.kill()
    out, errors = await communicating
    if process.returncode == -signal.SIGKILL:
        return None
    check(process.returncode == 0, errors.decode())
    answer: dict[str, Any] = json.loads(out)
    return answer


def jobs_in(directory: Path, config: Config, name: str) -> tuple[set[int], int]:
    """Return the jobs in a journal, by its entries alone, and the revision that they come to."""
    with Environment.open(directory / "wal", cluster_id=config.cluster.id, replica=name, create=False) as environment:
        journal = Journal(environment)
        jobs: set[int] = set()
        revision = 0
        for index in range(journal.first_index, journal.last_index + 1):
            data = journal.entry(index).data
            if kind_of(data) is not EntryKind.BATCH:
                continue
            batch = decode_batch(data)
            if batch.base != revision:
                continue  # void
            revision += len(batch.entries)
            for entry in batch.entries:
                for event in entry.events:
                    if isinstance(event, JobSubmitted):
                        jobs |= {*jobs_of(event)}
        return jobs, revision


async def founded(operator: Client, api: Address) -> None:
    """Wait until a replica has the beginning of the history."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with contextlib.suppress(ApiError):
                if (await operator.call(ops.SHOW_STATUS, replica=api, deadline_s=2)).revision:
                    return
            await asyncio.sleep(0.05)


async def write(site: Site, directory: Path, acknowledged: dict[int, int], number: int) -> None:
    """Submit jobs, one after the other, for as long as somebody answers; note what was acknowledged."""
    async with site.client("alice") as client:
        while True:
            with contextlib.suppress(ApiError):
                answer = await client.call(ops.SUBMIT_JOB, request(client, directory), deadline_s=1)
                acknowledged[answer.job_id] = answer.revision
            await asyncio.sleep(0)


async def lose_majority(directory: Path, seed: int) -> Round:
    """Play one round; Violation where a promise is broken."""
    chance, found = random.Random(seed), Round(seed=seed)
    site = Site(directory)
    acknowledged: dict[int, int] = {}
    try:
        for name in NAMES:
            await site.start(name)
        async with site.client() as operator:
            for replica in site.config.replicas:
                await founded(operator, replica.api)
        writers = [asyncio.create_task(write(site, directory, acknowledged, number)) for number in range(WRITERS)]
        wanted = chance.randint(*ACKNOWLEDGED)
        async with asyncio.timeout(PATIENCE_S):
            while len(acknowledged) < wanted:
                await asyncio.sleep(0.01)
        for name in chance.sample(NAMES, len(NAMES)):
            site.processes[name].kill()
            await asyncio.sleep(chance.choice((0.0, chance.uniform(*APART_S), chance.uniform(*WRITING_S))))
        for name in NAMES:
            await site.processes[name].wait()
        for writer in writers:
            writer.cancel()
        await asyncio.gather(*writers, return_exceptions=True)
        await _recover(site, directory, acknowledged, chance, found)
    finally:
        for process in site.processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        await asyncio.gather(*site.reading.values())
    return found


async def _recover(
    site: Site, directory: Path, acknowledged: dict[int, int], chance: random.Random, found: Round
) -> None:
    survivor, old, gone = chance.sample(NAMES, len(NAMES))
    home = site.config.storage.directory
    copy = directory / "copy"
    shutil.copytree(home / survivor, copy)
    expected, revision = jobs_in(copy, site.config, survivor)
    shutil.rmtree(home / gone)

    plan = await offline(site.config, "--name", survivor)
    assert plan is not None
    check(plan["kept_revision"] == revision, f"the plan says revision {plan['kept_revision']}, the journal {revision}")
    check(sum(plan["jobs"].values()) == len(expected), f"the plan counts {plan['jobs']}, there are {len(expected)}")
    words = ("--name", survivor, "--confirm", plan["plan"], "--by", "drill")
    for _ in range(chance.choice((0, 1, 1, 2))):
        killed = await offline(site.config, *words, killed_after_s=chance.uniform(*RECOVERING_S))
        found.killed_recoveries += killed is None
        now = killed if killed is not None else await offline(site.config, "--name", survivor)
        assert now is not None
        if killed is not None or now["incarnation"] != "1":
            break
        check(now["plan"] == plan["plan"], "a recovery that was killed has changed what is there")
    else:
        await offline(site.config, *words)

    first = chance.random() < 0.5
    if first:  # it runs before the new one does, alone, and is met at the first frame
        await site.start(old)
    await site.start(survivor)
    async with site.client() as operator, site.client("alice") as alice:
        answer = await members(operator, lambda answer: voters(answer) == [survivor] and answer.incarnation != "1")
        if not first:
            await site.start(old)
        code, last = await site.ends(old)
        check(code in (66, 77) and "incarnation" in last, f"{old} of the incarnation before ended with {code}: {last}")
        check(answer.incarnation.startswith("2-"), f"incarnation {answer.incarnation}")
        jobs = await alice.call(ops.LIST_JOBS, limit=JOBS_LISTED_MAX)
        listed = {job.job_id for job in jobs.jobs}
    check(not jobs.truncated, f"{len(expected)} jobs are more than are listed at once")
    check(
        listed == expected,
        f"{sorted(listed - expected)} are in the cluster only, at revision {jobs.revision}, and "
        f"{sorted(expected - listed)} in the journal only, at revision {revision}",
    )
    lost = {job: at for job, at in acknowledged.items() if job not in listed}
    early = {job: at for job, at in lost.items() if at <= plan["lost_after_revision"]}
    check(not early, f"{early} were acknowledged up to revision {plan['lost_after_revision']}, and are lost")
    promised = {job for job, at in acknowledged.items() if at <= plan["lost_after_revision"]}
    check(promised <= listed, "what was known to be committed is not all there")
    found.acknowledged, found.lost, found.kept = len(acknowledged), len(lost), len(listed)
    found.uncertain = plan["uncertain_entries"]
    found.unacknowledged_kept = len(listed - acknowledged.keys())


def simulated(seeds: range) -> int:
    """Play seeds of the simulator (`tests.simulation.lost_majority`), and print the figures."""
    losses, violations = list[Loss](), list[str]()
    for seed in seeds:
        try:
            found = played(seed)
        except AssertionError as error:
            violations.append(f"seed {seed}: {error}")
            print(f"VIOLATION in seed {seed}: {error}", flush=True)
            continue
        if found is not None:
            losses.append(found)
            print(f"seed {seed}: {found}", flush=True)
    figures = {
        "seeds": len(seeds),
        "recovered": len(losses),
        "violations": violations,
        "seeds_with_loss": sum(one.lost > 0 for one in losses),
        **{f"entries_{field}": sum(getattr(one, field) for one in losses) for field in Loss._fields[:-1]},
        "deaths_while_recovering": sum(one.deaths for one in losses),
    }
    print(json.dumps(figures))
    return 1 if violations else 0


def main() -> int:
    """Play rounds, and print the figures as JSON in the last line."""
    parser = argparse.ArgumentParser(prog="scripts/recover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--simulated", type=int, default=0, help="play so many seeds of the simulator instead")
    options = parser.parse_args()
    if options.simulated:
        return simulated(range(options.seed, options.seed + options.simulated))
    clock = SystemClock()
    began_s, rounds, violations = clock.monotonic_s(), list[Round](), list[str]()
    for seed in range(options.seed, options.seed + options.rounds):
        with tempfile.TemporaryDirectory(prefix="forebay-recover-") as scratch:
            try:
                rounds.append(asyncio.run(lose_majority(Path(scratch), seed)))
                print(f"round {seed}: {msgspec.json.encode(rounds[-1]).decode()}", flush=True)
            except Violation as error:
                violations.append(f"seed {seed}: {error}")
                print(f"VIOLATION in round {seed}: {error}", flush=True)
    figures = {
        "rounds": len(rounds) + len(violations),
        "violations": violations,
        "rounds_with_loss": sum(one.lost > 0 for one in rounds),
        "rounds_with_uncertain_entries": sum(one.uncertain > 0 for one in rounds),
        **{
            field: sum(getattr(one, field) for one in rounds)
            for field in ("acknowledged", "lost", "kept", "uncertain", "killed_recoveries", "unacknowledged_kept")
        },
        "seconds": round(clock.monotonic_s() - began_s, 1),
    }
    print(json.dumps(figures))
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
