"""Runs every `forebay drill` on three hosts, with an operator's commands. Run by scripts/drills.

Hosts are network namespaces: each has a replica on a file system of its own, a helper, and two of them an agent. Jobs
are under way all the time, and a stopwatch that knows nothing of drills sends writes to every replica. After each
drill: it passed, no script ran twice, results are what they must be, nothing is stopped, cut off, full, slow or left of
a copy, and for how long writes stopped is what the stopwatch saw.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import shlex
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import Config
from forebay.cluster.drills.final_checks import CheckImpossible, find_disagreement
from forebay.cluster.drills.scenarios import SCENARIOS as KNOWN
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.security import Role, issue, load_authority
from forebay.cluster.server.storage import allow_first_start
from forebay.cluster.system import Address, SystemClock, fields_of
from forebay.replica.values import parse_size
from tests.account import OWN
from tests.faults import kernel, verify
from tests.faults.ending import perform
from tests.faults.hosts import CLIENTS, COPY_RATE, JOBS, NODE_DOWN_S, POOLS, Hosts, enter
from tests.faults.local_cluster import AGENTS, FOREBAY, REPLICAS, USER, RunFailed
from tests.faults.network import Network
from tests.faults.stops import AGREES_MS, Stops, Stopwatch
from tests.faults.under_load import UnderLoad
from tests.faults.workload import EXAMPLES, Workload, space_of

PLACES = {"r1": "r1", "r2": "r2", "r3": "r3", "n1": "r1", "n2": "r2", "h1": "r1", "h2": "r2", "h3": "r3"}
"""Who runs on which host; a host is called as its replica."""

HELPER_PORT = 7431
NUMBERS = 300_000
MAP_SIZE, ROOM = "512MiB", "1G"
"""Of journals, and of the disk that each is on: ten rounds write some 300 MB."""

SCENARIOS = tuple(KNOWN)
DRILL_S = 300.0
FORCED = ("--force", "digests")
"""What is overridden: replicas that were started again just now have not compared states yet."""

STALE = ("is outdated", "does not hold")
"""What is said of a plan that is another one by now, or of a target that leads by now."""

MEASURED = "checking every acknowledged write"
"""What a drill says when it has measured, and looks at what is left."""

OVER_S = 180.0


class DrillHosts(Hosts):
    """Three replicas, two agents and three helpers on hosts of their own."""

    def __init__(self, directory: Path, net: Network) -> None:
        super().__init__(directory, net, PLACES)

    def found_on_hosts(self) -> None:
        """Write configuration, certificates and file systems."""
        self.work.mkdir(parents=True)
        options = [f"--pool={name}={sizes}" for name, sizes in POOLS.items()]
        options += [f"--source-root={self.work}/input", f"--destination-root={self.work}", f"--user={self.user}"]
        options += [*([f"--accounts={OWN}"] if OWN else []), "--cpus=4", "--cluster-name=drills", "--base-port=7401"]
        self.forebay("cluster", "init", str(self.directory), *options, config=False)
        text = self.file.read_text().replace("cpus = 4\n", f'cpus = 4\ncopy_rate = "{COPY_RATE}"\n')
        text = text.replace('map_size = "16GiB"', f'map_size = "{MAP_SIZE}"')
        text = text.replace("[timing]\n", f"[timing]\nnode_down_s = {NODE_DOWN_S}\n")
        config = Config.load(self.file)
        authority, tls = load_authority(self.directory / "tls"), self.directory / "tls"
        at = SystemClock().now()
        for replica in config.replicas:
            host = self.net.addresses[replica.name]
            for address in (replica.peer, replica.api):
                text = text.replace(f'"{address}"', f'"{Address(host, address.port)}"')
            issue(authority, tls, role=Role.REPLICA, name=replica.name, at=at, addresses=(host,), replace=True)
        for number, name in enumerate(REPLICAS, 1):
            place = self.net.addresses[name]
            targets = ", ".join(f'"{one}"' for one in (*REPLICAS, *AGENTS) if PLACES[one] == name)
            text += f'[[helper]]\nname = "h{number}"\naddress = "{place}:{HELPER_PORT}"\ntargets = [{targets}]\n'
            issue(authority, tls, role=Role.HELPER, name=f"h{number}", at=at)
        start = json.dumps(["/bin/sh", str(self.directory / "start"), "{name}"])
        text += f'[drill]\nallow = ["process", "network", "disk"]\nstart = {start}\n'
        self.file.write_text(text)
        self.config = config = Config.load(self.file)
        (self.directory / "logs").mkdir()
        with contextlib.suppress(kernel.Unable):
            self.groups = kernel.cgroups_with_disks(self.directory / "cgroup", REPLICAS)
        forebay = f"{shlex.quote(str(FOREBAY))} --config {shlex.quote(str(self.file))}"
        joining = "".join(
            f"[ $1 != {name} ] || echo $$ >{shlex.quote(str(group / 'cgroup.procs'))}\n"
            for name, group in self.groups.items()
        )
        (self.directory / "start").write_text(
            f"cd {shlex.quote(str(self.directory))} || exit\n{joining}"
            f"case $1 in r*) kind=replica ;; *) kind=agent ;; esac\n"
            f"exec setsid -f {forebay} run $kind --name $1 </dev/null >>logs/$1.log 2>&1\n"
        )
        for name in REPLICAS:
            self.mount(self.directory / name)
            allow_first_start(config, name)

    def mount(self, home: Path) -> None:
        """Give a replica's directory a disk of its own, as far as the kernel can tell."""
        home.mkdir(exist_ok=True)
        image = self.directory / f"{home.name}.img"
        with image.open("wb") as file:
            file.truncate(parse_size(ROOM))
        kernel.tool("mkfs.ext4", "-q", "-m", "0", "-E", "root_owner", str(image))
        kernel.tool("mount", "-o", "loop", str(image), str(home))
        (home / "lost+found").rmdir()
        home.chmod(0o700)

    def stop_everybody(self) -> None:
        """End every process, and what was made for them."""
        super().stop_everybody()
        kernel.remove_cgroups(self.directory / "cgroup", self.groups.values())

    def left_over(self) -> list[str]:
        """Return what is left of a fault."""
        found = []
        for name in (*REPLICAS, *AGENTS):
            pid = self.pid(name)
            fields = None if pid is None else fields_of(pid)
            if fields is None or fields[0] == b"T":
                found.append(f"{name} {'does not run' if fields is None else 'is stopped'}")
        for name in REPLICAS:
            rules = kernel.tool(*Network.inside(name), "nft", "list", "tables")
            found += [f"{name} has {line}" for line in rules.splitlines() if "forebay_drill" in line]
            found += [str(path) for path in (self.directory / name).glob("*.fill")]
        found += [str(path) for path in (self.directory / "drill").glob("*/undo.json")]
        found += [f"{name} has a slow disk" for name, one in self.groups.items() if (one / "io.max").read_text()]
        return found


