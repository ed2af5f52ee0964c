"""Questions about the past: `job history` and `why --at` over a long ledger, and what the index by job takes.

A replica alone makes the ledger through its proposer: jobs that are staged in, run, staged out and torn down by agents
that this process plays, so many commands under way at once that batches are full, or one at a time. Then somebody in a
process of his own asks over HTTPS, while the longest hold of the replica's loop is watched.

`python -m tests.benchmarks.past ASK` is that process: one path a line, answered with its status and milliseconds.
"""

import asyncio
import http.client
import json
import random
import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop

from forebay.cluster.client.session_ids import SessionIds
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import CONFIG_NAME, Founding, PoolSpec, create_site
from forebay.cluster.schemas.command_ids import new_command_id
from forebay.cluster.security.tls import client_context
from forebay.cluster.serve import Replica
from forebay.cluster.server.storage import allow_first_start
from forebay.cluster.system.address import Address
from forebay.cluster.system.clock import Clock, SystemClock
from forebay.replica.grammar.directives import parse_request
from forebay.replica.messages import commands as c
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import JobRequest
from forebay.replica.model.stages import Stage
from forebay.replica.views.orders import orders_for
from tests.benchmarks.load import VerificationFailed
from tests.benchmarks.users.rows import Found, Row, Say
from tests.ports import free_port

EVENTS = 60_000
"""Events of each ledger if nobody says otherwise, count: some 5,000 jobs, a minute for both ledgers."""

EVENTS_MAX = 20_000_000

TOLD_EVENTS = 500_000
"""How often the maker says how far it is, events."""

PROGRESS_NAME = "made.json"
"""Beside a ledger: how far it is made."""

WAVES = {"full": 512, "single": 1}
"""Kind of ledger -> commands under way at once."""

NODES, CPUS = 16, 64

ASKED = 20
"""Questions of each kind, count."""

REPLAYS = 2
"""Replays of each ledger, count: what is left of it in the page cache is there for the first one, too."""

MOMENTS = 60
"""Moments in the past that are asked about, count."""

DIFFERENCE = 1_000
"""Revisions between the two states that a diff compares, count."""

FIRST_JOB = NODES + 32
"""A revision by which the pools, the nodes, and the first job exist."""

QUIET_S = 5
"""How long nothing is asked, to know what the loop does by itself, seconds."""

NODE_DOWN_S = 86_400
"""The longest that may be said, seconds."""

PACE_S = 0.001
"""How often the watch of the loop wants to run, seconds."""

TIME_LIMIT_S = 3_600
"""Longer than a job runs by any clock, seconds."""

SCRIPT = "#!/bin/sh\n#SBATCH --job-name=bench\ntrue\n"
USER = c.Actor(c.ActorRole.USER, "bench")


class Figures(NamedTuple):
    """What was measured on one ledger."""

    events: int
    entries: int
    revisions: int
    made_s: float
    index_s: float
    index_bytes: int
    ledger_bytes: int
    history_ms: dict[str, list[float]]
    why_ms: list[float]
    near_ms: list[float]
    other_ms: dict[str, list[float]]
    """Questions about what is not one job's, by what is asked."""
    hold_ms: dict[str, float]
    replay_s: list[float] = []
    """How long `forebay audit replay` took, each time."""


