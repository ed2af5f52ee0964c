"""Kills of the agent at any system call of a transfer.

After a restart, the destination is complete or the job is torn down, without leftovers.
"""

import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.system.processes import descendants
from forebay.replica.model.orders import Order
from tests.faults.tracing import Action, Plan, Tracer, build
from tests.faults.transfers.agent import Desk
from tests.faults.transfers.endings import HELPED_FILES, WATCHED, plant_many
from tests.faults.transfers.harness import JOB, STAGES, Broken, Harness, Story, judge, poll
from tests.faults.transfers.kills import plant, plant_old, wait_until_gone

AGENT = Path(__file__).with_name("agent.py")

KILLED, ALONE, TOLD, TOLD_TWICE = "killed with all", "killed alone", "told to end", "told to end, and killed"
WAYS = (KILLED, ALONE, TOLD, TOLD_TWICE)

ANSWER_S = 60.0
"""Seconds for something that nothing hinders: a bound against hanging, not a measure of speed."""

ENDED_S = 30.0
"""Seconds in which an agent that is told to end has to be gone, on a busy machine and under a tracer."""


KEPT = "receipts", "spare"
"""What an agent keeps when a job is gone; the numbers of the latter are no jobs'."""


class Size(NamedTuple):
    """How much is done."""

    points: int
    """Calls at which it ends, for each way and stage."""
    ways: tuple[str, ...] = WAYS
    helped: tuple[bool, ...] = (False, True)
    stages: tuple[str, ...] = STAGES


TINY = Size(points=1, ways=(KILLED,), helped=(False,), stages=("stage_out",))
SMALL = Size(points=3)
FULL = Size(points=12)


class Node:
    """A directory for an agent, and the file that is its controller."""

    def __init__(self, harness: Harness, tracer: Tracer, desk: Path) -> None:
        # The agent is to have the directory.
        harness.close()
        self.harness = harness
        self.tracer = tracer
        self.desk = desk
        self.log = desk.with_suffix(".log")
        self._before = ""

    def order(self, *stages: str) -> None:
        """Say what is to be done, one after the other."""
        before = Desk.read(self.desk) if self.desk.exists() else Desk(orders=())
        orders = [self._order(stage) for stage in stages]
        Desk(
            orders=tuple(orders), attempt=before.attempt + 1, revision=before.revision + 1, instance=before.instance
        ).write(self.desk)

    def _order(self, stage: str) -> Order:
        return self.harness.order(stage, [] if stage == "teardown" else None)

    def start(self) -> subprocess.Popen[bytes]:
        """Start an agent that is traced, with all its workers."""
        self._before = Desk.read(self.desk).instance
        words = [str(self.tracer.program), str(self.tracer.file), "--", sys.executable, "-P", str(AGENT)]
        with self.log.open("ab") as log:
            log.write(f"-- {shlex.join(words)}\n".encode())
            return subprocess.Popen(
                [*words, str(self.harness.directory / "node"), str(self.desk)], stdin=subprocess.DEVNULL, stderr=log
            )

    def until(self, agent: subprocess.Popen[bytes], stage: str) -> Desk:
        """Wait until a stage is over, whatever became of it. Broken if that does not come."""
        until = time.monotonic() + ANSWER_S
        while True:
            desk = Desk.read(self.desk)
            if not any(order.stage == stage for order in desk.orders):
                return desk
            if agent.poll() is not None:
                raise Broken(f"the agent exited {agent.returncode}: {self.words()}")
            if time.monotonic() > until:
                raise Broken(f"{stage} does not come to its end: {desk.said}, {self.words()}")
            time.sleep(0.01)

    def words(self) -> str:
        """Return what the agent said last."""
        return " / ".join(self.log.read_text(errors="replace").splitlines()[-4:])

    def has_begun(self) -> bool:
        """Whether the agent that was started last has come so far that it is known."""
        return Desk.read(self.desk).instance != self._before

    def end(self, agent: subprocess.Popen[bytes]) -> float:
        """Tell an agent to end as soon as it is known, which it must do with 0; return how long it took, seconds."""
        until = time.monotonic() + ANSWER_S
        while not self.has_begun() and agent.poll() is None and time.monotonic() < until:
            time.sleep(0.01)
        return self.ends(agent)

    def ends(self, agent: subprocess.Popen[bytes]) -> float:
        """Tell an agent to end, and wait for it."""
        has_begun, began = self.has_begun(), time.monotonic()
        agent.terminate()
        try:
            code = agent.wait(ENDED_S)
        except subprocess.TimeoutExpired:
            raise Broken(f"told to end, the agent is there {ENDED_S:g} s later: {self.words()}") from None
        # One that has not even looked at its signals yet is ended by this one.
        if code != 0 and (has_begun or code != -signal.SIGTERM):
            raise Broken(f"told to end, the agent exited {code}: {self.words()}")
        return time.monotonic() - began

    def left(self) -> list[str]:
        """Return what is left of ours outside of the agent's directory."""
        return sorted(str(path) for path in self.harness.destination.rglob(".forebay-*"))


