"""Directories and files replaced by links during a transfer: nothing is read or written outside the roots."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from tests.faults.tracing import Action, Calls, Plan, Tracer, build
from tests.faults.transfers import loop
from tests.faults.transfers.harness import Broken, Harness, Inconclusive
from tests.faults.transfers.loop import SECRET, Tally, Task, secret_in

LOOP = str(Path(loop.__file__))
WIDE = 6
"""Files and directories beside those that are swapped, count: a walk that takes a while, again and again."""


class Size(NamedTuple):
    """How much is done."""

    swaps: int
    """Exchanges in all, count: each of the places gets its share."""
    stride: int
    """Of calls of one transfer at which a name is swapped, one by one."""
    every: int = 1
    """Of PLACES, every so manyth."""


TINY = Size(swaps=300, stride=500, every=3)
SMALL = Size(swaps=20_000, stride=40)
REFERENCE = Size(swaps=100_000, stride=1)
FULL = Size(swaps=1_000_000, stride=11)


class Place(NamedTuple):
    """Where the names lie that are exchanged; paths are relative to the root that is attacked."""

    stage: str
    link_in_source: bool
    name: str
    is_directory: bool


PLACES = (
    Place("stage_in", True, "a/b", True),
    Place("stage_in", True, "a", True),
    Place("stage_in", True, "a/b/file", False),
    Place("stage_out", True, "data/a/b", True),
    Place("stage_out", True, "data/a/b/file", False),
    Place("stage_out", False, "a/b", True),
    Place("stage_out", False, "a", True),
    Place("stage_out", False, "a/b/file", False),
)
"""Sources and destinations, a directory on the way and the last one, and the file itself."""

SWAPPED_WHILE = Calls.LOOK | Calls.MAKE | Calls.RENAME | Calls.META | Calls.REMOVE
"""Calls that take a name, and so could take the wrong one."""


def plant(directory: Path, text: bytes) -> None:
    """Make the tree that is moved; it has the names that PLACES attacks."""
    below = directory / "a" / "b"
    below.mkdir(parents=True, exist_ok=True)
    (below / "file").write_bytes(text)
    for number in range(WIDE):
        (directory / "a" / f"side-{number}").mkdir(exist_ok=True)
        (directory / "a" / f"side-{number}" / "x").write_bytes(text)
        (below / f"more-{number}").write_bytes(text)


def decoy(harness: Harness, place: Place) -> Path:
    """Make what nobody may have or write to, and the link to it that is exchanged for the name; return the link."""
    plant(harness.outside, SECRET * 3)
    link = harness.directory / "link"
    parts = place.name.split("/")
    inside = parts[1:] if parts[0] == "data" else parts
    link.symlink_to(harness.outside.joinpath(*inside))
    return link


def attacked(harness: Harness, place: Place) -> Path:
    """Return the name that is exchanged."""
    if place.stage == "stage_in":
        return harness.source / place.name
    return (harness.buffer if place.link_in_source else harness.destination) / place.name


def set_up(harness: Harness, place: Place) -> tuple[Path, Path]:
    """Bring the harness to where the attack begins; return the two names."""
    harness.clear()
    # Either of the two may be the link now.
    for path in (harness.directory / "link", harness.source):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    harness.source.mkdir()
    source, destination = harness.places(place.stage)
    plant(source, b"harmless")
    if not place.link_in_source:
        plant(destination, b"older")
    return attacked(harness, place), decoy(harness, place)


def directories_of(root: Path) -> tuple[str, ...]:
    """Return every directory outside that is watched."""
    return tuple(str(path) for path in (root, *sorted(root.rglob("*"))) if path.is_dir())


def race(harness: Harness, place: Place, swaps: int, program: Path, *, reference: bool) -> Tally:
    """Exchange the two names as fast as the kernel does it, while transfers are done one after the other."""
    one, other = set_up(harness, place)
    report = harness.directory / "report"
    plan = Tracer(program, harness.directory / "swaps")
    plan.set(Plan(Action.SWAP, one=str(one), other=str(other), period=200))
    source, destination = harness.places(place.stage)
    task = Task(
        plan=str(plan.file),
        swaps=swaps,
        watched=directories_of(harness.outside),
        looked_at=str(destination),
        emptied=str(destination) if place.stage == "stage_out" and place.is_directory else "",
        relinked=(str(one), str(other), os.readlink(other)),
        report=str(report),
        reference=reference,
    )
    harness.run_instead([LOOP, msgspec.json.encode(task).decode()])
    swapper = subprocess.Popen([str(program), str(plan.file), "swap"])
    try:
        outcome = harness.operate(place.stage)
    finally:
        swapper.kill()
        swapper.wait()
    if not report.exists():
        raise Inconclusive(f"the loop of {place} has ended without a report: {outcome}")
    tally = msgspec.json.decode(report.read_bytes(), type=Tally)
    report.unlink()
    return tally


def step(tracer: Tracer, harness: Harness, place: Place, call: int, period: int) -> bool:
    """One transfer in which the names are exchanged at one call (and at every `period`th after it); whether it came
    that far. Broken if something came from outside or went there."""
    one, other = set_up(harness, place)
    watched = directories_of(harness.outside)
    guarded = loop.contents(watched)
    plan = Plan(
        Action.SWAP, SWAPPED_WHILE, str(harness.directory), skip=call, period=period, one=str(one), other=str(other)
    )
    tracer.set(plan)
    harness.operate(place.stage)
    hit, where = tracer.hits > 0, tracer.last
    tracer.set(Plan(needle="-"))
    _, destination = harness.places(place.stage)
    if found := secret_in(str(destination)):
        raise Broken(f"{place.name} swapped for a link at call {where!r}: {found} holds what lies outside")
    if loop.contents(watched) != guarded:
        raise Broken(f"{place.name} swapped for a link at call {where!r}: something was written outside")
    return hit


def links(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Race, and then go through a transfer call by call; Broken at the first escape."""
    program = build(directory.parents[1] / "tools")
    found: dict[str, Any] = {"swaps": 0, "transfers": 0, "done": 0, "rejected": 0, "escapes": 0}
    harness = Harness(directory / "race")
    reasons: set[str] = set()
    try:
        for place in PLACES[:: size.every]:
            tally = race(harness, place, -(-size.swaps // len(PLACES)), program, reference=reference)
            if tally.escapes:
                raise Broken(
                    f"{place.stage}, {place.name} swapped for a link: escaped after {tally.swaps} swaps and "
                    f"{tally.rounds} transfers: {tally.first}"
                )
            for key, more in (
                ("swaps", tally.swaps), ("transfers", tally.rounds), ("done", tally.done), ("rejected", tally.refused)
            ):  # fmt: skip
                found[key] += more
            reasons |= {reason.rpartition("/")[2][:80] for reason in tally.reasons}
            print(f"links: {place}: {tally}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    found["reasons"] = sorted(reasons)
    found["steps"] = stepwise(directory, size, seed, reference=reference)
    return found


def stepwise(directory: Path, size: Size, seed: int, *, reference: bool) -> int:
    """Exchange at every `stride`th call, once and for good, or there and back; return how often."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / "steps", tracer=tracer, reference=reference)
    done = 0
    try:
        for place in PLACES[:: size.every**2]:
            for period in (0, 1):
                call = seed % size.stride
                while step(tracer, harness, place, call, period):
                    done, call = done + 1, call + size.stride
                    if done % 200 == 0:
                        print(f"links: {done} steps, {place.name}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    return done