class Drills:
    """A cluster on hosts, and each drill of it."""

    def __init__(self, directory: Path, net: Network, seed: int, release: Path | None) -> None:
        self.hosts = DrillHosts(directory, net)
        self.seed = seed
        self.release = release
        """What an upgrade is tried to; None: to what runs."""
        self.stops_ms: dict[str, list[float]] = defaultdict(list)
        self.off_ms: dict[str, list[float]] = defaultdict(list)
        self.acknowledged: dict[int, str] = {}

    async def run(self, scenarios: list[str], rounds: int) -> None:
        """Carry each out `rounds` times, then check everything."""
        hosts = self.hosts
        hosts.found_on_hosts()
        if not hosts.groups and "slow-disk" in scenarios:
            print("without slow-disk: cgroup v2 does not have the controller io here", flush=True)
            scenarios = [one for one in scenarios if one != "slow-disk"]
        self.workload = Workload(hosts.work, numbers=NUMBERS, seed=self.seed)
        kernel.enter_network(CLIENTS)
        hosts.start_everybody()
        async with hosts.client(USER, deadline_s=60) as client:
            await client.call(ops.LIST_MEMBERS, deadline_s=60)
            held = await self.submit(client, "sum", hold=True)
            for number in range(rounds):
                for scenario in scenarios:
                    await self.round(client, scenario, held, number)
            await self.agree()
            print(await verify.ran_once(client, self.workload, self.acknowledged, all_complete=True))

    async def agree(self) -> None:
        """See that all replicas held the same state at one revision; RunFailed."""
        assert self.hosts.config is not None
        replicas = {replica.name: replica.api for replica in self.hosts.config.replicas}
        async with self.hosts.client("operator", deadline_s=60) as operator:
            try:
                differ = await find_disagreement(operator, replicas, SystemClock())
            except CheckImpossible as error:
                raise RunFailed(str(error)) from error
        if differ:
            raise RunFailed(differ)

    async def submit(self, client: Client, name: str, *, hold: bool = False) -> int:
        """Submit an example; one that is held is for the probe."""
        script = (EXAMPLES / f"{name}.sh").read_text()
        request = SubmitRequest(
            command_id=client.new_command_id(),
            script=script,
            time_limit_s=300,
            workdir=str(self.hosts.work),
            name=name,
            bb=space_of(name),
            hold=hold,
            begin_at="2040-01-01T00:00:00Z" if hold else None,
        )
        job = (await client.call(ops.SUBMIT_JOB, request)).job_id
        if not hold:
            self.acknowledged[job] = name
        return job

    async def caught_up(self, client: Client) -> None:
        """Wait until every replica can say what it held a moment ago, which its historian answers.

        Where those share one processor with all else they fall behind from drill to drill, and the first question of
        its kind has one load what takes half a minute there: the last ones would be drills of that.
        """
        assert self.hosts.config is not None
        revision = (await client.call(ops.LIST_MEMBERS)).revision - 1
        async with self.hosts.client("operator", deadline_s=OVER_S) as operator:
            for replica in self.hosts.config.replicas:
                await operator.call(ops.SHOW_STATE_DIGEST, at=str(revision), replica=replica.api, stale=True)

    async def round(self, client: Client, scenario: str, held: int, number: int) -> None:
        """Carry one drill out with jobs under way, and look at what is left."""
        await self.caught_up(client)
        jobs = [await self.submit(client, name) for name in JOBS]
        said = await (self.copied(scenario) if KNOWN[scenario].on_copy else self.timed(scenario, held))
        views = await self.over(client, jobs)
        wrong = {job: view.state for job, view in views.items() if view.state != "COMPLETED"}
        if wrong:
            raise RunFailed(f"{scenario}: jobs are not complete: {wrong}")
        for job in jobs:
            self.workload.check_result(self.acknowledged[job], job)
        await verify.ran_once(client, self.workload, jobs, all_complete=True)
        left = self.hosts.left_over()
        if left:
            raise RunFailed(f"{scenario}: left of it: {'; '.join(left)}")
        print(f"{number + 1:2} {scenario:<14} {said}", flush=True)

    async def timed(self, scenario: str, held: int) -> str:
        """Carry out one of the cluster beside the stopwatch; return what both saw."""
        assert self.hosts.config is not None
        stopwatch = Stopwatch(self.hosts.config, USER, held)
        with stopwatch.watching() as stop:
            ended = await self.drill(scenario, heard=lambda note: stop() if MEASURED in note else None)
        figures: dict[str, int] = ended["figures"]
        if ended["verdict"] != "passed" or figures["writes_lost"]:
            raise RunFailed(f"{scenario}: {ended['verdict']}: {ended['sentence']}")
        saw_ms, said_ms = stopwatch.longest_ms(ended), figures["write_stop_us"] / 1000
        self.stops_ms[scenario].append(said_ms)
        self.off_ms[scenario].append(round(said_ms - saw_ms, 1))
        late_ms, normal_ms = figures["client_late_us"] / 1000, figures["control_write_gap_us"] / 1000
        return (
            f"of {ended['target']}: writes stopped {said_ms:7.1f} ms, the stopwatch saw "
            f"{saw_ms:7.1f} ms; the client was {late_ms:.0f} ms late, {normal_ms:.0f} ms without a fault; "
            f"stages again {figures['stages_again']}, runs again {figures['runs_again']}"
        )

    async def copied(self, scenario: str) -> str:
        """Carry out one on a copy, of which nothing is left; return what came of it."""
        more = ["--release", str(self.release)] if scenario == "upgrade" and self.release is not None else []
        with tempfile.TemporaryDirectory(prefix="copy-", dir=self.hosts.directory) as scratch:
            ended = await self.drill(scenario, "--scratch", scratch, *more)
            left = os.listdir(scratch)
        if ended["verdict"] != "passed" or left:
            raise RunFailed(f"{scenario}: {ended['verdict']}: {ended['sentence']}; left of it: {left}")
        self.stops_ms[scenario].append(ended["figures"]["write_stop_us"] / 1000)
        return f"of {ended['target']}: {ended['sentence']}"

    async def drill(
        self, scenario: str, *more: str, heard: Callable[[str], None] = lambda note: None
    ) -> dict[str, Any]:
        """Plan it, confirm it, carry it out, and return how it ended; `heard` is called with each note of it."""
        until_s = time.monotonic() + OVER_S
        while True:
            plan = await self.planned(scenario, until_s, *more)
            # Three hosts, their jobs and two probes share a machine of few cores: writes that are slow end no drill.
            goal_ms = "5000" if not KNOWN[scenario].on_copy else "60000"
            words = ("--goal-ms", goal_ms, "--abort-after-s", "20", "--abort-if-slower", "0")
            words += (*more, "--confirm", plan["id"], "--json")
            try:
                said = await self.typed(
                    "drill", "run", scenario, "--target", plan["target"], *FORCED, *words, heard=heard
                )
            except RunFailed as error:
                # What did not hold and was overridden does by now, or another one leads: that is another plan.
                if not any(one in str(error) for one in STALE) or time.monotonic() > until_s:
                    raise
                continue
            found: dict[str, Any] = json.loads(said)
            return found

    async def planned(self, scenario: str, until_s: float, *more: str) -> dict[str, Any]:
        """Return a plan that nothing refuses, as soon as there is one."""
        while True:
            plan: dict[str, Any] = json.loads(await self.typed("drill", "plan", scenario, *FORCED, *more, "--json"))
            unmet = [one for one in plan["preconditions"] if not one["holds"] and one["name"] not in plan["forced"]]
            if not unmet:
                return plan
            if time.monotonic() > until_s:
                raise RunFailed(f"{scenario} has no plan: {unmet}")
            await asyncio.sleep(0.5)

    async def typed(self, *words: str, heard: Callable[[str], None] = lambda note: None) -> str:
        """Return what a command of the operator prints on standard output, whatever its exit code; `heard` is called
        with each line of standard error."""
        process = await asyncio.create_subprocess_exec(
            *self.hosts.command(*words), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None and process.stderr is not None
        notes = process.stderr

        async def listen() -> str:
            lines: list[str] = []
            async for line in notes:
                lines.append(line.decode())
                heard(lines[-1])
            return "".join(lines)

        async with asyncio.timeout(DRILL_S):
            out, err = await asyncio.gather(process.stdout.read(), listen())
            await process.wait()
        if not out:
            raise RunFailed(f"forebay {' '.join(words)}: {err.strip()}")
        return out.decode()

    async def over(self, client: Client, jobs: list[int]) -> dict[int, Any]:
        """Wait until jobs are over."""
        until_s = time.monotonic() + OVER_S
        while True:
            with contextlib.suppress(ApiError):
                views = await verify.jobs(client)
                if all(verify.over(views[job]) for job in jobs):
                    return {job: views[job] for job in jobs}
                if time.monotonic() > until_s:
                    raise RunFailed(f"not over: {[(job, views[job].state, views[job].reason) for job in jobs]}")
            await asyncio.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/drills", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="how often each scenario (default: 10)")
    parser.add_argument("--scenario", action="append", choices=SCENARIOS, help="only this one; may be repeated")
    parser.add_argument("--seed", type=int, default=None, help="of the jobs' input (default: drawn)")
    parser.add_argument("--release", type=Path, default=None, help="what `upgrade` tries: the tree of another release")
    parser.add_argument(
        "--loopback", action="store_true", help="switchovers and leader-kills on `forebay cluster up` instead; no root"
    )
    parser.add_argument(
        "--load",
        type=int,
        default=0,
        metavar="LOOPS",
        help="with --loopback: busy loops beside it, and each drill is held against the history",
    )
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else random.SystemRandom().randrange(10**6)
    kernel.end_on_signals()
    if options.loopback:
        directory = Path(tempfile.mkdtemp(prefix="forebay-drills-")).resolve()
        stops = UnderLoad(directory, options.load) if options.load else Stops(directory)
        ended = perform("drills", stops.run(options.rounds), release=stops.release, directory=directory, seed=seed)
        return ended.report(rounds=options.rounds, **stops.figures())
    try:
        net = enter((*REPLICAS, CLIENTS))
    except kernel.Unable as unable:
        print(f"drills: unable: {unable}", file=sys.stderr)
        return kernel.EXIT_UNABLE
    directory = Path(tempfile.mkdtemp(prefix="forebay-drills-")).resolve()
    drills = Drills(directory, net, seed, options.release)
    work = drills.run(options.scenario or list(SCENARIOS), options.rounds)
    ended = perform("drills", work, release=drills.hosts.stop_everybody, directory=directory, seed=seed)
    return ended.report(
        rounds=options.rounds,
        jobs=len(drills.acknowledged),
        write_stop_ms=dict(drills.stops_ms),
        off_from_stopwatch_ms=dict(drills.off_ms),
        within_20_ms=all(abs(one) <= AGREES_MS for row in drills.off_ms.values() for one in row),
    )


if __name__ == "__main__":
    sys.exit(main())