def prepare(node: Node, stage: str, seed: int, *, helped: bool) -> Story:
    """Bring it to where a stage begins, and return what has to become of it."""
    harness = node.harness
    harness.clear()
    for name in ("outbox", "leftovers", "transfers"):
        shutil.rmtree(harness.directory / "node" / name, ignore_errors=True)
    source, destination = harness.places(stage)
    if helped:
        plant_many(source)
    else:
        plant(source, seed)
        if stage == "stage_out":
            plant_old(destination)
    return Story(stage, poll(source), poll(destination))


def end_once(node: Node, stage: str, way: str, call: int, seed: int, *, helped: bool, goes_on: bool) -> float:
    """Have the agent end at a call, and start it again; return how long it took to end, seconds; -1 if it did not come
    to the call."""
    harness, tracer = node.harness, node.tracer
    story = prepare(node, stage, seed, helped=helped)
    # Its own start is told by its directory too: what counts begins with the job.
    node.order(stage)
    action = {KILLED: Action.KILL_TREE, ALONE: Action.KILL_MAIN}.get(way, Action.HOLD)
    tracer.set(Plan(action, WATCHED, needle=str(harness.directory), skip=call))
    agent, took_s = node.start(), -1.0
    where = ""
    try:
        until = time.monotonic() + ANSWER_S
        while not tracer.hits and Desk.read(node.desk).orders and agent.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
        where = tracer.last
        if tracer.hits:
            took_s = 0.0
            if way in (TOLD, TOLD_TWICE):
                agent.terminate()
                tracer.set(Plan(needle="-"))
                if way == TOLD_TWICE:
                    time.sleep(0.001 * (call % 7))
                    agent.kill()
                    agent.wait()
                else:
                    took_s = node.ends(agent)
            else:
                agent.wait(ENDED_S)
        tracer.set(Plan(needle="-"))
        if took_s < 0:
            node.until(agent, stage)
            node.end(agent)
        wait_until_gone(tracer)
        if living := descendants(agent.pid):
            raise Broken(f"processes {living} are left")
        source, destination = harness.places(stage)
        judge(story, source, destination, complete=False)
        desk = Desk.read(node.desk)
        if node.left() and not (harness.directory / "node" / "leftovers" / str(JOB)).exists():
            raise Broken(f"it left {node.left()[:3]}, and nobody knows")
        begin_again(node, story, desk, goes_on=goes_on)
    except Broken as error:
        raise Broken(f"{stage}, {way} at call {where!r}: {error}") from error
    finally:
        tracer.set(Plan(needle="-"))
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    return took_s


def begin_again(node: Node, story: Story, desk: Desk, *, goes_on: bool) -> None:
    """Start the agent again; what was begun ends right if it `goes_on`, and then the job is torn down."""
    if not goes_on:
        node.order("teardown")
    agent = node.start()
    try:
        if goes_on:
            said = node.until(agent, story.stage).said
            if said[-1:] != ("done",):
                raise Broken(f"after its next start: {said}")
            judge(story, *node.harness.places(story.stage), complete=True)
            node.order("teardown")
            node.end(agent)
            agent = node.start()
        said = node.until(agent, "teardown").said
        if said[-1:] != ("done",):
            raise Broken(f"the teardown: {said}")
        node.end(agent)
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    wait_until_gone(node.tracer)
    if left := node.left():
        raise Broken(f"after the teardown there is {left[:3]}")
    kept = [
        path
        for path in (node.harness.directory / "node").glob(f"*/{JOB}*")
        if path.parent.name not in ("receipts", "spare")
    ]
    if kept:
        raise Broken(f"after the teardown the agent still has {kept[:3]}")


def count(node: Node, stage: str, seed: int, *, helped: bool) -> int:
    """Do a stage in peace; return how many calls the agent and its workers make."""
    prepare(node, stage, seed, helped=helped)
    node.order(stage)
    node.tracer.set(Plan(classes=WATCHED, needle=str(node.harness.directory)))
    agent = node.start()
    try:
        said = node.until(agent, stage).said
        counted = node.tracer.counted
        if said != ("done",):
            raise Broken(f"in peace: {said}")
        node.end(agent)
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()
    return counted


def agents(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """End agents in all ways that are asked for; Broken at the first broken promise."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    node = Node(Harness(directory / "agents"), tracer, directory / "controller.json")
    chance = random.Random(seed)
    found: dict[str, Any] = dict.fromkeys(size.ways, 0)
    slowest_s = 0.0
    for helped in size.helped:
        for stage in size.stages:
            calls = count(node, stage, seed, helped=helped)
            for way in size.ways:
                for number in range(size.points):
                    call = (number * calls + chance.randrange(calls)) // size.points
                    goes_on = number % 2 == 0
                    took_s = end_once(node, stage, way, call, seed, helped=helped, goes_on=goes_on)
                    found[way] += took_s >= 0
                    slowest_s = max(slowest_s, took_s)
                what = f"{HELPED_FILES} files" if helped else "a tree"
                print(f"agents: {stage} of {what}, {way}: {found}", file=sys.stderr, flush=True)
    return {**found, "ended_after_s_max": round(slowest_s, 2)}
