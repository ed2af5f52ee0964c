"""Kills one process of the cluster at a random moment of the main job in each round. Run by scripts/drill.

Each round submits jobs, waits a random time, sends SIGKILL to one process drawn at random (a replica, its history
service, an agent, an operation of an agent, its fork server, the supervisor of a running script, or the script), starts
replicas and agents again, and waits until every job is over. Then: every acknowledged submit is there, no script was
started or run to its end twice, jobs whose process was not the victim brought back what they must, and all space is
free again.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.schemas.jobs import JobView
from forebay.cluster.schemas.requests import CancelRequest
from tests.faults import verify
from tests.faults.ending import percentiles, perform
from tests.faults.local_cluster import AGENTS, REPLICAS, USER, LocalCluster, RunFailed
from tests.faults.workload import EXAMPLES, Workload, space_of

POOLS = {"fast": "40MiB/8MiB,default", "bulk": "80MB/10MB"}
COPY_RATE = "8MiB"
NUMBERS = 300_000
JOBS = ("sum", "sort", "words", "digest", "histogram", "sum")
MOMENT_S = 7.0
"""The kill comes between 0 and this, seconds after the first submit: about as long as a round's jobs take."""
ROUND_TIMEOUT_S = 90.0
PROCESSES = {
    "operation": "forebay.cluster.agent.worker.worker",
    "supervisor": "forebay.cluster.agent.scripts.supervisor",
    "script": "/script",
    "fork_server": "forebay.cluster.agent.fork_server",
    "history_service": "forebay.cluster.api.past_reads",
}
HARMLESS = ("operation", "fork_server", "history_service")
"""Processes whose end no job notices: an operation is tried again, nothing depends on a fork server once it has forked,
and a history service only reads.
"""
NOBODY = "nobody killed: there was no such process at that moment"
VICTIMS = (*REPLICAS, *AGENTS, *PROCESSES)


