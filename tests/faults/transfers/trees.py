"""Unusual trees: names that are not text, 200 levels, a sparse terabyte, many hard links, a million files.

They are moved completely in bounded memory, or rejected by name.
"""

import asyncio
import contextlib
import os
import random
import shutil
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.system.processes import descendants
from forebay.replica.messages.commands import OperationDone, OperationFailed
from tests.faults.transfers.harness import STAGES, Broken, Harness, Story, judge, poll, said
from tests.faults.transfers.refusals import check_words

MEMORY_BYTES_MAX = 200 << 20
"""What the processes of one transfer may have together, bytes."""

SAMPLE_S = 0.2
"""Seconds between two looks at their memory."""

TERABYTE = 1 << 40

DEPTH_MAX = 200
"""Levels that are moved."""

CANCEL_S = 1.0
"""Seconds in which a cancelled transfer has to be over."""

CANCEL_SLACK_S = 0.5
"""What a busy machine may add to it, seconds."""


class Size(NamedTuple):
    """How much is done."""

    files: int
    """Of the tree of many files."""
    links: int
    """Of the farm."""
    sparse_bytes: int
    cancels: int
    own_names: int = 3
    """Names like the mover's own."""


REFERENCE = Size(files=0, links=0, sparse_bytes=TERABYTE >> 13, cancels=0)
TINY = Size(files=500, links=10, sparse_bytes=TERABYTE >> 10, cancels=1, own_names=1)
SMALL = Size(files=3_000, links=50, sparse_bytes=TERABYTE >> 10, cancels=1)
FULL = Size(files=1_000_000, links=5_000, sparse_bytes=TERABYTE, cancels=20)


def there_and_back(harness: Harness, plant: Callable[[Path], None]) -> None:
    """Stage a tree in and out again, and compare all three."""
    harness.clear()
    shutil.rmtree(harness.source)
    harness.source.mkdir()
    plant(harness.source)
    expected = poll(harness.source)
    for stage in STAGES:
        source, destination = harness.places(stage)
        outcome = harness.operate(stage)
        if not isinstance(outcome, OperationDone):
            raise Broken(f"{stage} {said(outcome)}")
        judge(Story(stage, expected, {}), source, destination, complete=True)
        # Set-id bits stay behind, once and for all.
        expected = poll(destination)


def names(harness: Harness, size: Size, *, reference: bool) -> dict[str, Any]:
    """Every byte that a name may have, the longest name, what is no UTF-8, and names that look like something else."""
    chosen = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    chosen += [
        b"x" * 255,
        b"\xff" * 255,
        "ß".encode() * 127,
        b"a\nb",
        b"\n\n",
        b"-rf",
        b"...",
        b"  ",
        b"a\\x00b",
        b"%s%n",
    ]
    chosen += [b"e\xcc\x81", b"\xc3\xa9", b"\x1b[31m", b"'; rm -rf *", b"**", b"~root", b".hidden", b"CON", b"a\r"]
    chosen += [b"\xed\xa0\x80", b"\xf0\x28\x8c\xbc", b"{source}", b"$HOME", b"receipts", b"lost+found"]

    def plant(directory: Path) -> None:
        for name in chosen:
            path = os.path.join(os.fsencode(directory), b"as-file", name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(name)
            os.makedirs(os.path.join(os.fsencode(directory), b"as-directory", name))
            with open(os.path.join(os.fsencode(directory), b"as-directory", name, name), "wb") as file:
                file.write(name * 3)

    there_and_back(harness, plant)
    return {"names": len(chosen)}


def own_names(harness: Harness, size: Size, *, reference: bool) -> dict[str, Any]:
    """Files of the user that are named as the mover's own are never lost in silence."""
    for kind in ("file", "directory"):
        for name in (".forebay-alone-7", ".forebay-x.part", ".forebay-7")[: size.own_names]:
            for stage in STAGES:
                harness.clear()
                source, destination = harness.places(stage)
                shutil.rmtree(source, ignore_errors=True)
                source.mkdir(parents=True)
                inside = source / name
                if kind == "directory":
                    inside.mkdir()
                    inside = inside / "9.x" / "deep"
                    inside.parent.mkdir()
                inside.write_bytes(b"mine")
                (source / "other").write_bytes(b"other")
                outcome = harness.operate(stage)
                if inside.read_bytes() != b"mine":
                    raise Broken(f"{stage} changed {inside}")
                there = destination / inside.relative_to(source)
                if isinstance(outcome, OperationFailed):
                    check_words(outcome)
                    if name not in outcome.message:
                        raise Broken(f"{stage} of a {kind} {name}: it {said(outcome)}")
                elif not there.is_file() or there.read_bytes() != b"mine":
                    raise Broken(f"{stage} of a {kind} {name} is done, and it is not there")
    return {}


def depth(harness: Harness, size: Size, *, reference: bool) -> dict[str, Any]:
    """200 levels are moved, with long names too; one more is refused by name."""
    for length in (1, 200):

        def plant(directory: Path, levels: int = DEPTH_MAX, length: int = length) -> None:
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
            for level in range(levels - 1):
                name = f"{level % 10}" * length
                os.mkdir(name, dir_fd=descriptor)
                inner = os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)
                os.close(descriptor)
                descriptor = inner
            with open(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=descriptor), "wb") as file:
                file.write(b"leaf")
            os.close(descriptor)

        harness.clear()
        remove_deep(harness.source)
        harness.source.mkdir()
        plant(harness.source)
        for stage in STAGES:
            source, destination = harness.places(stage)
            outcome = harness.operate(stage)
            if not isinstance(outcome, OperationDone):
                raise Broken(f"{stage} of {DEPTH_MAX} levels {said(outcome)}")
            if sorted(deep(source)) != sorted(deep(destination)):
                raise Broken(f"{stage} of {DEPTH_MAX} levels has not moved all of it")
        remove_deep(harness.source)
        remove_deep(harness.destination)
        remove_deep(harness.buffer.parent)
        harness.clear()
        harness.source.mkdir()
        plant(harness.source, DEPTH_MAX + 1)
        outcome = harness.operate("stage_in")
        if not isinstance(outcome, OperationFailed) or not outcome.final or f"{DEPTH_MAX}" not in outcome.message:
            raise Broken(f"{DEPTH_MAX + 1} levels: it {said(outcome)}")
        remove_deep(harness.source)
        remove_deep(harness.buffer.parent)
        harness.source.mkdir()
    return {"levels": DEPTH_MAX}


