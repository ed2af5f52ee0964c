"""Demonstration of the main job, from creating a cluster to replaying its ledger. Run by scripts/demo.

Three replicas, two agents, two pools; ten jobs that together ask for more space than there is; the leader is killed
while data is being staged. Exits 0 only if every job ran once and brought back what it must, nothing acknowledged was
lost, all space is free again, the replicas agree, and the ledger tells the same story as the live cluster.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from forebay.cluster.client import ApiError, Client
from forebay.cluster.schemas import operations as ops
from tests.faults import verify
from tests.faults.live import Picture
from tests.faults.local_cluster import USER, LocalCluster, RunFailed
from tests.faults.workload import Workload, submit_words

POOLS = {"fast": "56MiB/8MiB,default", "bulk": "130MB/10MB"}
COPY_RATE = "5MiB"
NUMBERS = 1_500_000
JOBS = ("sort", "sum", "histogram", "digest", "words", "sort", "sum", "digest", "words", "histogram")
JOBS_TIMEOUT_S = 100.0


class Demo:
    """One run."""

    def __init__(self, directory: Path, *, live: bool, seed: int) -> None:
        self.console = Console(stderr=False)
        self.live = live and self.console.is_terminal
        self.cluster = LocalCluster(directory)
        self.seed = seed
        self.submitted: dict[int, str] = {}
        self.held: list[tuple[str, str]] = []
        self.takeover_s = 0.0

    def step(self, text: str) -> None:
        self.console.rule(f"[bold]{text}", align="left", style="cyan")

    def found(self) -> None:
        """Found and start the cluster."""
        self.step("1  Start three replicas and two agents, with mutual TLS")
        self.cluster.found(POOLS, COPY_RATE)
        self.workload = Workload(self.cluster.work, numbers=NUMBERS, seed=self.seed)
        self.cluster.start_all()

    async def submit(self, name: str) -> int:
        """Submit one example as a user would, and return its number."""
        line = self.cluster.command(*submit_words(name, self.cluster.work), identity=USER)
        process = await asyncio.create_subprocess_exec(
            *line, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
        if process.returncode != 0:
            raise RunFailed(f"submitting {name} exited {process.returncode}: {err.decode().strip()}")
        job = int(json.loads(out)["job_id"])
        self.submitted[job] = name
        return job

    async def run(self) -> None:
        """Do everything; RunFailed or TimeoutError if something does not hold."""
        self.found()
        async with self.cluster.client() as client:
            started = time.monotonic()
            leader = (await client.call(ops.LIST_MEMBERS)).leader
            self.console.print(f"   {leader} is the leader after {time.monotonic() - started:.1f} s")
            self.picture = Picture(client, self.console, live=self.live)
            watching = asyncio.create_task(self.picture.run())
            try:
                await self.jobs(client)
            finally:
                watching.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await watching
            await self.check(client)

    async def jobs(self, client: Client) -> None:
        """Submit, kill the leader, start it again, and see every job to its end."""
        picture = self.picture
        self.step(f"2  Submit {len(JOBS)} jobs of docs/examples, which request more space than there is")
        picture.headline = "Jobs wait for space, then for their data, then run"
        # All at once, as many users do, so that they ask for more space than there is on a slow machine too.
        await asyncio.gather(*(self.submit(name) for name in JOBS[:-1]))
        await picture.until(
            lambda: any(0 < t.bytes_done < t.bytes_total for t in picture.transfers) and picture.leader is not None,
            "data being staged",
            30,
        )
        await self.kill_leader(client)
        total = len(JOBS)
        await picture.until(
            lambda: sum(verify.over(job) for job in picture.jobs.values()) == total, "all jobs done", JOBS_TIMEOUT_S
        )
        picture.say(f"all {total} jobs have finished")
        for reason in ("BurstBufferResources", "BurstBufferStageIn"):
            if reason not in picture.reasons_seen:
                raise RunFailed(f"no job was seen waiting with {reason}")

    async def kill_leader(self, client: Client) -> None:
        """SIGKILL the leader, measure until a submit is acknowledged again, and start it again."""
        picture = self.picture
        leader = picture.leader
        assert leader is not None
        self.step(f"3  Kill the leader, {leader}, while data is being staged")
        picture.headline = f"{leader} was killed; its peers elect a new leader"
        self.cluster.kill(leader)
        killed_at = time.monotonic()
        while True:
            try:
                answer = await client.call(ops.LIST_MEMBERS, deadline_s=10)
                break
            except ApiError:
                if time.monotonic() - killed_at > 20:
                    raise
        self.takeover_s = time.monotonic() - killed_at
        picture.say(f"[bold]{answer.leader}[/bold] leads and answers after [bold]{self.takeover_s:.2f} s[/bold]")
        job = await self.submit(JOBS[-1])
        picture.say(f"job {job} was submitted and acknowledged {time.monotonic() - killed_at:.2f} s after the kill")
        self.cluster.start(leader)
        started_at = time.monotonic()
        await picture.until(
            lambda: any(m.name == leader and m.reachable and m.lag_entries == 0 for m in picture.members),
            f"{leader} catching up",
            30,
        )
        picture.say(f"{leader} is back and has caught up {time.monotonic() - started_at:.1f} s after its start")
        picture.headline = "The other jobs continue; none was started twice"

    def hold(self, what: str, sentence: str) -> None:
        self.held.append((what, sentence))
        self.console.print(f"   [green]✓[/green] {sentence}", highlight=False)

    async def check(self, client: Client) -> None:
        """Check what came of it, and let the ledger tell it."""
        self.step("4  Check the results")
        ended = self.cluster.ended()
        if ended:
            raise RunFailed("; ".join(ended))
        failed = {job.job_id: job.state for job in self.picture.jobs.values() if job.state != "COMPLETED"}
        if failed:
            raise RunFailed(f"jobs that did not complete: {failed}")
        for job, name in self.submitted.items():
            self.workload.check_result(name, job)
        self.hold("results", f"{len(self.submitted)} results are correct")
        self.hold("once", await verify.ran_once(client, self.workload, self.submitted, all_complete=True))
        self.hold("capacity", await verify.free_capacity(client))
        agreed, status = await verify.same_digest(self.cluster, client)
        self.hold("agreement", agreed)
        self.step("5  Show the history of a job, and why it waited")
        waits = [
            (job, revision)
            for (job, revision), reason in self.picture.reasons.items()
            if reason == "BurstBufferResources"
        ]
        job, revision = waits[-1]
        print(self.cluster.forebay("job", "history", str(job)), end="")
        self.console.print(f"   $ forebay job why {job} --at {revision}", highlight=False)
        print(self.cluster.forebay("job", "why", str(job), "--at", str(revision)), end="")
        self.hold("why", await verify.why_agrees(client, self.picture.reasons))
        self.step("6  Replay the whole ledger")
        for replica in ("r1", "r2", "r3"):
            self.cluster.forebay("audit", "verify", "--name", replica)
        self.hold("chain", "the hash chains of all three ledgers are intact")
        self.hold("replay", verify.replayed(self.cluster, status))
        self.hold("decisions", verify.redecided(self.cluster))
        self.hold("what-if", verify.gone_through(self.cluster))

    def summary(self, started: float) -> None:
        """Print what held."""
        table = Table(title=f"All checks passed, in {time.monotonic() - started:.0f} s", title_justify="left")
        table.add_column("CHECK")
        table.add_column("RESULT")
        table.add_row("take-over", f"{self.takeover_s:.2f} s after SIGKILL of the leader")
        for what, sentence in self.held:
            table.add_row(what, sentence)
        self.console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__.splitlines()[0])
    parser.add_argument("--keep", action="store_true", help="leave the cluster running and say how to talk to it")
    parser.add_argument("--no-live", action="store_true", help="print changes as lines instead of a live picture")
    parser.add_argument("--directory", type=Path, help="where the cluster lives; default: a temporary directory")
    parser.add_argument("--seed", type=int, default=42, help="of the input data")
    options = parser.parse_args()
    directory = (options.directory or Path(tempfile.mkdtemp(prefix="forebay-demo-"))).resolve()
    if options.directory is not None and directory.exists() and any(directory.iterdir()):
        parser.error(f"{directory} is not empty: name another directory")
    demo = Demo(directory, live=not options.no_live, seed=options.seed)
    started = time.monotonic()
    succeeded = False
    try:
        asyncio.run(demo.run())
        demo.summary(started)
        succeeded = True
    except (RunFailed, ApiError, TimeoutError) as error:
        print(f"demo: FAILED: {error}", file=sys.stderr)
        for line in demo.cluster.ended():
            print(f"demo: {line}", file=sys.stderr)
    except KeyboardInterrupt:
        print("demo: interrupted", file=sys.stderr)
    finally:
        if options.keep and succeeded:
            print(f"The cluster is running. To talk to it:\n  export FOREBAY_CONFIG={demo.cluster.file}")
            print(f"  export PATH={Path(sys.executable).parent}:$PATH\n  forebay queue\n  forebay cluster members")
            pids = " ".join(str(process.pid) for process in demo.cluster.processes.values())
            print(f"To end it:\n  kill {pids}")
        else:
            demo.cluster.stop_all()
            if succeeded and options.directory is None:
                shutil.rmtree(directory)
            else:
                print(f"demo: logs and data are in {directory}", file=sys.stderr)
    return 0 if succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