class Drill:
    """A cluster, and rounds of kills on it."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.cluster = LocalCluster(directory)
        self.chance = random.Random(seed)
        self.seed = seed
        self.acknowledged: dict[int, str] = {}
        self.excused: set[int] = set()
        self.takeovers_s: list[float] = []
        self.victims: Counter[str] = Counter()

    async def run(self, rounds: int) -> None:
        """Do `rounds` rounds, then the checks on the whole history."""
        self.cluster.found(POOLS, COPY_RATE)
        self.workload = Workload(self.cluster.work, numbers=NUMBERS, seed=self.seed)
        self.cluster.start_all()
        async with self.cluster.client(USER) as client:
            await client.call(ops.LIST_MEMBERS)
            while self.victims.total() < rounds:
                started = time.monotonic()
                victim = await self.round(client)
                took = f"all held after {time.monotonic() - started:.1f} s"
                if victim == NOBODY:
                    print(f"           {victim}; {took}", flush=True)
                    continue
                self.victims[victim.split()[0]] += 1
                print(f"round {self.victims.total():3}: killed {victim}; {took}", flush=True)
            _, status = await verify.same_digest(self.cluster, client)
            print(await verify.ran_once(client, self.workload, self.acknowledged, all_complete=False))
            print(verify.replayed(self.cluster, status))
            print(verify.redecided(self.cluster))

    async def round(self, client: Client) -> str:
        """Kill one process at a random moment and check that nothing was lost; return who it was."""
        wanted = self.chance.choice(VICTIMS)
        moment_s = self.chance.uniform(0, MOMENT_S)
        kill = asyncio.create_task(self.kill(wanted, moment_s, client))
        jobs = await asyncio.gather(*(self.submit(client, name) for name in JOBS))
        victim, excused = await kill
        self.excused |= excused
        views = await self.wait_over(client, jobs)
        for job, view in views.items():
            if view.state == "COMPLETED":
                self.workload.check_result(self.acknowledged[job], job)
            elif job not in self.excused:
                raise RunFailed(f"job {job} is {view.state} ({view.system_comment}) though {victim} was killed")
        await verify.ran_once(client, self.workload, jobs, all_complete=not excused)
        await verify.free_capacity(client)
        ended = self.cluster.ended()
        if ended:
            raise RunFailed("; ".join(ended))
        return victim

    async def submit(self, client: Client, name: str) -> int:
        """Submit an example; what is acknowledged must never be lost."""
        request = SubmitRequest(
            command_id=client.new_command_id(),
            script=(EXAMPLES / f"{name}.sh").read_text(),
            time_limit_s=300,
            workdir=str(self.cluster.work),
            name=name,
            bb=space_of(name),
        )
        job = await client.call(ops.SUBMIT_JOB, request)
        self.acknowledged[job.job_id] = name
        return job.job_id

    async def kill(self, wanted: str, moment_s: float, client: Client) -> tuple[str, set[int]]:
        """Kill `wanted` after `moment_s`, or as soon as it is there; return who it was and the jobs that go with it."""
        await asyncio.sleep(moment_s)
        if wanted in PROCESSES:
            return await self.kill_process(wanted)
        leader = None
        with suppress(ApiError):
            leader = (await client.call(ops.LIST_MEMBERS, deadline_s=5)).leader
        self.cluster.kill(wanted)
        killed_at = time.monotonic()
        if wanted == leader:
            await client.call(ops.LIST_MEMBERS, deadline_s=20)
            self.takeovers_s.append(time.monotonic() - killed_at)
        await asyncio.sleep(self.chance.uniform(0, 2))
        self.cluster.start(wanted)
        return f"{wanted}{' (leader)' if wanted == leader else ''} at {moment_s:.2f} s", set()

    async def kill_process(self, kind: str) -> tuple[str, set[int]]:
        """Kill one child process of a replica or an agent; a script or its supervisor takes its job along."""
        until = time.monotonic() + MOMENT_S
        while time.monotonic() < until:
            pids = self.cluster.descendants(PROCESSES[kind])
            self.chance.shuffle(pids)
            for pid in pids:
                job = job_of(pid)
                if not job and kind not in HARMLESS:
                    continue  # not yet or no longer what it is taken for: nobody could say which job goes with it
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    return f"{kind} (pid {pid}, job {job or '?'})", set() if kind in HARMLESS else {job}
            await asyncio.sleep(0.02)
        return NOBODY, set()

    async def wait_over(self, client: Client, jobs: list[int]) -> dict[int, JobView]:
        """Wait until the jobs are over and return them; a job that is not there was lost.

        A job whose script was killed before it wrote what is to be staged out keeps its buffer until somebody decides.
        The drill decides as an operator would: there is nothing to bring back.
        """
        until = time.monotonic() + ROUND_TIMEOUT_S
        while True:
            views = await verify.jobs(client)
            lost = [job for job in self.acknowledged if job not in views]
            if lost:
                raise RunFailed(f"acknowledged jobs are gone: {lost}")
            if all(verify.over(views[job]) for job in jobs):
                return {job: views[job] for job in jobs}
            for job in sorted(self.excused.intersection(jobs)):
                if verify.has_nothing_to_bring(views[job]):
                    request = CancelRequest(command_id=client.new_command_id(), hurry=True)
                    await client.call(ops.CANCEL_JOB, request, id=job)
            if time.monotonic() > until:
                waiting = {job: (views[job].state, views[job].reason) for job in jobs if not verify.over(views[job])}
                raise RunFailed(f"jobs are not over after {ROUND_TIMEOUT_S:.0f} s: {waiting}")
            await asyncio.sleep(0.1)


def job_of(pid: int) -> int:
    """Return the job that a process works for, from its environment or its directory; 0 if neither says."""
    with suppress(OSError, ValueError):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if variable.startswith(b"FOREBAY_JOB_ID="):
                return int(variable.partition(b"=")[2])
    with suppress(OSError, ValueError):
        for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            parts = Path(os.fsdecode(word)).parts
            if "steps" in parts:
                return int(parts[parts.index("steps") + 1])
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/drill", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30, help="how many kills (default: 30)")
    parser.add_argument("--seed", type=int, default=None, help="of victims and moments (default: drawn, and printed)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    directory = Path(tempfile.mkdtemp(prefix="forebay-drill-")).resolve()
    drill = Drill(directory, seed)
    print(f"drill: {options.rounds} rounds, seed {seed}", flush=True)
    release, work = drill.cluster.stop_all, drill.run(options.rounds)
    ended = perform("drill", work, release=release, directory=directory, seed=seed)
    return ended.report(
        rounds=sum(drill.victims.values()),
        acknowledged=len(drill.acknowledged),
        victims=dict(sorted(drill.victims.items())),
        **percentiles(drill.takeovers_s),
    )


if __name__ == "__main__":
    sys.exit(main())