class Watch:
    """The longest hold of the loop, in processor time: what others do on the machine holds nobody's loop."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(PACE_S)
            self.longest_s = max(self.longest_s, time.thread_time() - before_s)

    def stop(self) -> float:
        """End it; return the longest hold, milliseconds."""
        self._task.cancel()
        return round(1000 * self.longest_s, 2)


class Asker:
    """A process beside the replica that asks it: the time of a client is no time of the loop."""

    def __init__(self, paths: asyncio.StreamWriter, answers: asyncio.StreamReader) -> None:
        self._paths, self._answers = paths, answers
        self.read = 0
        """Up to which revision the last answer about what happened has looked."""

    async def __call__(self, paths: Iterable[str]) -> list[float]:
        """Ask one after the other; return what each took, milliseconds."""
        took_ms: list[float] = []
        for path in paths:
            self._paths.write(f"{path}\n".encode())
            status, milliseconds, self.read = json.loads(await self._answers.readline())
            if status != 200:
                raise VerificationFailed(f"GET {path} was answered {status}")
            took_ms.append(milliseconds)
        return took_ms


class Maker:
    """Users and agents who make a ledger."""

    def __init__(self, replica: Replica, at_once: int, clock: Clock | None = None) -> None:
        """`clock`: what the replica goes by, where that is not the machine's."""
        self._replica = replica
        self._at_once = at_once
        clock = clock or SystemClock()

        async def open_session() -> int:
            single = bytes.fromhex(new_command_id(clock))
            return (await replica.controller.submit(c.Request(single, USER, c.OpenSession()))).revision

        self._ids = SessionIds(open_session, clock)
        self._nodes = [f"n{number + 1}" for number in range(NODES)]
        self._asked = JobRequest(
            name="bench",
            user=USER.name,
            script=SCRIPT,
            workdir=str(replica.controller.config.file.parent / "results"),
            time_limit_s=TIME_LIMIT_S,
            buffer=parse_request(SCRIPT, "pool=fast capacity=1MiB"),
        )

    async def make(self, revisions: Callable[[], bool]) -> None:
        """Run jobs until `revisions` says that there are enough."""
        for node in self._nodes:
            actor = c.Actor(c.ActorRole.AGENT, node)
            await self._settled(c.Request(b"", actor, c.RegisterNode(node, CPUS, "i", f"disk-{node}")))
        while not revisions():
            await asyncio.gather(*(self._submit() for _ in range(self._at_once)))
            while self._replica.controller.state.unfinished:
                reports = self._reports()
                if not reports:
                    await asyncio.sleep(PACE_S)  # a scheduling pass is to come
                elif self._at_once == 1:
                    for report in reports:
                        await self._settled(report)
                else:
                    await asyncio.gather(*map(self._settled, reports))

    async def _submit(self) -> None:
        command_id = await self._ids.next_id()
        settled = await self._replica.controller.submit(
            c.Request(bytes.fromhex(command_id), USER, c.SubmitJob(self._asked))
        )
        if settled.rejection is not None:
            raise VerificationFailed(settled.rejection.sentence)
        self._ids.acknowledge(command_id)

    def _reports(self) -> list[c.Request]:
        found: list[c.Request] = []
        for node in self._nodes:
            for order in orders_for(self._replica.controller.state, node):
                result: c.OperationResult = c.OperationDone(1, 1)
                if order.stage == "run":
                    result = c.ScriptEnded(JobState.COMPLETED) if order.started else c.ScriptStarted()
                report = c.ReportOperation(node, order.job, order.attempt, Stage[order.stage.upper()], result)
                found.append(c.Request(b"", c.Actor(c.ActorRole.AGENT, node), report))
        return found

    async def _settled(self, request: c.Request) -> None:
        settled = await self._replica.controller.submit(request)
        if settled.rejection is not None:
            raise VerificationFailed(settled.rejection.sentence)


async def founded(config: Config, clock: Clock) -> Replica:
    """Start a replica that is alone, and return it when it leads."""
    replica = Replica(config, "r1", clock=clock)
    await replica.start()
    await replica.controller.wait_applied(1)
    while not replica.controller.leads or not replica.controller.state.revision:
        await asyncio.sleep(0.01)
    return replica


class Made(msgspec.Struct, forbid_unknown_fields=True):
    """How far a ledger is made: what a later run that was given the same directory goes on from."""

    events: int = 0
    made_s: float = 0.0


async def measure(directory: Path, at_once: int, events_max: int, say: Say) -> Figures:
    """Make a ledger of so many events, or what a run before left of it, and ask about it."""
    progress = directory / PROGRESS_NAME
    known = progress.exists()
    made = msgspec.json.decode(progress.read_bytes(), type=Made) if known else Made()
    config = _placed(Config.load(directory / CONFIG_NAME)) if known else cluster_in(directory)
    replica = await founded(config, SystemClock())
    controller = replica.controller
    try:
        await _made(replica, at_once, events_max, made, say)
        say(f"  {made.events} events in {controller.applied_index} entries made in {made.made_s:.1f} s")
        index_s = await _index_built(replica)
        size_bytes = replica.service.past.progress.size_bytes
        say(f"  index built in {index_s:.1f} s, {size_bytes / made.events:.1f} bytes an event")
        found = await _asked(replica, config, (made.events, made.made_s, index_s, size_bytes))
    finally:
        await replica.stop()
        progress.write_bytes(msgspec.json.encode(made))
    return found._replace(replay_s=[await _replayed(config) for _ in range(REPLAYS)])


