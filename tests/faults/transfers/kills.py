"""Kills of the mover at a chosen system call: the destination is never partial, and the next attempt succeeds."""

import contextlib
import functools
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forebay.replica.messages.commands import OperationDone
from tests.faults.disks import Disk
from tests.faults.tracing import CHANGING, EVERY, Action, Calls, Plan, Tracer, build
from tests.faults.transfers.harness import STAGES, Broken, Harness, Story, judge, judge_top, poll, said

WAYS = {
    "all before it": (Action.KILL_TREE, False),
    "all after it": (Action.KILL_TREE, True),
    "the worker": (Action.KILL_MAIN, False),
    "the caller": (Action.KILL_ONE, False),
}
"""Who dies at the call. The agent's death is everybody's: the kernel kills what it started."""

GONE_S = 5.0
"""Seconds that a helper of a killed worker may take to be gone."""

CALLS_MAX = 20_000
"""Calls of one small transfer at most, count: a bound against an attack that never ends."""

DISK_BYTES = 384 << 20
"""Size of a disk that loses its power: two copies of the tree, its parts, and what mkfs.xfs asks for."""


class Size(NamedTuple):
    """How much is done."""

    stride: int
    """Every so manyth call that changes something is the one."""
    ways: tuple[str, ...]
    every_stride: int
    """Of all calls, those too that change nothing."""
    power_stride: int
    """Of calls at which the power goes; 0: none."""
    power_kinds: tuple[str, ...] = ("ext4", "xfs")
    programs: tuple[str, ...] = ("rsync", "rclone")
    """That move the data in place of the agent."""


MANY = 40
"""Files of one directory, count: more than GROUPED_FILES_MIN and SHELVED_FILES_MIN of the mover."""

TINY = Size(stride=70, ways=("all before it",), every_stride=600, power_stride=0)
REFERENCE = Size(stride=20, ways=("all before it",), every_stride=40, power_stride=1, power_kinds=("ext4",))
SMALL = Size(stride=9, ways=("all before it", "the worker"), every_stride=50, power_stride=0)
FULL = Size(stride=1, ways=tuple(WAYS), every_stride=1, power_stride=1)


def plant(directory: Path, seed: int) -> None:
    """Make a small tree that has one of each kind of thing that a mover treats in its own way."""
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "below" / "deeper").mkdir(parents=True)
    (directory / "empty").mkdir()
    # The largest is copied in chunks.
    sizes = {"large": 33 * (1 << 20) + 7, "one": 1, "none": 0, "page": 4096, "below/a": 5000, "below/deeper/b": 70_000}
    for name, size_bytes in sizes.items():
        (directory / name).write_bytes(_content(seed, name, size_bytes))
    with (directory / "below" / "sparse").open("wb") as file:
        file.truncate(1 << 20)
        file.seek(300_000)
        file.write(b"island")
    # As many as are written on a shelf, and take their directory's place at once.
    (directory / "many").mkdir()
    for number in range(MANY):
        (directory / "many" / f"{number}").write_bytes(b"%d" % (seed + number))
    (directory / "below" / "a").chmod(0o4751)
    for number, name in enumerate(sizes):
        os.utime(directory / name, ns=(10**18 + number, 10**18 + number * 1001))
    (directory / "below" / "latest").symlink_to("deeper/b")
    os.utime(directory / "below" / "latest", ns=(10**18, 10**18 + 77), follow_symlinks=False)
    # Last, since whatever is made in a directory changes its time.
    for number, (name, mode) in enumerate({"below/deeper": 0o2711, "empty": 0o1700, "many": 0o750, ".": 0o711}.items()):
        (directory / name).chmod(mode)
        os.utime(directory / name, ns=(10**18, 10**18 + number * 13))


@functools.cache
def _content(seed: int, name: str, size_bytes: int) -> bytes:
    return random.Random(f"{seed} {name}").randbytes(size_bytes)


def plant_old(directory: Path) -> None:
    """Put older files where some of the new ones go, and one that is nobody's business."""
    (directory / "below").mkdir(parents=True, exist_ok=True)
    (directory / "large").write_bytes(b"old" * 1000)
    (directory / "below" / "a").write_bytes(b"old")
    (directory / "kept").write_bytes(b"not in the source")


def prepare(harness: Harness, stage: str, seed: int) -> Story:
    """Bring a harness to where a stage begins, and return what has to become of it."""
    harness.clear()
    source, destination = harness.places(stage)
    plant(source, seed)
    if stage == "stage_out":
        plant_old(destination)
    return Story(stage, poll(source), poll(destination))


def wait_until_gone(tracer: Tracer) -> None:
    """Wait until no process is traced any more; Broken if one outlives the worker that started it."""
    until = time.monotonic() + GONE_S
    while tracer.living:
        if time.monotonic() > until:
            raise Broken(f"{tracer.living} processes outlive their worker by {GONE_S:g} s: {traced()}")
        time.sleep(0.005)


