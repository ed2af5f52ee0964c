"""Jobs that write more than their buffer may hold: each is ended, and told why."""

from __future__ import annotations

import asyncio
import contextlib
import math
import mmap
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.capacity_watch import rest_s
from forebay.cluster.agent.limits import WATCH_REST_TIMES, WATCH_S
from forebay.cluster.agent.worker import UsageReply, UsageRequest, buffer_usage
from forebay.cluster.agent.worker.buffer_usage import (
    PREALLOCATED_BYTES,
    PREALLOCATED_TIMES,
    SLICE,
    Usage,
    UsageQuery,
    inodes_of,
    measure,
)
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.job_states import JobState
from tests.cluster.agent.conftest import Site
from tests.faults.attacks.jobs import ENDLESS, WRITES

ROOT = Path(__file__).parents[3]
MIB = 1024**2


@pytest.mark.parametrize("kind", WRITES)
def test_a_script_that_writes_more_than_its_buffer_may_hold_is_ended_and_told_why(site: Site, kind: str) -> None:
    writes, told = WRITES[kind]

    async def story() -> None:
        async with contextlib.AsyncExitStack() as held:
            if kind == "removed":
                # Which processes are the job's is known by its cgroup, and only an agent's own process has cgroups.
                controller, _ = await held.enter_async_context(site.running())
            else:
                controller = await held.enter_async_context(site.serving())
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)
            script = f'#!/bin/sh\ntrap "" TERM\ncd "$DW_JOB_STRIPED" || exit 9\n{writes}\n{ENDLESS}\n'
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=MIB, time_limit_s=600))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded)
            assert (ended.result, ended.signal) == (JobState.FAILED, 9)
            assert told in ended.message and "request more capacity" in ended.message

    asyncio.run(story())


def test_a_script_whose_buffer_is_full_to_the_byte_goes_on(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)
            writes = 'cd "$DW_JOB_STRIPED" && for i in 1 2 3 4; do dd if=/dev/zero of=$i bs=256K count=1; done'
            script = f"#!/bin/sh\n{writes}\nsleep 4\n"
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=MIB))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded) and ended.result is JobState.COMPLETED, ended

    asyncio.run(story())


@pytest.mark.parametrize("held", ["open", "mapped"])
def test_removed_files_that_a_process_of_the_cgroup_holds_are_counted_once(tmp_path: Path, held: str) -> None:
    """Here the processes are listed by a stand-in of the cgroup; the cgroup itself is in the test above."""
    path, other = tmp_path / "big", tmp_path.parent / f"{tmp_path.name}-other"
    path.write_bytes(b"x" * MIB)
    other.write_bytes(b"x" * MIB)
    with (
        path.open("r+b") as first,
        path.open("r+b") as second,
        other.open("rb") as elsewhere,
        contextlib.ExitStack() as end,
    ):
        os.sync()
        if held == "mapped":
            end.enter_context(mmap.mmap(first.fileno(), 0))
            first.close()
            second.close()
        path.unlink()
        other.unlink()
        found = [one for one in buffer_usage.removed_files([os.getpid(), 2**22], f"{tmp_path}/") if one is not None]
        assert {one.st_size for one in found} == {MIB} and len({one.st_ino for one in found}) == 1
        assert not elsewhere.closed
    assert not [one for one in buffer_usage.removed_files([os.getpid()], f"{tmp_path}/") if one is not None]


def test_a_buffer_with_many_files_keeps_no_other_waiting_to_be_counted(tmp_path: Path) -> None:
    many, few = tmp_path / "many", tmp_path / "few"
    many.mkdir()
    few.mkdir()
    for number in range(4 * SLICE):
        (many / str(number)).touch()
    (few / "x").touch()
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cluster.agent.worker.usage_counter", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    looks = [UsageQuery(path=str(path), most_bytes=2**60, most_inodes=2**60) for path in (many, tmp_path / "gone", few)]
    lines = b"".join(msgspec.json.encode(UsageRequest(number, one)) + b"\n" for number, one in enumerate(looks))
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(lines)
        process.stdin.flush()
        answers = [msgspec.json.decode(process.stdout.readline(), type=UsageReply) for _ in looks]
        process.stdin.close()
    assert process.returncode == 0
    assert [(answer.number, answer.usage.inodes, answer.fault) for answer in answers] == [
        (1, 0, ""),
        (2, 1, ""),
        (0, 4 * SLICE, ""),
    ]


