"""Repeated kills during a transfer of one large file: it resumes, and repeats at most a chunk per stream."""

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.agent.transfer.options import CHUNK_BYTES, STREAMS
from forebay.replica.messages.commands import OperationDone
from tests.faults.tracing import Action, Calls, Plan, Tracer, build
from tests.faults.transfers.harness import STAGES, Broken, Harness, said
from tests.faults.transfers.kills import wait_until_gone
from tests.faults.transfers.trees import CANCEL_S, CANCEL_SLACK_S, cancelled

PART = "/.forebay-"
"""What is in the names of all parts."""


SLACK_CALLS = 8
"""Calls of an attempt that write something else than the file's bytes, count."""


class Size(NamedTuple):
    """How much is done."""

    large_bytes: int
    kills: int
    """Deaths before it may end, in each direction."""
    cancels: int


TINY = Size(large_bytes=96 << 20, kills=1, cancels=1)
SMALL = Size(large_bytes=160 << 20, kills=2, cancels=1)
REFERENCE = Size(large_bytes=96 << 20, kills=1, cancels=0)
FULL = Size(large_bytes=4 << 30, kills=12, cancels=10)


def resume(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Kill and go on; Broken if more than that is copied again, or what is there in the end is something else."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / "resume", tracer=tracer, reference=reference)
    chance = random.Random(seed)
    found: dict[str, Any] = {"bytes": size.large_bytes, "copied_again_max": 0, "seen_again_per_kill": 0, "kills": 0}
    try:
        harness.clear()
        plant(harness.source / "large", size.large_bytes, chance)
        for stage in STAGES:
            source, destination = harness.places(stage)
            writes = count_writes(harness, tracer, stage)
            for path in (destination / "large", *destination.glob(PART[1:] + "*")):
                path.unlink(missing_ok=True)
            before = deaths = written = 0
            for _ in range(size.kills):
                tracer.set(
                    Plan(
                        Action.KILL_TREE,
                        Calls.WRITE,
                        str(harness.written(stage)),
                        skip=1 + chance.randrange(max(2, 2 * writes // (size.kills + 1))),
                    )
                )
                outcome = harness.operate(stage)
                wait_until_gone(tracer)
                written += tracer.counted
                if isinstance(outcome, OperationDone):
                    break
                deaths += 1
                before = max(before, harness.counters.bytes_done)
            tracer.set(Plan(classes=Calls.WRITE, needle=str(harness.written(stage))))
            outcome = harness.operate(stage)
            wait_until_gone(tracer)
            written += tracer.counted
            if not isinstance(outcome, OperationDone):
                raise Broken(f"{stage}, in the end, {said(outcome)}")
            # The mover says how much it went on with at last, when it has looked through all of it; its calls say how
            # much was written in all.
            found["kills"] += deaths
            seen = (written - writes - SLACK_CALLS * (deaths + 1)) * size.large_bytes // writes
            found["seen_again_per_kill"] = max(found["seen_again_per_kill"], seen // max(1, deaths))
            check_again(seen // max(1, deaths), stage)
            again = before - harness.counters.resumed_bytes
            found["copied_again_max"] = max(found["copied_again_max"], again)
            check_again(again, stage)
            if not same(source / "large", destination / "large"):
                raise Broken(f"{stage} says it is done, and the file is another one")
            print(f"resume: {stage}: {found}", file=sys.stderr, flush=True)
        took = cancels(harness, size.cancels)
        found["cancelled_in_s_max"] = round(max(took, default=0.0), 2)
        if took and max(took) > CANCEL_S + CANCEL_SLACK_S:
            raise Broken(f"transfers at full speed were over {took} s after they were cancelled")
    finally:
        harness.close()
    return found


def cancels(harness: Harness, count: int) -> list[float]:
    """Cancel a stage-out at full speed so many times; return how long each took to be over."""
    took = []
    for number in range(count):
        (harness.destination / "large").unlink(missing_ok=True)
        took.append(asyncio.run(cancelled(harness, 0.35 + 0.1 * number)))
    return took


def check_again(again_bytes: int, stage: str) -> None:
    """Check how much had been copied and was not gone on with."""
    if again_bytes > STREAMS * CHUNK_BYTES:
        raise Broken(f"{stage} copies {again_bytes} bytes again: more than {STREAMS} chunks of {CHUNK_BYTES}")


def count_writes(harness: Harness, tracer: Tracer, stage: str) -> int:
    """Do the transfer once in peace and return how many calls wrote."""
    tracer.set(Plan(classes=Calls.WRITE, needle=str(harness.written(stage))))
    outcome = harness.operate(stage)
    wait_until_gone(tracer)
    if not isinstance(outcome, OperationDone):
        raise Broken(f"{stage} {said(outcome)}")
    return tracer.counted


def plant(path: Path, size_bytes: int, chance: random.Random) -> None:
    """Make a large file of which no two blocks are the same."""
    block = bytearray(chance.randbytes(1 << 20))
    with path.open("wb") as file:
        for number in range(size_bytes >> 20):
            block[:8] = number.to_bytes(8, "little")
            block[1 << 19 : (1 << 19) + 8] = number.to_bytes(8, "big")
            file.write(block)


def same(one: Path, other: Path) -> bool:
    """Say whether two files have the same content."""
    if one.stat().st_size != other.stat().st_size:
        return False
    with one.open("rb") as first, other.open("rb") as second:
        while data := first.read(1 << 20):
            if data != second.read(1 << 20):
                return False
    return os.path.getsize(other) > 0