async def _made(replica: Replica, at_once: int, events_max: int, made: Made, say: Say) -> None:
    """Make what is missing; `made` says how much there is, even where this is interrupted."""
    events, before, began_s = _counted(replica), msgspec.structs.replace(made), time.perf_counter()
    told = 0

    def enough() -> bool:
        nonlocal told
        made.events, made.made_s = before.events + events[0], before.made_s + time.perf_counter() - began_s
        if made.events // TOLD_EVENTS > told:
            told = made.events // TOLD_EVENTS
            say(f"  {made.events} of {events_max} events in {made.made_s:.0f} s")
        return made.events >= events_max

    if not enough():
        try:
            await Maker(replica, at_once).make(enough)
        finally:
            enough()


async def _replayed(config: Config) -> float:
    """Return the seconds that `forebay audit replay` takes, its start among them; VerificationFailed."""
    began_s = time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "forebay.cluster.cli",
            "audit",
            "replay",
            "--data",
            config.storage.directory / "r1",
            "--json",
        ),
        stdout=asyncio.subprocess.DEVNULL,
    )
    if await process.wait():
        raise VerificationFailed(f"`forebay audit replay` ended with status {process.returncode}")
    return time.perf_counter() - began_s


def cluster_in(directory: Path) -> Config:
    """Found a cluster of one replica, which agents that the caller plays report to."""
    results = directory / "results"
    founding = Founding(
        name="bench",
        replicas=1,
        agents=NODES,
        cpus_per_agent=CPUS,
        pools=(PoolSpec("fast", "1TiB", "1MiB", True),),
        users=(USER.name,),
        source_roots=(results,),
        destination_roots=(results,),
        allow_root=True,
    )
    config = _placed(create_site(directory, founding, clock=SystemClock()))
    allow_first_start(config, config.replicas[0].name)
    return config


def _placed(config: Config) -> Config:
    """Give its replica addresses that are free now."""
    (me,) = config.replicas
    placed = msgspec.structs.replace(
        me, peer=Address("127.0.0.1", free_port()), api=Address("127.0.0.1", free_port()), channel=None
    )
    # The agents that this process plays report, and never poll.
    timing = msgspec.structs.replace(config.timing, node_down_s=NODE_DOWN_S)
    return msgspec.structs.replace(config, replicas=(placed,), timing=timing)


def _counted(replica: Replica) -> list[int]:
    """Return a counter of events that are applied from now on."""
    count, append = [0], replica.controller.applied_log.append

    def counting(applied: Any) -> None:
        if applied.batch is not None:
            count[0] += sum(len(entry.events) for entry in applied.batch.entries)
        append(applied)

    replica.controller.applied_log.append = counting  # type: ignore[method-assign]
    return count


async def _index_built(replica: Replica) -> float:
    """Have the index by job made anew; return the seconds it took, the start of its process among them."""
    past, controller = replica.service.past, replica.controller
    await past.stop()
    shutil.rmtree(controller.config.storage.directory / "r1" / "index", ignore_errors=True)
    controller.journal.flush_hints()
    began_s = time.perf_counter()
    past.progress = msgspec.structs.replace(past.progress, index=0)
    past.start()
    while past.progress.index < controller.ledger.applied_index:
        await asyncio.sleep(0.05)
    return time.perf_counter() - began_s


