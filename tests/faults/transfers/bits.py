"""Bit flips on the way to the disk, on it, and on the way back: each verification level detects the promised ones."""

import os
import random
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.transfers import TransferRules
from tests.faults.tracing import Action, Calls, Plan, Tracer, build
from tests.faults.transfers.harness import STAGES, Broken, Harness, Inconclusive, Story, judge, poll, said
from tests.faults.transfers.kills import wait_until_gone
from tests.faults.transfers.receipts import compare, newest_lines


class Size(NamedTuple):
    """How much is done."""

    flips: int
    """Bits, of each of the ways."""
    files: int = 60
    large_bytes: int = 34 * (1 << 20)
    """Of the one file that is copied in chunks."""


TINY = Size(flips=3, files=20, large_bytes=1 << 20)
SMALL = Size(flips=12, files=20, large_bytes=3 << 20)
FULL = Size(flips=334)

TRANSFERS_MAX = 2_000
"""Transfers at most, count: a bound against bits that never flip."""

IN_FLIGHT, ON_THE_WAY_BACK, AT_REST = "in flight", "on the way back", "at rest"


def plant(directory: Path, size: Size, chance: random.Random) -> None:
    """Make files of all sizes, none of them empty: there is no bit to flip in an empty one."""
    shutil.rmtree(directory, ignore_errors=True)
    for number in range(size.files):
        below = directory / f"d{number % 5}"
        below.mkdir(parents=True, exist_ok=True)
        (below / f"f{number}").write_bytes(chance.randbytes(chance.choice((1, 100, 4096, 30_000, 200_000))))
    with (directory / "large").open("wb") as file:
        block = chance.randbytes(1 << 20)
        for number in range(size.large_bytes >> 20):
            file.write(number.to_bytes(8, "little") + block[8:])


def rules(level: str) -> dict[str, Any]:
    """Return what an order has to say so that transfers are verified at a level."""
    return {"rules": TransferRules(verify=level)}


def flip_while_moving(
    harness: Harness, tracer: Tracer, size: Size, seed: int, way: str, *, reference: bool
) -> tuple[int, int, int]:
    """Flip bits while files are moved and read back; return flips, transfers that stood it, transfers that failed.

    Broken if one says that it is done and what is there is not what was to be moved.
    """
    chance = random.Random(seed)
    flips = stood = failed = 0
    for round_ in range(TRANSFERS_MAX):
        if flips >= size.flips:
            return flips, stood, failed
        stage = STAGES[round_ % 2]
        source, destination = harness.places(stage)
        harness.clear()
        if round_ < 2:
            plant(source, size, chance)
        elif not source.exists():
            shutil.copytree(harness.directory / f"kept-{stage}", source)
        if round_ < 2:
            shutil.rmtree(harness.directory / f"kept-{stage}", ignore_errors=True)
            shutil.copytree(source, harness.directory / f"kept-{stage}")
        story = Story(stage, poll(source), {})
        # Now and then a file is hit twice in a row, which a second try does not put right.
        period = chance.choice((3, 17, 40, 97, 0))
        action, classes = (Action.FLIP_WRITTEN, Calls.WRITE) if way == IN_FLIGHT else (Action.FLIP_READ, Calls.READ)
        # Names of parts: what is on the way back is read from them, and nothing else is.
        needle = str(harness.written(stage)) if way == IN_FLIGHT else "/.forebay-"
        tracer.set(
            Plan(action, classes, needle, skip=chance.randrange(30), period=period, seed=chance.getrandbits(63) | 1)
        )
        outcome = harness.operate(stage, **({} if reference else rules("read_back")))
        wait_until_gone(tracer)
        hits, where = tracer.hits, tracer.last
        tracer.set(Plan(needle="-"))
        flips += hits
        try:
            judge(story, source, destination, complete=isinstance(outcome, OperationDone))
        except Broken as error:
            raise Broken(
                f"{hits} bits flipped {way}, the last at call {where!r}, and it {said(outcome)}: {error}"
            ) from error
        if isinstance(outcome, OperationDone):
            stood += 1
            continue
        failed += 1
        if not hits:
            raise Broken(f"no bit was flipped, and it {said(outcome)}")
        if not (isinstance(outcome, OperationFailed) and ("/" in outcome.message or "$" in outcome.message)):
            raise Broken(f"it {said(outcome)}, and does not name the file")
    raise Inconclusive(f"only {flips} bits were flipped {way} in {TRANSFERS_MAX} transfers")


