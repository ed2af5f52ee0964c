"""Drills on `forebay cluster up` on a busy machine, each compared with the cluster's history.

Busy loops of the lowest priority are the load. A drill may fail or be aborted under it: what it says of that, and its
figures, have to be what the history has. Run by scripts/drills --loopback --load LOOPS.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from forebay.cluster.client import ApiError, Client
from forebay.cluster.config.config import Config
from forebay.cluster.drills.final_checks import CheckImpossible, find_disagreement, read_events, terms_since
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.drills import DrillAnswer
from forebay.cluster.system import SystemClock
from tests.faults.against_history import History, disagreements
from tests.faults.local_cluster import USER, RunFailed
from tests.faults.stops import READY_S, Stops, typed

SCENARIOS = ("switchover", "leader-kill", "leader-hang", "follower-stop", "agent-kill")
"""Scenarios that loopback allows and that are over soon."""

LOOPS_MAX = 64
"""Busy loops, count: a load average above 50."""

LOOP_S = 900
"""A busy loop ends by itself after so long, seconds, whatever becomes of this program."""

IMPATIENT = ("--goal-ms", "500", "--abort-after-s", "5")
"""As an operator who gives no option: under load these are the drills that fail and are aborted."""
PATIENT = ("--goal-ms", "30000", "--abort-after-s", "30", "--abort-if-slower", "0")

OPERATOR_S = 120.0
WAITS = ("--deadline", "60")
"""How long an operator's command waits for an answer: a handshake takes seconds there."""

BURN = """
import os, pathlib, time
os.nice(19)
try:
    # The kernel shares the processors out among sessions first.
    pathlib.Path("/proc/self/autogroup").write_text("19")
except OSError:
    pass
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    pass
"""
"""Busy loop of the lowest priority, which yields to all other processes."""


@contextlib.contextmanager
def load(loops: int) -> Iterator[None]:
    """Keep the processors busy during the block."""
    command = [sys.executable, "-I", "-c", BURN.format(seconds=LOOP_S)]
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        for _ in range(min(loops, LOOPS_MAX))
    ]
    try:
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.wait()


class UnderLoad(Stops):
    """A cluster under `forebay cluster up`, and each drill of it held against the history."""

    def __init__(self, directory: Path, loops: int) -> None:
        super().__init__(directory)
        self.loops = loops
        self.verdicts: Counter[str] = Counter()
        self.disagree: list[str] = []
        self.load_max = 0.0

    async def run(self, rounds: int) -> None:
        """Carry out `rounds` drills of each kind, patient and impatient by turns; RunFailed where words are wrong."""
        self._start(("r1", "r2", "r3", "n1", "n2"))
        async with self.cluster.client(USER, deadline_s=READY_S) as client:
            await client.call(ops.LIST_MEMBERS)
        async with self.cluster.client("operator", deadline_s=OPERATOR_S) as client:
            with load(self.loops):
                for number in range(rounds):
                    for scenario in SCENARIOS:
                        options = PATIENT if (number + SCENARIOS.index(scenario)) % 2 else IMPATIENT
                        await self.compared(client, scenario, options)
        if self.disagree:
            raise RunFailed("; ".join(self.disagree))

    async def compared(self, client: Client, scenario: str, options: tuple[str, ...]) -> None:
        """Carry one out and compare it."""
        plan, ended = self._drilled(scenario, *options)
        self.load_max = max(self.load_max, os.getloadavg()[0])
        self.verdicts[f"{scenario} {ended.verdict}"] += 1
        found = disagreements(ended, await self._history(client, plan, ended))
        recorded = await client.call(ops.SHOW_DRILL, drill=ended.drill)
        if (recorded.verdict, recorded.sentence, recorded.figures) != (ended.verdict, ended.sentence, ended.figures):
            found.append(f"the ledger has {recorded.verdict}: {recorded.sentence}")
        self.disagree += [f"drill {ended.drill}, {scenario}: {one}" for one in found]
        said = "".join(f"\n   DISAGREES: {one}" for one in found)
        print(f"{scenario:<13} of {ended.target}: {ended.verdict}: {ended.sentence}{said}", flush=True)

    def _drilled(self, scenario: str, *options: str) -> tuple[dict[str, Any], DrillAnswer]:
        """Plan a drill until nothing refuses it, carry it out, and return both; RunFailed."""
        command, until_s = self.cluster.command, time.monotonic() + 3 * READY_S
        hold = () if scenario == "switchover" else ("--hold-s", "4")
        while True:
            try:
                plan = typed(command(*WAITS, "drill", "plan", scenario, *hold, "--json"))
                forced = [word for name in self._overridden(plan) for word in ("--force", name)]
                words = (*WAITS, "drill", "plan", scenario, "--target", plan["target"], *hold, *forced, "--json")
                plan = typed(command(*words)) if plan["target"] else plan
                confirmed = (
                    *WAITS,
                    "drill",
                    "run",
                    *words[len(WAITS) + 2 : -1],
                    *options,
                    "--confirm",
                    plan["id"],
                    "--json",
                )
                return plan, msgspec.convert(typed(command(*confirmed)), DrillAnswer)
            except RunFailed:
                # Nobody answers in time, another plan by now, or a precondition that cannot be overridden.
                if time.monotonic() > until_s:
                    raise
                time.sleep(0.5)

    @staticmethod
    def _overridden(plan: dict[str, Any]) -> list[str]:
        return [one["name"] for one in plan["preconditions"] if not one["holds"] and one["may_be_forced"]]

    async def _history(self, client: Client, plan: dict[str, Any], ended: DrillAnswer) -> History:
        clock = SystemClock()
        window: dict[str, Any] = {"from": ended.began, "to": ended.ended}
        rows = [row async for row in read_events(client, **window)]
        terms = await terms_since(client, clock, 0)
        replicas = {replica.name: replica.api for replica in Config.load(self.cluster.file).replicas}
        try:
            differ = await find_disagreement(client, replicas, clock)
        except (CheckImpossible, ApiError) as error:
            raise RunFailed(f"the states after drill {ended.drill}: {error}") from error
        return History(plan["term"], plan["leader"], terms, rows, differ)

    def figures(self) -> dict[str, Any]:
        """Return what is said in the end."""
        return {"verdicts": dict(self.verdicts), "disagreements": len(self.disagree), "load_max": self.load_max}