async def _asked(replica: Replica, config: Config, made: tuple[int, float, float, int]) -> Figures:
    controller, chance = replica.controller, random.Random(1)
    last, revision = int(controller.state.next_job) - 1, int(controller.state.revision)
    asker = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.past", str(config.file), str(config.replica("r1").api)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert asker.stdin is not None and asker.stdout is not None
    ask = Asker(asker.stdin, asker.stdout)
    try:
        hold_ms: dict[str, float] = {}
        await ask(["/v1/status"])
        watch = Watch()
        await asyncio.sleep(QUIET_S)
        hold_ms["nothing asked"] = watch.stop()
        watch = Watch()
        history_ms = {
            name: await ask([f"/v1/jobs/{job}/history"] * ASKED)
            for name, job in (("early", 1), ("middle", last // 2), ("late", last))
        }
        hold_ms["history"] = watch.stop()
        watch = Watch()
        why_ms: list[float] = []
        near_ms: list[float] = []
        for _ in range(MOMENTS):
            at = chance.randrange(max(FIRST_JOB, revision // 50), revision)
            job = max(1, last * at // revision - 600)
            why_ms += await ask([f"/v1/jobs/{job}/why?at={at}"])
            near_ms += await ask([f"/v1/jobs/{job}/why?at={max(FIRST_JOB, at - 100)}"])
        hold_ms["why"] = watch.stop()
        watch = Watch()
        other_ms = await _others(ask, revision, chance)
        hold_ms["others"] = watch.stop()
        return Figures(
            *(made[0], controller.applied_index, revision, round(made[1], 1), round(made[2], 1), made[3]),
            (config.wal_directory("r1") / "data.mdb").stat().st_blocks * 512,
            *(history_ms, why_ms, near_ms, other_ms, hold_ms),
        )
    finally:
        asker.stdin.close()
        await asker.wait()


async def _others(ask: Asker, revision: int, chance: random.Random) -> dict[str, list[float]]:
    """Ask what is nobody's job, what differs, who led, and for one user's refusals in all that there is."""
    found: dict[str, list[float]] = {}
    for what, path in (
        ("`history --pool`", "/v1/history?of=pool&name=fast"),
        ("`history --kind rejected`", "/v1/history?kind=rejected"),
        ("`audit leaders`", "/v1/history/leaders"),
    ):
        found[what] = await ask([path] * ASKED)
    moments = [chance.randrange(revision // 50, revision - DIFFERENCE) for _ in range(MOMENTS)]
    found[f"`diff` of {DIFFERENCE:,} revisions"] = await ask(
        f"/v1/diff?from={at}&to={at + DIFFERENCE}" for at in moments
    )
    found["`diff` from a tenth to the end"] = await ask([f"/v1/diff?from={revision // 10}"] * 3)
    took_ms, after = 0.0, 0
    while after < revision:
        took_ms += sum(await ask([f"/v1/history?user=nobody&to={revision}&after={after}"]))
        after = ask.read
    found["`history --user` through all of it"] = [took_ms]
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that so large a share of all is not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report(directory: Path, events: int, batches: Sequence[str], say: Say) -> Found:
    """Measure ledgers of both kinds, made below `directory` where they are not there; return the rows and figures."""
    rows: list[Row] = []
    figures: dict[str, Any] = {}
    for kind in batches:
        say(f"Questions about the past, {kind} batches")
        place = directory / f"past-{kind}"
        one = uvloop.run(measure(place, WAVES[kind], events, say))
        figures[kind] = one._asdict()
        of = f"{one.events:,} events in {kind} batches"
        first = len(rows)
        for name, took_ms in one.history_ms.items():
            rows.append(Row(f"`job history` of {name} job, {of}", f"{statistics.median(took_ms):.1f} ms"))
        rows += [
            Row(f"{what}, {of}", f"{statistics.median(took_ms):.0f} ms, longest {max(took_ms):.0f} ms")
            for what, took_ms in one.other_ms.items()
        ]
        rows += [
            Row(
                f"`why --at` anywhere, {of}",
                f"{statistics.median(one.why_ms):.0f} ms, p99 {percentile(one.why_ms, 0.99):.0f} ms",
            ),
            Row(f"`why --at` 100 revisions before one asked about, {of}", f"{statistics.median(one.near_ms):.0f} ms"),
            Row(
                f"longest hold of the loop meanwhile, {of}",
                f"{max(one.hold_ms[what] for what in ('history', 'why', 'others')):.1f} ms",
            ),
            Row(
                f"`audit replay`, {of}",
                " and ".join(f"{took_s:.1f} s ({one.events / took_s:,.0f} events/s)" for took_s in one.replay_s),
            ),
            Row(
                f"index by job made anew, {of}", f"{one.index_s:.1f} s, {one.index_bytes / one.events:.0f} bytes/event"
            ),
        ]
        for row in rows[first:]:
            say(f"  {row.what:<80} {row.forebay}")
    return Found(rows, figures)


def asker(arguments: Sequence[str]) -> None:
    """Ask each path that standard input says."""
    file, api = arguments
    config, address = Config.load(Path(file)), Address.parse(api)
    connection = http.client.HTTPSConnection(
        address.host, address.port, timeout=30, context=client_context(config.tls_files("operator"))
    )
    for line in sys.stdin:
        began_s = time.perf_counter()
        connection.request("GET", line.strip())
        response = connection.getresponse()
        body = response.read()
        took_ms = 1000 * (time.perf_counter() - began_s)
        print(json.dumps([response.status, took_ms, json.loads(body).get("read", 0)]), flush=True)


if __name__ == "__main__":
    asker(sys.argv[1:])