def test_a_buffer_that_cannot_be_counted_costs_the_others_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    process = subprocess.run(
        [sys.executable, "-m", "forebay.cluster.agent.worker.usage_counter", str(os.getpid())],
        input=b"".join(
            msgspec.json.encode(UsageRequest(number, UsageQuery(path=str(path), most_bytes=1, most_inodes=1))) + b"\n"
            for number, path in enumerate((tmp_path / "file", tmp_path))
        ),
        stdout=subprocess.PIPE,
        cwd=ROOT,
        check=True,
    )
    first, second = (msgspec.json.decode(line, type=UsageReply) for line in process.stdout.splitlines())
    assert (first.number, bool(first.fault)) == (0, True)
    assert (second.number, second.fault, second.usage.inodes) == (1, "", 1)


@given(took_s=st.lists(st.floats(0, 1e4), min_size=1, max_size=200))
def test_counts_rest_for_no_longer_one_and_take_a_small_part_of_a_processor_together(took_s: list[float]) -> None:
    rests_s = [rest_s(mine, took_s) for mine in took_s]
    for mine, rest in zip(took_s, rests_s, strict=True):
        assert rest <= max(WATCH_S, WATCH_REST_TIMES * mine * len(took_s)) + 1e-6
    share = sum(mine / (mine + rest) for mine, rest in zip(took_s, rests_s, strict=True))
    assert share <= (1 + math.log(len(took_s))) / WATCH_REST_TIMES + 1e-9


def look(directory: Path, most_bytes: int = 2**60, most_inodes: int = 2**60) -> Usage:
    return measure(UsageQuery(path=str(directory), most_bytes=most_bytes, most_inodes=most_inodes))


trees = st.recursive(
    st.integers(0, 9000), lambda below: st.dictionaries(st.sampled_from("abcdef"), below, max_size=4), max_leaves=12
).filter(lambda tree: isinstance(tree, dict))


def grow(directory: Path, tree: object) -> tuple[int, int]:
    """Make a tree; return the bytes and the inodes in it."""
    assert isinstance(tree, dict)
    size_bytes = inodes = 0
    for name, below in tree.items():
        inodes += 1
        if isinstance(below, dict):
            (directory / name).mkdir()
            more_bytes, more = grow(directory / name, below)
            size_bytes, inodes = size_bytes + more_bytes, inodes + more
        else:
            (directory / name).write_bytes(b"x" * below)
            size_bytes += below
    return size_bytes, inodes


@given(tree=trees)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_what_a_tree_holds_is_counted_exactly_and_one_less_is_too_little(
    tmp_path_factory: pytest.TempPathFactory, tree: object
) -> None:
    directory = tmp_path_factory.mktemp("tree")
    size_bytes, inodes = grow(directory, tree)
    # What was written and has no blocks yet is counted once it has.
    os.sync()
    assert look(directory) == Usage(size_bytes=size_bytes, inodes=inodes)
    assert not look(directory, size_bytes, inodes).excess
    if size_bytes:
        assert look(directory, size_bytes - 1, inodes).excess == "bytes"
    if inodes:
        assert look(directory, size_bytes, inodes - 1).excess == "inodes"


def _linked(directory: Path) -> None:
    (directory / "a").write_bytes(b"x" * 8192)
    os.link(directory / "a", directory / "b")
    os.symlink("/", directory / "root")


def _sparse(directory: Path) -> None:
    with (directory / "a").open("wb") as file:
        file.truncate(1 << 40)
        file.write(b"x" * 8192)


@pytest.mark.parametrize("make", [_linked, _sparse])
def test_a_file_counts_once_and_with_what_it_takes_and_no_link_is_followed(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    make(tmp_path)
    os.sync()
    assert look(tmp_path).size_bytes == 8192


def test_what_is_reserved_beyond_the_end_of_files_is_bounded_too(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        try:
            os.posix_fallocate(file.fileno(), 0, PREALLOCATED_BYTES + (PREALLOCATED_TIMES + 1) * MIB)
        except OSError as error:
            pytest.skip(f"nothing can be reserved here: {error.strerror}")
        os.truncate(file.fileno(), MIB)
    found = look(tmp_path, MIB)
    # A file system gives back what a file is cut off from.
    assert found.excess == "" and found.size_bytes == MIB


@pytest.mark.parametrize("capacity_bytes", [1, MIB, 10 * MIB, 1 << 40])
def test_a_buffer_may_hold_as_many_files_as_its_capacity_is_worth(capacity_bytes: int) -> None:
    assert inodes_of(capacity_bytes) == max(10_000, capacity_bytes // 512)
