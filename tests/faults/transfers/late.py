"""Two agents with the stage-out of the same job, one of which is stopped at a system call.

The files of the newer attempt remain intact.

The file system decides between them while the newer one has a claim to the destination. An older one that begins when
the newer one has ended and left no trace is not seen: such are counted.
"""

import asyncio
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replica.messages.commands import OperationDone
from tests.faults.tracing import CHANGING, Action, Plan, Tracer, build
from tests.faults.transfers.harness import Broken, Harness, Story, judge, poll, said
from tests.faults.transfers.kills import CALLS_MAX, plant, plant_old, wait_until_gone

HELD_S = 30.0
"""Seconds in which one has to come to the call at which it is held, or to its end."""

STAGE = "stage_out"

OLDER_HELD, NEWER_HELD, SAME = "the older one is held", "the newer one is held", "both have the same attempt"
WAYS = (OLDER_HELD, NEWER_HELD, SAME)


class Size(NamedTuple):
    """How much is done."""

    stride: int
    """One is held at every so manyth call that changes something."""
    ways: tuple[str, ...] = WAYS


TINY = Size(stride=90, ways=(OLDER_HELD,))
SMALL = Size(stride=23)
FULL = Size(stride=1)


class Pair(NamedTuple):
    """Two agents with buffers of their own and one destination. `held` is traced."""

    held: Harness
    other: Harness
    tracer: Tracer
    way: str


async def meet(pair: Pair, call: int, *, ended: bool) -> tuple[bool, bool]:
    """Hold one at a call, let the other do everything, and let the first go on; return whether it was held, and whether
    it had a claim to the destination then. Broken if what is there in the end is not what the newer one has; one that
    has no claim any more has `ended`, though it is held."""
    held, other, tracer, way = pair
    for number, harness in enumerate((held, other)):
        harness.clear()
        plant(harness.places(STAGE)[0], number)
    plant_old(held.destination)
    old = poll(held.destination)
    stories = {harness: Story(STAGE, poll(harness.places(STAGE)[0]), old) for harness in (held, other)}
    first = max(held.attempt, other.attempt)
    held.attempt, other.attempt = {
        OLDER_HELD: (first, first + 1), NEWER_HELD: (first + 1, first), SAME: (first, first)
    }[way]  # fmt: skip
    tracer.set(Plan(Action.HOLD, CHANGING, str(held.directory.parent), skip=call))
    holding = asyncio.ensure_future(held.run_transfer(held.order(STAGE)))
    try:
        until = time.monotonic() + HELD_S
        while not tracer.hits and not holding.done():
            if time.monotonic() > until:
                raise Broken(f"it neither ends nor comes to call {call}")
            await asyncio.sleep(0.005)
        where, claimed = tracer.last, bool(list(held.destination.glob(".forebay-*/*")))
        if not tracer.hits:
            return False, False
        theirs = await other.run_transfer(other.order(STAGE))
    finally:
        tracer.set(Plan(needle="-"))
        its = await holding
    wait_until_gone(tracer)
    done = [harness for harness, outcome in ((held, its), (other, theirs)) if isinstance(outcome, OperationDone)]
    newer = other if way == OLDER_HELD else held
    # An older one that had moved everything when it was held may say so: the controller does not believe it any more.
    unseen = not claimed and (way == OLDER_HELD or ended)
    winners = done if way == SAME or unseen else [newer]
    if newer not in done and way != SAME:
        raise Broken(f"{way} at call {where!r}: the newer one {said(theirs if newer is other else its)}")
    if winners:
        check(winners, stories, f"{way} at call {where!r}")
    return True, claimed


def check(winners: list[Harness], stories: dict[Harness, Story], when: str) -> None:
    """Check that the destination has what one of them had, all of it and nothing else."""
    for left, winner in reversed(list(enumerate(winners))):
        try:
            judge(stories[winner], winner.places(STAGE)[0], winner.destination, complete=True, alone=False)
            return
        except Broken as error:
            if not left:
                raise Broken(f"{when}: {error}") from error


def late(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Hold one at every call that is asked for; Broken at the first broken promise."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    places = directory / "late"
    places.mkdir(parents=True)
    destination = places / "destination"
    held = Harness(places / "held", tracer=tracer, reference=reference, destination=destination)
    other = Harness(places / "other", reference=reference, destination=destination)
    found = {"held": 0, "without_a_claim": 0}
    try:
        for way in size.ways:
            ever = False
            for call in range(seed % size.stride, CALLS_MAX, size.stride):
                was_held, claimed = asyncio.run(meet(Pair(held, other, tracer, way), call, ended=ever))
                if not was_held:
                    break
                found["held"] += 1
                found["without_a_claim"] += not claimed
                ever = ever or claimed
                if found["held"] % 25 == 0:
                    print(f"late: {found['held']} held, {way}, call {call}", file=sys.stderr, flush=True)
    finally:
        held.close()
        other.close()
    return found
