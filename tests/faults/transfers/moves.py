"""Moves that delete their sources: no kill, power cut or failed system call loses a file."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replica.messages.commands import OperationDone
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import SpecialTransfers
from forebay.replica.model.transfers import TransferChoice
from tests.faults.disks import Disk
from tests.faults.tracing import CHANGING, Action, Calls, Plan, Tracer, build
from tests.faults.transfers.harness import Broken, Harness, Seen, poll, said
from tests.faults.transfers.kills import CALLS_MAX, DISK_BYTES, lose_power, plant, plant_old, wait_until_gone

STAGE = "stage_out"
REFUSED = {
    Calls.WRITE: errno.ENOSPC, Calls.SYNC: errno.EIO, Calls.RENAME: errno.EIO, Calls.REMOVE: errno.EACCES
}  # fmt: skip


class Size(NamedTuple):
    """How much is done."""

    stride: int
    """Deaths: every so manyth call that changes something is the one."""
    power_stride: int
    """Power cuts; 0: none."""
    rejection_stride: int
    """Refusals; 0: none."""


TINY = Size(stride=70, power_stride=0, rejection_stride=0)
SMALL = Size(stride=12, power_stride=0, rejection_stride=20)
FULL = Size(stride=1, power_stride=1, rejection_stride=1)


def order_fields(transfers: int) -> dict[str, Any]:
    """Return what makes moves of so many transfers."""
    return {"special": SpecialTransfers(choices=(TransferChoice(move=True),) * transfers)}


def contents(*trees: dict[str, Seen]) -> set[tuple[int, str]]:
    """Return what there is in all of these trees together, whatever it is called."""
    return {(seen.size_bytes, seen.digest) for tree in trees for seen in tree.values() if seen.kind == "file"}


def nothing_lost(before: dict[str, Seen], harness: Harness, outcome: object) -> None:
    """Check that everything is at the source as it was, or at the destination, whole; and all of it there if done."""
    source, destination = (poll(path) for path in harness.places(STAGE))
    for name, seen in before.items():
        if seen.kind != "file":
            continue
        there, still = destination.get(name), source.get(name)
        moved = there is not None and (there.size_bytes, there.digest) == (seen.size_bytes, seen.digest)
        if not moved and (still is None or still.digest != seen.digest):
            raise Broken(f"{name!r} is gone from the source, and is not at the destination")
        if isinstance(outcome, OperationDone) and (not moved or still is not None):
            raise Broken(f"it says it is done, and {name!r} is {'still at the source' if moved else 'not there'}")


def one_destination(harness: Harness) -> None:
    """Two sources go to one name: what is replaced there is not deleted where it came from."""
    harness.clear()
    source, destination = harness.places(STAGE)
    source.mkdir(parents=True)
    for name in ("a", "b"):
        (source / name).mkdir()
        (source / name / "same").write_bytes(name.encode() * 1000)
        (source / f"file-{name}").write_bytes(name.encode() * 2000)
    before = contents(poll(source))
    for kind, names in ((TransferKind.DIRECTORY, ("a", "b")), (TransferKind.FILE, ("file-a", "file-b"))):
        transfers = [Transfer(kind, f"{destination}/x-{kind}", f"$DW_JOB_STRIPED/data/{name}") for name in names]
        outcome = harness.operate(STAGE, transfers, **order_fields(2))
        if lost := before - contents(poll(source), poll(destination)):
            raise Broken(
                f"two moves to one {kind.name.lower()}: {len(lost)} of the sources are lost; it {said(outcome)}"
            )


def attempt(
    harness: Harness, tracer: Tracer, plan: Plan, between: Callable[[], Harness] | None
) -> tuple[bool, Harness]:
    """One move that something happens to, and the attempt after it; return whether it happened."""
    harness.clear()
    source, destination = harness.places(STAGE)
    plant(source, 1)
    plant_old(destination)
    before = poll(source)
    if between is not None:
        os.sync()
    tracer.set(plan)
    outcome = harness.operate(STAGE, **order_fields(1))
    wait_until_gone(tracer)
    hit, where = tracer.hits > 0, tracer.last
    tracer.set(Plan(needle="-"))
    if between is not None:
        harness = between()
    try:
        nothing_lost(before, harness, outcome)
        if not isinstance(outcome, OperationDone):
            if not hit:
                raise Broken(f"nothing happened, and it {said(outcome)}")
            again = harness.operate(STAGE, **order_fields(1))
            if not isinstance(again, OperationDone):
                raise Broken(f"the attempt after it {said(again)}")
            nothing_lost(before, harness, again)
    except Broken as error:
        raise Broken(f"{plan.action.name} at call {where!r} of a move: {error}") from error
    return hit, harness


def moves(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Move while everything goes wrong; Broken at the first thing that is lost."""
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    found = {"deaths": 0, "refusals": 0, "power_cuts": 0}
    harness = Harness(directory / "moves", tracer=tracer, reference=reference)
    needle = str(harness.directory)
    try:
        one_destination(harness)
        for call in range(seed % size.stride, CALLS_MAX, size.stride):
            hit, _ = attempt(harness, tracer, Plan(Action.KILL_TREE, CHANGING, needle, skip=call), None)
            if not hit:
                break
            found["deaths"] += 1
        for classes, error in REFUSED.items() if size.rejection_stride else ():
            for call in range(seed % size.rejection_stride, CALLS_MAX, size.rejection_stride):
                hit, _ = attempt(harness, tracer, Plan(Action.FAIL, classes, needle, skip=call, error=error), None)
                if not hit:
                    break
                found["refusals"] += 1
        print(f"moves: {found}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    if size.power_stride:
        found["power_cuts"] = moves_without_power(directory, tracer, size, seed)
    return found


def moves_without_power(directory: Path, tracer: Tracer, size: Size, seed: int) -> int:
    """Take the power away at every call that is asked for; return how often."""
    cuts = 0
    disk = Disk(directory / "ext4.img", directory / "ext4", "ext4", size_bytes=DISK_BYTES)
    disk.format()
    disk.mount()
    try:
        for call in range(seed % size.power_stride, CALLS_MAX, size.power_stride):
            harness = Harness(disk.mount_point / "harness", tracer=tracer)
            plan = Plan(Action.KILL_TREE, CHANGING, str(harness.directory), skip=call)
            hit = False
            try:

                def cut(harness: Harness = harness) -> Harness:
                    return lose_power(disk, harness, tracer, reference=False)

                hit, harness = attempt(harness, tracer, plan, cut)
            finally:
                harness.close()
            if not hit:
                break
            cuts += 1
    finally:
        disk.discard()
    return cuts