def traced() -> list[str]:
    """Return what is known of all processes that are traced by somebody."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines() if ":\t" in line)
            if fields.get("TracerPid", "0") != "0":
                wchan = status.with_name("wchan").read_text()
                command = status.with_name("cmdline").read_bytes().replace(b"\0", b" ").decode()[-80:]
                found.append(f"{status.parent.name} {fields['State']} in {wchan}, of {fields['PPid']}: {command}")
    return found


def kill_once(harness: Harness, tracer: Tracer, stage: str, plan: Plan, seed: int) -> bool:
    """One transfer with one death, and the attempt after it; return whether it came to the death at all."""
    story = prepare(harness, stage, seed)
    source, destination = harness.places(stage)
    tracer.set(plan)
    outcome = harness.operate(stage)
    wait_until_gone(tracer)
    hit, where = tracer.hits > 0, tracer.last
    tracer.set(Plan(needle="-"))
    try:
        done = isinstance(outcome, OperationDone)
        if not hit and not done:
            raise Broken(f"nothing was killed, and it {said(outcome)}")
        judge(story, source, destination, complete=done)
        if done and not hit:
            return False
        if not done:
            again = harness.operate(stage)
            wait_until_gone(tracer)
            if not isinstance(again, OperationDone):
                raise Broken(f"the attempt after it {said(again)}")
            judge(story, source, destination, complete=True)
        if stage == "stage_in":
            judge_top(source, destination)
    except Broken as error:
        raise Broken(f"killed at call {where!r} of {stage}: {error}") from error
    return hit


def strides(first: int, stride: int) -> Iterator[int]:
    """Yield which call is the one, run after run."""
    yield from range(first, CALLS_MAX, stride)


def kills(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Kill at every call that changes something and is asked for; Broken at the first broken promise."""
    return _kill(directory, size.ways, CHANGING, size.stride, seed, reference=reference)


def programs(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Kill at every call that changes something and is asked for while a program moves the data."""
    found: dict[str, Any] = {}
    for program in size.programs:
        if shutil.which(program) is None:
            found[program] = "is not installed: scripts/install-backends"
            continue
        ways = tuple(way for way in size.ways if WAYS[way][0] is not Action.KILL_ONE)
        found[program] = _kill(directory, ways, CHANGING, size.stride, seed, reference=reference, backend=program)
    return found


def calls(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Kill at every call whatsoever that is asked for; Broken at the first broken promise."""
    return _kill(directory, size.ways[:1], EVERY, size.every_stride, seed, reference=reference)


def _kill(
    directory: Path,
    ways: tuple[str, ...],
    classes: Calls,
    stride: int,
    seed: int,
    *,
    reference: bool,
    backend: str = "",
) -> dict[str, Any]:
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    harness = Harness(directory / f"kills{backend}", tracer=tracer, reference=reference)
    harness.backend = "" if reference else backend
    deaths = last = 0
    try:
        for way in ways:
            action, after = WAYS[way]
            for stage in STAGES:
                for call in strides(seed % stride, stride):
                    plan = Plan(action, classes, needle=str(harness.directory), skip=call, after=after)
                    if not kill_once(harness, tracer, stage, plan, seed):
                        break
                    deaths, last = deaths + 1, max(last, call)
                    if deaths % 100 == 0:
                        print(f"kills: {deaths} deaths, {stage}, {way}, call {call}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    return {"deaths": deaths, "calls_of_a_transfer": last + 1}


def cuts(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Take the power away at every call that is asked for, and once more when the transfer says that it is done."""
    if not size.power_stride:
        return {}
    tracer = Tracer(build(directory.parents[1] / "tools"), directory / "plan")
    cases = 0
    for kind in size.power_kinds:
        disk = Disk(directory / f"{kind}.img", directory / kind, kind, size_bytes=DISK_BYTES)
        disk.format()
        disk.mount()
        try:
            for stage in STAGES:
                for call in strides(seed % size.power_stride, size.power_stride):
                    if not cut_once(disk, tracer, stage, call, seed, reference=reference):
                        break
                    cases += 1
                    if cases % 20 == 0:
                        print(f"cuts: {cases} power cuts, {kind}, {stage}, call {call}", file=sys.stderr, flush=True)
        finally:
            disk.discard()
    return {"power_cuts": cases}


def cut_once(disk: Disk, tracer: Tracer, stage: str, call: int, seed: int, *, reference: bool) -> bool:
    """One transfer on a disk that loses its power at a call, the attempt after it, and a power cut after that."""
    harness = Harness(disk.mount_point / "harness", tracer=tracer, reference=reference)
    source, destination = harness.places(stage)
    try:
        story = prepare(harness, stage, seed)
        os.sync()
        tracer.set(Plan(Action.KILL_TREE, needle=str(harness.directory), skip=call))
        outcome = harness.operate(stage)
        wait_until_gone(tracer)
        hit, where = tracer.hits > 0, tracer.last
        tracer.set(Plan(needle="-"))
        harness = lose_power(disk, harness, tracer, reference=reference)
        try:
            judge(story, source, destination, complete=isinstance(outcome, OperationDone))
            if not isinstance(outcome, OperationDone):
                again = harness.operate(stage)
                if not isinstance(again, OperationDone):
                    raise Broken(f"the attempt after it {said(again)}")
                harness = lose_power(disk, harness, tracer, reference=reference)
                judge(story, source, destination, complete=True)
        except Broken as error:
            raise Broken(f"power lost at call {where!r} of {stage} on {disk.kind}: {error}") from error
        return hit
    finally:
        harness.close()


def lose_power(disk: Disk, harness: Harness, tracer: Tracer, *, reference: bool) -> Harness:
    """Take the power of the disk that a harness is on, give it back, and return the harness as it is then."""
    disk.cut()
    harness.close()
    disk.unmount()
    disk.mount()
    after = Harness(harness.directory, tracer=tracer, reference=reference)
    after.attempt = harness.attempt
    return after
