"""Sources that become unavailable: a file server that stops answering at any request, and deleted directories.

The agent and other work continue, and the transfer succeeds when the source is back.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import random
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from forebay.cluster.agent.operation import WorkerOperation
from forebay.cluster.agent.worker.task import Outcome
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.transfers import TransferRules
from tests.faults.fuse import DyingServer, Request
from tests.faults.tracing import Action, Plan, Tracer, build
from tests.faults.transfers.endings import ENDED_S, SLACK_S, STALL_S
from tests.faults.transfers.harness import JOB, STAGES, Broken, Harness, Story, judge, poll, said
from tests.faults.transfers.kills import CALLS_MAX, prepare, wait_until_gone
from tests.faults.transfers.links import SWAPPED_WHILE
from tests.faults.transfers.refusals import check_words

REQUESTS = Request.LOOKUP, Request.GETATTR, Request.OPENDIR, Request.READDIR, Request.OPEN, Request.READ

RESCUE_S = 40.0
"""Seconds after which the server answers again whatever happens: an agent that waits for it itself would never end."""


class Size(NamedTuple):
    """How much is done."""

    deaths: int
    """Moments at which the server dies, for each kind of request."""
    stride: int
    """A directory is gone at every so manyth call that takes a name."""
    requests: tuple[Request, ...] = REQUESTS
    noticed: bool = True
    """Whether those that nobody cancels, programs, and who waits for one that hangs are looked at: they take long."""


TINY = Size(deaths=1, stride=300, requests=(Request.READ,), noticed=False)
SMALL = Size(deaths=2, stride=40)
FULL = Size(deaths=8, stride=3)


def contents(seed: int) -> dict[str, bytes]:
    """Return what the server has."""
    chance = random.Random(seed)
    sizes = {"large": 33 << 20, "one": 1, "none": 0, "below/a": 5000, "below/deeper/b": 70_000, "other/c": 4096}
    return {name: chance.randbytes(size) for name, size in sizes.items()}


@contextlib.contextmanager
def rescued(server: DyingServer) -> Iterator[threading.Event]:
    """Revive the server when it takes too long; the event says whether that was needed."""
    needed = threading.Event()

    def rescue() -> None:
        needed.set()
        server.revive()

    timer = threading.Timer(RESCUE_S, rescue)
    timer.start()
    try:
        yield needed
    finally:
        timer.cancel()
        timer.join()


def other_order(harness: Harness) -> Any:
    """Return an order of another job, from a place that is well."""
    well = harness.directory / "well"
    well.mkdir(exist_ok=True)
    (well / "file").write_bytes(b"well" * 1000)
    order = harness.order("stage_in", [Transfer(TransferKind.FILE, str(well / "file"), "$DW_JOB_STRIPED/file")])
    return msgspec.structs.replace(order, job=JOB + 1, roots=(str(well),))


def is_held(harness: Harness) -> bool:
    """Whether a process of the job's operation is there still: each has inherited the lock."""
    lock = os.open(harness.directory / "node" / "operations" / str(JOB), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


async def hang(harness: Harness, server: DyingServer, *, cancelled: bool) -> tuple[Outcome | None, float, str]:
    """Stage in until it hangs, and end it, or wait until it is noticed; another job is staged in meanwhile. Return what
    became of it, how long it took to be over, and which process hangs."""
    hung_s = [0.0]

    async def beside(operation: WorkerOperation) -> None:
        while not server.stuck.is_set():
            await asyncio.sleep(0.005)
        hung_s[0] = time.monotonic()
        other = await harness.run_transfer(other_order(harness))
        if not isinstance(other, OperationDone):
            raise Broken(f"another job of the agent {said(other)} while one hangs")
        if cancelled:
            hung_s[0] = time.monotonic()
            operation.end()
        else:
            await asyncio.sleep(3600)

    rules = TransferRules() if cancelled else TransferRules(stall_s=STALL_S)
    outcome = await harness.run_transfer(harness.order("stage_in", rules=rules), beside=beside)
    took_s = time.monotonic() - hung_s[0] if hung_s[0] else -1.0
    where = " ".join(map(str, harness.home.hung.of(JOB)))
    await harness.home.hung.let_go()
    return outcome, took_s, where


def programs_hang(harness: Harness, server: DyingServer) -> int:
    """The server dies while a program reads from it; return how often."""
    times = 0
    for program in ("rsync", "rclone"):
        if shutil.which(program) is None:
            continue
        harness.backend = program
        for request in (Request.OPEN, Request.READ):
            try:
                times += dies_once(harness, server, request, 0, cancelled=True)
            except Broken as error:
                raise Broken(f"a server that dies at {request.name} of {program}: {error}") from error
    harness.backend = ""
    return times


def dies_once(harness: Harness, server: DyingServer, request: Request, after: int, *, cancelled: bool) -> bool:
    """The server dies at one request; return whether that was asked for at all."""
    harness.clear()
    story = Story("stage_in", poll(harness.source), {})
    destination = harness.places("stage_in")[1]
    server.die(request, after=after)
    with rescued(server) as needed:
        outcome, took_s, hangs = asyncio.run(hang(harness, server, cancelled=cancelled))
        stuck, held = server.stuck.is_set(), is_held(harness)
        server.revive()
    if needed.is_set():
        raise Broken("the agent itself waits for the dead server, or the transfer is never over")
    if not stuck:
        if not isinstance(outcome, OperationDone):
            raise Broken(f"nothing happened, and it {said(outcome)}")
        return False
    if cancelled and (outcome is not None or took_s > ENDED_S + SLACK_S):
        raise Broken(f"cancelled, it was over after {took_s:.1f} s, and {said(outcome)}")
    # Some waits can be killed: for what was read ahead, for one.
    if not hangs and held:
        raise Broken("somebody has the lock of the job, and no process is known to hang")
    if not cancelled:
        if not isinstance(outcome, OperationFailed) or outcome.final:
            raise Broken(f"it {said(outcome)}")
        if "no progress" not in outcome.message or (hangs and "no signal ends" not in outcome.message):
            raise Broken(f"it does not say where it hangs: {outcome.message}")
    judge(story, harness.source, destination, complete=False)
    # What hung has the lock until it is gone, which it is now.
    again = harness.operate("stage_in")
    if not isinstance(again, OperationDone):
        raise Broken(f"the attempt after it {said(again)}")
    judge(story, harness.source, destination, complete=True)
    return True


def kept_out(harness: Harness, server: DyingServer) -> None:
    """While one hangs, the next operation of its job waits, says for what, and begins nothing."""
    harness.clear()
    server.die(Request.READ)
    with rescued(server):

        async def both() -> Outcome | None:
            await hang_only(harness, server)
            return await harness.run_transfer(harness.order("stage_in"))

        outcome = asyncio.run(both())
        server.revive()
    if not isinstance(outcome, OperationFailed) or "has not ended" not in outcome.message or outcome.final:
        raise Broken(f"beside a process that hangs, the next attempt {said(outcome)}")


async def hang_only(harness: Harness, server: DyingServer) -> None:
    """Stage in until it hangs, and cancel it; it stays known."""

    async def beside(operation: WorkerOperation) -> None:
        while not server.stuck.is_set():
            await asyncio.sleep(0.005)
        operation.end()

    await harness.run_transfer(harness.order("stage_in"), beside=beside)


def vanishes_once(harness: Harness, tracer: Tracer, stage: str, call: int, seed: int) -> bool:
    """A directory of the source is gone from one call on; return whether it came to that."""
    story = prepare(harness, stage, seed)
    source, destination = harness.places(stage)
    below, aside = source / "below", harness.directory / "aside"
    if not aside.exists():
        aside.mkdir()
    tracer.set(Plan(Action.SWAP, SWAPPED_WHILE, str(harness.directory), skip=call, one=str(below), other=str(aside)))
    outcome = harness.operate(stage)
    wait_until_gone(tracer)
    hit, where = tracer.hits > 0, tracer.last
    tracer.set(Plan(needle="-"))
    if hit:
        # Both are directories: back they go.
        os.rename(below, harness.directory / "empty")
        os.rename(aside, below)
        os.rename(harness.directory / "empty", aside)
    try:
        judge(story, source, destination, complete=not hit)
        if isinstance(outcome, OperationFailed):
            check_words(outcome)
            if "below" not in outcome.message:
                raise Broken(f"it does not say what is gone: {outcome.message}")
        elif not isinstance(outcome, OperationDone):
            raise Broken(f"it {said(outcome)}")
        if left := sorted(map(str, harness.destination.rglob(".forebay-*"))):
            raise Broken(f"it {said(outcome)}, and left {left[:3]}")
        again = harness.operate(stage)
        if not isinstance(again, OperationDone):
            raise Broken(f"the attempt after it {said(again)}")
        judge(story, source, destination, complete=True)
    except Broken as error:
        raise Broken(f"a directory gone at call {where!r} of {stage}: {error}") from error
    return hit


def vanishing(directory: Path, size: Size, seed: int) -> int:
    """Let a directory go at every call that is asked for; return how often."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / "vanishing", tracer=tracer)
    times = 0
    try:
        for stage in STAGES:
            for call in range(seed % size.stride, CALLS_MAX, size.stride):
                if not vanishes_once(harness, tracer, stage, call, seed):
                    break
                times += 1
                if times % 50 == 0:
                    print(f"sources: {times} directories gone, {stage}, call {call}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    return times


def sources(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Do all of it; Broken at the first broken promise."""
    found: dict[str, Any] = {"vanished": vanishing(directory, size, seed)}
    try:
        server = DyingServer(directory / "server", contents(seed))
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EPERM, errno.EACCES, errno.ENODEV):
            raise
        return {**found, "left_out": f"no FUSE here: {error.strerror}"}
    harness = Harness(directory / "dying", source=directory / "server")
    try:
        for request in size.requests:
            for number in range(size.deaths):
                for cancelled in (True, False) if number == 0 and size.noticed else (number % 4 != 3,):
                    try:
                        if not dies_once(harness, server, request, number * number, cancelled=cancelled):
                            break
                    except Broken as error:
                        how = "cancelled" if cancelled else "noticed"
                        raise Broken(
                            f"a server that dies at {request.name} {number * number}, {how}: {error}"
                        ) from error
                    found[request.name.lower()] = found.get(request.name.lower(), 0) + 1
            print(f"sources: {found}", file=sys.stderr, flush=True)
        if size.noticed:
            found["programs"] = programs_hang(harness, server)
            kept_out(harness, server)
    finally:
        server.close()
        harness.close()
    return found
