"""Ends of a transfer at any system call: cancelled, orphaned, killed, stopped, stalled.

It ends at once, no process survives, no temporary file stays at the destination, and the job can end or continue.
"""

import asyncio
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.cluster.agent.limits import WORKER_GRACE_S
from forebay.cluster.agent.operation import WorkerOperation
from forebay.cluster.agent.worker.task import Outcome
from forebay.cluster.system.processes import descendants, send
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.orders import SpecialTransfers
from forebay.replica.model.transfers import TransferRules
from tests.faults.tracing import EVERY, Action, Calls, Plan, Tracer, build
from tests.faults.transfers.harness import JOB, STAGES, Broken, Harness, Inconclusive, Story, judge, poll, said
from tests.faults.transfers.kills import plant, plant_old, wait_until_gone

CANCELLED, LEFT, STOPPED, STALLED, CUT_DOWN = (
    "cancelled", "left by its agent", "stopped, and cancelled", "stopped, and noticed", "one of its processes killed"
)  # fmt: skip
WAYS = (CANCELLED, LEFT, STOPPED, STALLED, CUT_DOWN)

ENDED_S = 1.0
"""Seconds in which it has to be over."""

SLACK_S = 1.0
"""What a busy machine, and a tracer, may add to it."""

STALL_S = 2
"""Seconds without a sign of life after which it is late."""

WATCHED = EVERY & ~Calls.OTHER
"""Calls at which it is ended: those about a file, so that each phase has its share."""

HELPED_FILES = 700
"""Small files, count: enough for helper processes."""


class Mover(NamedTuple):
    """Who moves what."""

    name: str
    backend: str = ""
    helped: bool = False
    """Whether there are many files, so that helpers copy them."""
    commands: bool = False
    verify: str = "digest"


MOVERS = (
    Mover("native"),
    Mover("helpers", helped=True),
    Mover("read back", verify="read_back"),
    Mover("rsync", backend="rsync"),
    Mover("rclone", backend="rclone"),
    Mover("commands", commands=True),
)


NAMES = tuple(mover.name for mover in MOVERS)


class Size(NamedTuple):
    """How much is done."""

    points: int
    """Calls at which each transfer is ended, in each way and stage."""
    ways: tuple[str, ...] = WAYS
    movers: tuple[str, ...] = NAMES


TINY = Size(points=1, ways=(CANCELLED,), movers=("helpers",))
REFERENCE = Size(points=6, ways=(CANCELLED,), movers=("native",))
SMALL = Size(points=3)
FULL = Size(points=12)


def plant_many(directory: Path) -> None:
    """Make a tree of which helpers copy the most."""
    shutil.rmtree(directory, ignore_errors=True)
    for number in range(HELPED_FILES):
        below = directory / f"d{number % 3}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"file-{number}").write_bytes(b"%d" % number * (number % 50))


def prepare(harness: Harness, mover: Mover, stage: str, seed: int) -> Story:
    """Bring a harness to where a stage begins, and return what has to become of it."""
    harness.clear()
    source, destination = harness.places(stage)
    if mover.helped:
        plant_many(source)
    else:
        plant(source, seed)
    if stage == "stage_out" and not mover.helped:
        plant_old(destination)
    return Story(stage, poll(source), poll(destination))


def fields_of(harness: Harness, mover: Mover, stage: str, way: str) -> dict[str, Any]:
    """Return what an order has beside its transfers."""
    rules = TransferRules(verify=mover.verify)
    if way == STALLED:
        rules = msgspec.structs.replace(rules, stall_s=STALL_S)
    fields: dict[str, Any] = {"rules": rules}
    if mover.commands:
        inside = '"$DW_JOB_STRIPED"/data'
        ways = (harness.source, inside) if stage == "stage_in" else (inside, harness.destination)
        # A set-user-ID bit is for the mover to leave out; what a command of the user's own copies may keep it.
        command = (
            f"mkdir -p {ways[1]} && cp -r --remove-destination --preserve=mode,timestamps {ways[0]}/. {ways[1]}/ "
            f"&& find {ways[1]} -type f -perm /6000 -exec chmod ug-s {{}} +"
        )
        fields |= {
            "transfers": (),
            "special": SpecialTransfers(commands=(command,)),
        }
    return fields