def flip_at_rest(harness: Harness, size: Size, seed: int, level: str) -> int:
    """Flip one bit after the other in what was moved: the lines of the receipt tell which file it is, and no other."""
    chance = random.Random(seed)
    stage = "stage_out"
    harness.clear()
    source, destination = harness.places(stage)
    plant(source, size, chance)
    outcome = harness.operate(stage, **rules(level))
    if not isinstance(outcome, OperationDone):
        raise Broken(f"a transfer that nobody disturbs {said(outcome)}")
    lines = newest_lines(harness.directory / "node")
    if wrong := compare(lines, destination):
        raise Broken(f"the receipt does not tell what is at the destination, and nobody touched it: {wrong[:3]}")
    files = [path for path in sorted(destination.rglob("*")) if path.is_file()]
    small = [path for path in files if path.name != "large"]
    for number in range(size.flips):
        path = chance.choice(small) if number % 16 else destination / "large"
        at, bit = chance.randrange(path.stat().st_size), chance.randrange(8)
        times = path.stat()
        _flip(path, at, bit)
        # Size and time tell nothing.
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        name = str(path.relative_to(destination))
        wrong = compare(lines, destination)
        if [mismatch.path for mismatch in wrong] != [name]:
            raise Broken(f"bit {bit} of byte {at} of {name} was flipped, and the receipt finds {wrong}")
        _flip(path, at, bit)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return size.flips


def flip_before_resuming(harness: Harness, tracer: Tracer, size: Size, seed: int) -> tuple[int, int]:
    """Kill a transfer, flip bits in what it left half-done, and let the next attempt go on, reading back."""
    chance = random.Random(seed)
    flips = attempts = 0
    stage = "stage_out"
    harness.clear()
    source, destination = harness.places(stage)
    plant(source, size, chance)
    while flips < size.flips and attempts < TRANSFERS_MAX:
        attempts += 1
        shutil.rmtree(destination)
        destination.mkdir()
        story = Story(stage, poll(source), {})
        tracer.set(
            Plan(Action.KILL_TREE, Calls.WRITE | Calls.SYNC | Calls.RENAME, str(destination), skip=chance.randrange(90))
        )
        first = harness.operate(stage, **rules("read_back"))
        wait_until_gone(tracer)
        tracer.set(Plan(needle="-"))
        if isinstance(first, OperationDone):
            continue
        left = [path for path in destination.rglob("*") if path.is_file() and path.stat().st_size]
        parts = [path for path in left if ".forebay-" in str(path)]
        for path in chance.sample(parts, min(len(parts), 4)):
            _flip(path, chance.randrange(path.stat().st_size), chance.randrange(8))
            flips += 1
        outcome = harness.operate(stage, **rules("read_back"))
        if not isinstance(outcome, OperationDone):
            raise Broken(f"the attempt after it {said(outcome)}")
        judge(story, source, destination, complete=True)
    return flips, attempts


def _flip(path: Path, at: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


def bits(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Flip bits in every way; Broken at the first that is not seen."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / "bits", tracer=tracer, reference=reference)
    found: dict[str, Any] = {}
    try:
        for way in (IN_FLIGHT, ON_THE_WAY_BACK):
            flips, stood, failed = flip_while_moving(harness, tracer, size, seed, way, reference=reference)
            found[way] = {"flips": flips, "put_right": stood, "rejected": failed}
            print(f"bits: {way}: {found[way]}", file=sys.stderr, flush=True)
        for level in ("digest", "read_back"):
            flips = flip_at_rest(harness, size, seed, level)
            found[f"{AT_REST}, {level}"] = {"flips": flips}
        flips, attempts = flip_before_resuming(harness, tracer, size, seed)
        found["before resuming"] = {"flips": flips, "transfers": attempts}
    finally:
        harness.close()
    found["flips"] = sum(way["flips"] for way in found.values())
    return found