def deep(directory: Path) -> list[tuple[int, bytes, int]]:
    """Return the level, name and size of everything below a directory, however deep it lies."""
    found: list[tuple[int, bytes, int]] = []
    rest = [(0, os.open(directory, os.O_RDONLY | os.O_DIRECTORY))]
    while rest:
        level, descriptor = rest.pop()
        for name in os.listdir(descriptor):
            status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            is_directory = stat.S_ISDIR(status.st_mode)
            found.append((level, os.fsencode(name), 0 if is_directory else status.st_size))
            if is_directory:
                rest.append((level + 1, os.open(name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=descriptor)))
        os.close(descriptor)
    return found


def remove_deep(directory: Path) -> None:
    """Remove a tree whose paths are longer than a path may be: its top is moved away level by level."""
    while directory.is_dir() and (inner := [path for path in directory.iterdir() if path.is_dir()]):
        for number, path in enumerate(inner):
            for below in path.iterdir():
                below.rename(directory / f"up-{number}-{below.name[:5]}-{time.monotonic_ns()}")
            path.rmdir()
    shutil.rmtree(directory, ignore_errors=True)


def sparse(harness: Harness, size: Size, *, reference: bool) -> dict[str, Any]:
    """A file that is nearly all hole is moved in seconds, and stays nearly all hole."""
    harness.clear()
    shutil.rmtree(harness.source)
    harness.source.mkdir()
    chance = random.Random(9)
    islands = {0: b"first", size.sparse_bytes - 7: b"the end"}
    for number in range(1, 20):
        islands[number * (size.sparse_bytes // 20) + chance.randrange(1 << 20)] = chance.randbytes(70_000)
    with (harness.source / "sparse").open("wb") as file:
        file.truncate(size.sparse_bytes)
        for at, data in islands.items():
            file.seek(at)
            file.write(data)
    took = {}
    for stage in STAGES:
        began = time.monotonic()
        outcome = harness.operate(stage)
        took[stage] = round(time.monotonic() - began, 1)
        if not isinstance(outcome, OperationDone):
            raise Broken(f"{stage} of a sparse file {said(outcome)}")
        copy = harness.places(stage)[1] / "sparse"
        status = copy.stat()
        if status.st_size != size.sparse_bytes or status.st_blocks * 512 > 64 << 20:
            raise Broken(
                f"{stage} made of a sparse file {status.st_size} bytes in {status.st_blocks * 512} on the disk"
            )
        with copy.open("rb") as file:
            for at, data in islands.items():
                file.seek(at)
                if file.read(len(data)) != data:
                    raise Broken(f"{stage}: the sparse file has other bytes at {at}")
    return {"bytes": size.sparse_bytes, **took}


def farm(harness: Harness, size: Size, *, reference: bool) -> dict[str, Any]:
    """Many names of one file are moved as what they are; a capacity counts what they come to; a hard link at the
    destination is replaced and never written through."""
    harness.clear()
    shutil.rmtree(harness.source)
    harness.source.mkdir()
    (harness.source / "0").write_bytes(random.Random(1).randbytes(65536))
    for number in range(1, size.links):
        os.link(harness.source / "0", harness.source / str(number))
    outcome = harness.operate("stage_in", capacity_bytes=size.links * 65536 // 2)
    if not isinstance(outcome, OperationFailed) or not outcome.final:
        raise Broken(f"{size.links} links of 64 KiB into half of that: it {said(outcome)}")
    check_words(outcome)
    harness.clear()
    expected = poll(harness.source)
    outcome = harness.operate("stage_in")
    if not isinstance(outcome, OperationDone):
        raise Broken(f"stage_in of hard links {said(outcome)}")
    judge(Story("stage_in", expected, {}), *harness.places("stage_in"), complete=True)
    victim = harness.outside / "victim"
    victim.write_bytes(b"nobody's business")
    os.link(victim, harness.destination / "0")
    outcome = harness.operate("stage_out")
    if not isinstance(outcome, OperationDone) or victim.read_bytes() != b"nobody's business":
        raise Broken(
            f"a hard link at the destination: it {said(outcome)}, and the victim has {victim.read_bytes()[:20]!r}"
        )
    return {"links": size.links}


def many(harness: Harness, size: Size, *, reference: bool) -> dict[str, Any]:
    """Many small files: in bounded memory, all of them."""
    harness.clear()
    shutil.rmtree(harness.source)
    harness.source.mkdir()
    for number in range(size.files):
        # Half of them in one directory, the others in hundreds.
        directory = harness.source / ("flat" if number % 2 else f"d{number // 2 % 997}")
        if number < 2 * 997 + 2:
            directory.mkdir(exist_ok=True)
        with open(directory / f"file-{number}", "wb") as file:
            if number % 16 == 0:
                file.write(b"%d" % number * 20)
    found: dict[str, Any] = {"files": size.files}
    for stage in STAGES:
        began = time.monotonic()
        outcome, memory_bytes = asyncio.run(measured(harness, stage))
        found[stage] = {"seconds": round(time.monotonic() - began, 1), "memory_mib": round(memory_bytes / (1 << 20), 1)}
        if not isinstance(outcome, OperationDone):
            raise Broken(f"{stage} of {size.files} files {said(outcome)}")
        if memory_bytes > MEMORY_BYTES_MAX:
            raise Broken(f"{stage} of {size.files} files took {memory_bytes >> 20} MiB of memory")
        source, destination = harness.places(stage)
        if sizes(source) != sizes(destination):
            raise Broken(f"{stage} of {size.files} files has not moved all of them")
        print(f"trees: {size.files} files: {found[stage]}", file=sys.stderr, flush=True)
    took = []
    shutil.rmtree(harness.destination)
    harness.destination.mkdir()
    for number in range(size.cancels):
        took.append(asyncio.run(cancelled(harness, 0.3 + 0.37 * number)))
    found["cancelled_in_s_max"] = round(max(took), 2)
    if max(took) > CANCEL_S + CANCEL_SLACK_S:
        raise Broken(f"cancelled transfers of {size.files} files were over after {took} s")
    harness.operate("teardown", [])
    if left := [path.name for path in harness.destination.rglob(".forebay-*")]:
        raise Broken(f"cancelled transfers left {left[:3]}")
    return found


def sizes(directory: Path) -> int:
    """Return what stands for the names and sizes of all files below a directory."""
    total = 0
    for where, _, files in os.walk(directory):
        relative = os.path.relpath(where, directory)
        for name in files:
            total ^= hash((relative, name, os.lstat(os.path.join(where, name)).st_size))
    return total


async def measured(harness: Harness, stage: str) -> tuple[Any, int]:
    """Do a stage and return its outcome, and the most memory that its processes had together."""
    running = asyncio.ensure_future(harness.run_transfer(harness.order(stage)))
    most = 0
    while not running.done():
        await asyncio.wait({running}, timeout=SAMPLE_S)
        most = max(most, await asyncio.to_thread(memory_of, descendants(os.getpid())))
    return running.result(), most


def memory_of(pids: list[int]) -> int:
    """Return the memory of processes, what they share divided between them, bytes."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


async def cancelled(harness: Harness, after_s: float) -> float:
    """Begin a stage-out and cancel it after a time; return how long it took to be over."""
    began = time.monotonic()
    await harness.run_transfer(harness.order("stage_out"), end_after_s=after_s)
    return max(0.0, time.monotonic() - began - after_s)


CASES = (names, own_names, depth, sparse, farm, many)
REFERENCE_CASES = (sparse, farm)
"""What a reference mover does wrong: it fills holes, and counts nothing before it begins."""


def trees(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Move every tree; Broken at the first broken promise."""
    found: dict[str, Any] = {}
    harness = Harness(directory / "trees", reference=reference)
    try:
        for case in REFERENCE_CASES if reference else CASES:
            try:
                found[case.__name__] = case(harness, size, reference=reference)
            except Broken as error:
                raise Broken(f"{case.__name__}: {error}") from error
            print(f"trees: {case.__name__}: {found[case.__name__]}", file=sys.stderr, flush=True)
    finally:
        harness.close()
    return found