class Bench(NamedTuple):
    """What one case needs."""

    harness: Harness
    tracer: Tracer
    mover: Mover
    stage: str
    way: str

    def order(self) -> Any:
        """Return the next order."""
        return self._order(self.way)

    def _order(self, way: str) -> Any:
        fields = fields_of(self.harness, self.mover, self.stage, way)
        return self.harness.order(self.stage, fields.pop("transfers", None), **fields)

    def count(self, seed: int) -> int:
        """Do it in peace, and return how many calls it makes."""
        prepare(self.harness, self.mover, self.stage, seed)
        self.tracer.set(Plan(classes=WATCHED, needle=str(self.harness.directory)))
        outcome = asyncio.run(self.harness.run_transfer(self.order()))
        wait_until_gone(self.tracer)
        if not isinstance(outcome, OperationDone):
            raise Broken(f"in peace, it {said(outcome)}")
        return self.tracer.counted

    def end_at(self, call: int, seed: int, *, goes_on: bool) -> float:
        """End it at a call and see what is left; then let it go on, or tear the job down. Return how long it took."""
        story = prepare(self.harness, self.mover, self.stage, seed)
        held = Action.KILL_ONE if self.way == CUT_DOWN else Action.HOLD
        self.tracer.set(Plan(held, WATCHED, needle=str(self.harness.directory), skip=call))
        ended: list[tuple[float, str]] = []
        beside = None if self.way == CUT_DOWN else self._ender(ended, wait_s=0.02 * (call % 2))
        try:
            outcome = asyncio.run(self.harness.run_transfer(self.order(), beside=beside))
        finally:
            over_s = time.monotonic()
            hit, where = self.tracer.hits > 0 or bool(ended), self.tracer.last
            self.tracer.set(Plan(needle="-"))
        took_s = 0.0
        for began_s, held_at in ended:
            took_s, where = over_s - began_s, held_at
        try:
            wait_until_gone(self.tracer)
            if left := descendants(os.getpid()):
                raise Broken(f"processes {left} are left")
            if not hit:
                if not isinstance(outcome, OperationDone):
                    raise Broken(f"nothing happened, and it {said(outcome)}")
                return 0.0
            self._check(outcome, story, took_s)
            if goes_on:
                self._go_on(story)
            self._tear_down(story)
        except Broken as error:
            raise Broken(f"{self.mover.name}, {self.stage}, {self.way} at call {where!r}: {error}") from error
        return took_s

    def _ender(self, ended: list[tuple[float, str]], *, wait_s: float) -> Callable[[WorkerOperation], Any]:
        async def end(operation: WorkerOperation) -> None:
            while not self.tracer.hits:
                await asyncio.sleep(0.002)
            if self.way in (STOPPED, STALLED):
                for pid in descendants(os.getpid()):
                    send(pid, signal.SIGSTOP)
            ended.append((time.monotonic(), self.tracer.last))
            if self.way != STALLED:
                operation.end(resuming=self.way == LEFT)
                # The signal arrives while it stands in the call, or as soon as it is out of it.
                await asyncio.sleep(wait_s)
            self.tracer.set(Plan(needle="-"))

        return end

    def _check(self, outcome: Outcome | None, story: Story, took_s: float) -> None:
        """Check what it says, how long it took, and what it left."""
        most_s = ENDED_S + SLACK_S + (STALL_S * 1.5 if self.way == STALLED else 0)
        if took_s > most_s:
            raise Broken(f"it was over {took_s:.1f} s later")
        if self.way in (STALLED, CUT_DOWN) and isinstance(outcome, OperationFailed):
            if outcome.final:
                raise Broken(f"it is final: {outcome.message}")
            if self.way == STALLED and "no progress" not in outcome.message:
                raise Broken(f"it {said(outcome)}")
        elif outcome is not None and not isinstance(outcome, OperationDone):
            raise Broken(f"it {said(outcome)}")
        source, destination = self.harness.places(self.stage)
        if not self.mover.commands:
            judge(story, source, destination, complete=isinstance(outcome, OperationDone))
        left = self.left()
        if left and self.way == CANCELLED and took_s < WORKER_GRACE_S:
            # One that takes longer, on a busy machine, is killed, and leaves it to the teardown.
            raise Broken(f"it left {left[:3]}")
        record = self.harness.directory / "node" / "leftovers" / str(JOB)
        if left and not record.exists():
            raise Broken(f"it left {left[:3]}, and nobody knows")

    def left(self) -> list[str]:
        """Return the temporary files and directories that are left outside of the buffer."""
        return [] if self.stage == "stage_in" else sorted(map(str, self.harness.destination.rglob(".forebay-*")))

    def _go_on(self, story: Story) -> None:
        # This one has all the time that a busy machine needs.
        outcome = asyncio.run(self.harness.run_transfer(self._order(CANCELLED)))
        wait_until_gone(self.tracer)
        if not isinstance(outcome, OperationDone):
            raise Broken(f"the attempt after it {said(outcome)}")
        judge(story, *self.harness.places(self.stage), complete=True)

    def _tear_down(self, story: Story) -> None:
        outcome = self.harness.operate("teardown", [])
        if not isinstance(outcome, OperationDone):
            raise Broken(f"the teardown {said(outcome)}")
        if left := self.left():
            raise Broken(f"after the teardown there is {left[:3]}")
        node = self.harness.directory / "node"
        kept = [path for path in node.glob(f"*/{JOB}*") if path.parent.name not in ("receipts", "spare")]
        if kept:
            raise Broken(f"after the teardown the agent still has {kept[:3]}")
        if self.stage == "stage_in" and poll(self.harness.source) != story.source:
            raise Broken("its source has changed")


def endings(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """End transfers in all ways that are asked for; Broken at the first broken promise."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / "endings", tracer=tracer, reference=reference)
    chance = random.Random(seed)
    found: dict[str, Any] = {}
    slowest: dict[str, float] = {}
    try:
        for mover in MOVERS:
            if mover.name not in size.movers or (mover.backend and shutil.which(mover.backend) is None):
                continue
            harness.backend = mover.backend
            for stage in STAGES:
                calls = Bench(harness, tracer, mover, stage, CANCELLED).count(seed)
                if calls < size.points:
                    raise Inconclusive(f"{mover.name}, {stage} makes {calls} calls only")
                for way in size.ways:
                    bench = Bench(harness, tracer, mover, stage, way)
                    # One that is stalled is waited for.
                    points = max(1, size.points // 8) if way == STALLED else size.points
                    for number in range(points):
                        call = (number * calls + chance.randrange(calls)) // points
                        took_s = bench.end_at(call, seed, goes_on=number % 2 == 0)
                        slowest[way] = max(slowest.get(way, 0.0), took_s)
                        found[mover.name] = found.get(mover.name, 0) + 1
                print(f"endings: {mover.name}, {stage}: {found} {slowest}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    return {**found, "over_after_s_max": {way: round(took_s, 2) for way, took_s in slowest.items()}}
