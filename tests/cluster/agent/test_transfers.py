"""Transfers under an agent: governed, alive while they advance, resumed, fenced, and never the last copy lost."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent import operation as operations
from forebay.cluster.agent import rate_loop
from forebay.cluster.agent.activities import Activities
from forebay.cluster.agent.operation import AgentSettings, WorkerOperation
from forebay.cluster.agent.runtime.state_directory import ReportOutbox, StateDirectory
from forebay.cluster.agent.worker.task import Outcome
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import OperationDone, OperationFailed, TransferProgressed
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import RateShares, TransferRules
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import DEADLINE_S

RULES = TransferRules()
MIB = 1024 * 1024
SLOW = RateShares(transfer_bytes_s=64 * 1024)
PAUSED = RateShares(node_bytes_s=0)


class Node:
    """An agent's home with a buffer in it, and places that nodes share."""

    def __init__(self, directory: Path, name: str) -> None:
        self.home = StateDirectory(directory / name, "own")
        self.outside = directory / "shared"
        self.outside.mkdir(exist_ok=True)
        self.striped = directory / name / "buffers" / "7" / "striped"
        self.striped.mkdir(parents=True)
        (self.striped.parent / "private").mkdir()

    def order(self, stage: str = "stage_out", **fields: object) -> Order:
        transfer = Transfer(TransferKind.DIRECTORY, str(self.outside / "out"), "$DW_JOB_STRIPED")
        standard = {
            "job": 7, "attempt": 1, "stage": stage, "user": "nobody", "name": "x", "workdir": "/", "timeout_s": 60,
            "roots": (str(self.outside),), "transfers": (transfer,), "rules": RULES, "shares": RateShares(),
        }  # fmt: skip
        return Order(**(standard | fields))  # type: ignore[arg-type]

    def operation(self, stage: str = "stage_out", **fields: object) -> WorkerOperation:
        return WorkerOperation(
            self.home, self.order(stage, **fields), AgentSettings(node="n1", accounts="own", cluster="c" * 32)
        )

    def operate(self, stage: str = "stage_out", **fields: object) -> Outcome | None:
        return asyncio.run(self.operation(stage, **fields).run())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, "n1")
    yield made
    made.home.close()


async def until_it_moves(operation: WorkerOperation, more_than: int = 0) -> None:
    """Wait until an operation has moved so many bytes."""
    while operation.counters().bytes_done <= more_than:
        await asyncio.sleep(0.01)


def test_a_rate_is_changed_and_a_pause_ended_while_a_transfer_goes_on(node: Node) -> None:
    (node.striped / "data").write_bytes(os.urandom(4 * MIB))

    async def story() -> None:
        operation = node.operation(shares=PAUSED)
        running = asyncio.create_task(operation.run())
        while not operation.waits:
            await asyncio.sleep(0.01)
            operation.counters()
        assert operation.counters().bytes_done == 0
        operation.change(node.order(shares=SLOW))
        await until_it_moves(operation)
        # At that rate it would take a minute.
        operation.change(node.order(shares=RateShares()))
        done = await running
        assert isinstance(done, OperationDone) and done.size_bytes == 4 * MIB

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert (node.outside / "out" / "data").read_bytes() == (node.striped / "data").read_bytes()


def test_a_pause_is_no_standing_still_but_a_process_that_does_nothing_is(node: Node) -> None:
    (node.striped / "data").write_bytes(os.urandom(MIB))

    async def paused(stall_s: int) -> Outcome | None:
        rules = msgspec.structs.replace(RULES, stall_s=stall_s)
        operation = node.operation(shares=PAUSED, rules=rules, attempt=stall_s)
        running = asyncio.create_task(operation.run())
        while not operation.waits and not running.done():
            await asyncio.sleep(0.01)
            operation.counters()
        await asyncio.wait({running}, timeout=1.5 * stall_s)
        operation.change(node.order(rules=rules, attempt=stall_s))
        return await running

    # A busy machine may keep the worker from its first sign of life for a second, too, and not for any time.
    outcomes = (asyncio.run(asyncio.wait_for(paused(stall_s), DEADLINE_S)) for stall_s in (1, 2, 4, 8))
    assert any(isinstance(outcome, OperationDone) for outcome in outcomes)

    async def stopped() -> tuple[int, Outcome | None]:
        (node.striped / "data").write_bytes(os.urandom(MIB))
        for stall_s in itertools.count(1):
            rules = msgspec.structs.replace(RULES, stall_s=stall_s)
            operation = node.operation(shares=SLOW, rules=rules, attempt=10)
            running = asyncio.create_task(operation.run())
            moving = asyncio.create_task(until_it_moves(operation))
            await asyncio.wait({running, moving}, return_when=asyncio.FIRST_COMPLETED)
            if moving.done():
                break
            moving.cancel()
        for pid in workers():
            os.killpg(pid, signal.SIGSTOP)
        return stall_s, await running

    stall_s, failed = asyncio.run(asyncio.wait_for(stopped(), DEADLINE_S))
    assert isinstance(failed, OperationFailed) and not failed.final
    assert f"stage_out made no progress for {stall_s} s and was ended: 0 of 1 file, " in failed.message
    assert "current file: data" in failed.message and failed.message.endswith("; the buffer is kept")
    assert (node.striped / "data").exists()


def workers() -> list[int]:
    """Return the workers that this process has."""
    found = []
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"cluster.agent.worker.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found


def test_with_fixed_timeouts_a_transfer_may_stand_still_as_long_as_its_time_lasts(node: Node) -> None:
    (node.striped / "data").write_bytes(b"x")
    rules = msgspec.structs.replace(RULES, stall_s=1, timeouts="fixed")
    bounds = operations._bounds(node.order(rules=rules, timeout_s=9))
    assert (bounds.limit_s, bounds.stall_s) == (9, None)
    assert operations._bounds(node.order(timeout_s=9)).stall_s == RULES.stall_s
    assert operations._bounds(node.order("teardown", timeout_s=9)).stall_s is None


@pytest.mark.parametrize("end", ["cancelled", "interrupted"])
def test_who_cancels_finds_nothing_left_and_who_interrupts_goes_on_from_there(node: Node, end: str) -> None:
    (node.striped / "big").write_bytes(os.urandom(48 * MIB))

    async def story() -> None:
        operation = node.operation(shares=RateShares(transfer_bytes_s=24 * MIB))
        running = asyncio.create_task(operation.run())
        while operation.counters().durable_bytes < 16 * MIB:
            await asyncio.sleep(0.01)
        operation.end(resuming=end == "interrupted")
        assert await running is None

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    left = [path for path in node.outside.rglob(".forebay-*/*/*") if path.is_file()]
    assert len(left) == (1 if end == "interrupted" else 0)
    done = node.operate(attempt=2)
    assert isinstance(done, OperationDone) and done.receipt is not None
    assert (done.receipt.stage, done.receipt.attempt, done.receipt.files) == (Stage.STAGE_OUT, 2, 1)
    assert (done.receipt.resumed_bytes >= 16 * MIB) == (end == "interrupted")
    assert (node.outside / "out" / "big").read_bytes() == (node.striped / "big").read_bytes()
    assert [path.name for path in (node.outside / "out").iterdir()] == ["big"]


@pytest.mark.parametrize("kind", TransferKind)
def test_an_agent_that_is_killed_goes_on_with_a_stage_in_where_it_was(site: Site, kind: TransferKind) -> None:
    # Seconds are left of it when the agent is killed.
    (site.sources / "tree").mkdir()
    big = site.sources / "tree" / "big"
    big.write_bytes(os.urandom(8 * MIB) * 10)
    if kind is TransferKind.FILE:
        transfer = Transfer(kind, str(big), "$DW_JOB_STRIPED/big")
    else:
        transfer = Transfer(kind, str(big.parent), "$DW_JOB_STRIPED/")
    paced = RateShares(transfer_bytes_s=24 * MIB)

    async def story() -> None:
        async with site.running() as (controller, agent):
            order = site.order(8, 1, "stage_in", transfers=(transfer,), rules=RULES, shares=paced)
            await controller.order(order)
            await controller.wait(
                lambda: any(row.bytes_done > 32 * MIB for poll in controller.polls for row in poll.progress)
            )
            await site.kill_agent(agent)
            await controller.order(site.order(8, 2, "stage_in", transfers=(transfer,), rules=RULES))
            site.start_agent()
            done = await controller.result(8, 2)
            assert isinstance(done, OperationDone) and done.receipt is not None
            assert done.receipt.resumed_bytes >= 16 * MIB
        data = (site.home / "buffers" / "8" / "striped" / "big").read_bytes()
        assert data == big.read_bytes()
        assert sorted(os.listdir(site.home / "buffers" / "8")) == ["private", "striped"]
        assert sorted(os.listdir(site.home / "receipts")) == ["8.1.stage_in", "8.2.stage_in"]

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_progress_says_what_a_transfer_is_busy_with_and_checkpoints_what_is_durable(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_loop, "CHECKPOINT_S", 0)
    monkeypatch.setattr(rate_loop, "CHECKPOINT_POLL_S", 0.05)
    # So long that the first chunks are durable a second before the last ones are there.
    (site.sources / "big").write_bytes(os.urandom(8 * MIB) * 9)
    transfer = Transfer(TransferKind.FILE, str(site.sources / "big"), "$DW_JOB_STRIPED/big")
    paced = RateShares(transfer_bytes_s=32 * MIB)

    async def story() -> None:
        async with site.serving() as controller:
            order = site.order(8, 1, "stage_in", transfers=(transfer,), rules=RULES, shares=paced)
            await controller.order(order)
            await controller.result(8, 1, OperationDone)
            reached = [report.result for report in controller.accepted if isinstance(report.result, TransferProgressed)]
            assert reached and all(
                (said.checkpoint.stage, said.checkpoint.attempt, said.checkpoint.total_bytes)
                == (Stage.STAGE_IN, 1, 72 * MIB)
                for said in reached
            )
            sizes = [said.checkpoint.size_bytes for said in reached]
            assert sizes == sorted(set(sizes)) and sizes[-1] <= 72 * MIB
            rows = [row for poll in controller.polls for row in poll.progress]
            assert any(row.phase == "copying" and row.file.endswith("big") and row.waiting for row in rows), rows[-5:]

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


# Never the last copy


@pytest.fixture
def small_disk(node: Node) -> Iterator[Path]:
    """A disk of 4 MiB that can be made larger, as a destination."""
    place = node.outside / "out"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs more rights")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_destination_that_is_full_keeps_the_buffer_and_is_tried_again(node: Node, small_disk: Path) -> None:
    for name in "ab":
        (node.striped / name).write_bytes(os.urandom(3 * MIB))
    failed = node.operate()
    assert isinstance(failed, OperationFailed) and not failed.final, failed
    assert "No space left on device" in failed.message
    assert failed.receipt is not None and not failed.receipt.complete and failed.receipt.left_out >= 1
    assert {name: (node.striped / name).stat().st_size for name in "ab"} == {"a": 3 * MIB, "b": 3 * MIB}
    whole = [path for path in small_disk.iterdir() if path.is_file()]
    assert all(path.read_bytes() == (node.striped / path.name).read_bytes() for path in whole)
    subprocess.run(["mount", "-o", "remount,size=32m", str(small_disk)], check=True)
    done = node.operate(attempt=2)
    assert isinstance(done, OperationDone) and done.files == 2
    assert sorted(os.listdir(small_disk)) == ["a", "b"]


def test_a_file_system_below_the_destination_is_refused_by_name_and_for_good(node: Node, small_disk: Path) -> None:
    (node.striped / "out").mkdir()
    (node.striped / "out" / "a").write_text("a")
    everything = Transfer(TransferKind.DIRECTORY, str(node.outside), "$DW_JOB_STRIPED")
    failed = node.operate(transfers=(everything,))
    assert isinstance(failed, OperationFailed) and failed.final
    assert "is not on the filesystem of the transfer's destination directory" in failed.message
    assert os.listdir(small_disk) == [] and os.listdir(node.outside) == ["out"]


def test_a_job_may_have_more_destinations_than_files_may_be_open_by_default(
    node: Node, request: pytest.FixtureRequest
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limits))
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    transfers, count = [], 60
    for number in range(count):
        (node.striped / str(number)).write_text(str(number))
        destination = node.outside / "out" / str(number) / "a"
        transfers.append(Transfer(TransferKind.FILE, str(destination), f"$DW_JOB_STRIPED/{number}"))
    done = node.operate(transfers=tuple(transfers))
    assert isinstance(done, OperationDone) and done.files == count
    assert {path.name: path.joinpath("a").read_text() for path in (node.outside / "out").iterdir()} == {
        str(number): str(number) for number in range(count)
    }
    assert not list(node.outside.rglob(".forebay-*"))


# Fenced


@contextlib.asynccontextmanager
async def claimed(operation: WorkerOperation, out: Path) -> AsyncIterator[asyncio.Task[Outcome | None]]:
    """Give an operation that has claimed its destination and waits for its rate."""
    running = asyncio.create_task(operation.run())
    while not operation.waits:
        await asyncio.sleep(0.01)
        operation.counters()
    assert list(out.glob(".forebay-*/*"))
    yield running


def test_a_late_agent_puts_nothing_in_place_once_a_newer_attempt_is_there(tmp_path: Path) -> None:
    late, newer = Node(tmp_path, "n1"), Node(tmp_path, "n2")
    (late.striped / "result").write_bytes(b"old" * MIB)
    (newer.striped / "result").write_bytes(b"new" * MIB)

    async def story() -> None:
        operation = late.operation(attempt=3, shares=PAUSED)
        async with claimed(operation, late.outside / "out") as running:
            done = await newer.operation(attempt=4).run()
            assert isinstance(done, OperationDone)
            operation.change(late.order(attempt=3))
            failed = await running
            assert isinstance(failed, OperationFailed) and "a newer attempt has taken over" in failed.message

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert os.listdir(late.outside / "out") == ["result"]
    assert (late.outside / "out" / "result").read_bytes() == b"new" * MIB
    for node in (late, newer):
        node.home.close()


def test_of_two_agents_with_the_same_order_one_gives_way(tmp_path: Path) -> None:
    nodes = [Node(tmp_path, "n1"), Node(tmp_path, "n2")]
    for number, node in enumerate(nodes):
        (node.striped / "result").write_bytes(str(number).encode() * MIB)

    async def story() -> None:
        operation = nodes[0].operation(attempt=3, shares=PAUSED)
        async with claimed(operation, nodes[0].outside / "out") as running:
            failed = await nodes[1].operation(attempt=3).run()
            assert (
                isinstance(failed, OperationFailed) and "another agent carries out the same attempt" in failed.message
            )
            operation.change(nodes[0].order(attempt=3))
            assert isinstance(await running, OperationDone)

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert (nodes[0].outside / "out" / "result").read_bytes() == b"0" * MIB
    assert os.listdir(nodes[0].outside / "out") == ["result"]
    for node in nodes:
        node.home.close()


def test_nothing_is_put_in_place_for_an_order_that_nobody_confirmed_lately(node: Node) -> None:
    (node.striped / "result").write_text("x")

    async def story() -> None:
        operation = node.operation()
        operation.stands_until(SystemClock().monotonic_s() - 1)
        async with claimed(operation, node.outside / "out") as running:
            assert not (node.outside / "out" / "result").exists()
            operation.stands_until(SystemClock().monotonic_s() + 60)
            assert isinstance(await running, OperationDone)

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert (node.outside / "out" / "result").read_text() == "x"


# What hangs


@pytest.fixture
def dead_mount(node: Node, tmp_path: Path) -> Iterator[Path]:
    """A file system whose writers wait in the kernel, where no signal reaches them."""
    place, image = node.outside / "out", tmp_path / "image"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(32 * MIB)
    tools = all(shutil.which(tool) for tool in ("mkfs.ext4", "fsfreeze"))
    mount = ["mount", "-o", "loop", str(image), str(place)]
    if os.geteuid() != 0 or not tools or subprocess.run(["mkfs.ext4", "-q", str(image)], check=False).returncode != 0:
        pytest.skip("freezing a file system needs more rights")
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a file system needs more rights")
    (place / "lost+found").rmdir()
    subprocess.run(["fsfreeze", "--freeze", str(place)], check=True)
    yield place
    subprocess.run(["fsfreeze", "--unfreeze", str(place)], capture_output=True, check=False)
    subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_dead_mount_stops_neither_a_cancel_nor_the_agent_nor_the_jobs_of_others(
    node: Node, dead_mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operations, "LOCK_WAIT_S", 0.5)
    (node.striped / "data").write_bytes(b"x" * MIB)
    rules = msgspec.structs.replace(RULES, stall_s=1)

    async def story() -> None:
        while not len(node.home.hung):  # a busy machine may keep the worker from its first call for a second, too
            failed = await node.operation(rules=rules).run()
            assert isinstance(failed, OperationFailed) and not failed.final
            assert "made no progress for 1 s" in failed.message
        assert "in a call that no signal ends (" in failed.message
        assert len(node.home.hung) == 1
        # What follows for the job must not begin beside it, and says why; another one's is done.
        waiting = await node.operation("teardown", attempt=2, transfers=()).run()
        assert isinstance(waiting, OperationFailed) and not waiting.final
        assert "a process of an earlier operation of job 7 has not ended: process " in waiting.message
        assert (node.striped / "data").exists()
        other = node.order("stage_in", job=8, transfers=())
        assert isinstance(
            await WorkerOperation(node.home, other, AgentSettings(node="n1", accounts="own")).run(), OperationDone
        )
        # A cancel is not kept waiting either.
        cancelled = node.operation(attempt=3)
        running = asyncio.create_task(cancelled.run())
        await asyncio.sleep(0)
        cancelled.end()
        assert await running is None
        await asyncio.to_thread(subprocess.run, ["fsfreeze", "--unfreeze", str(dead_mount)], check=True)
        while len(node.home.hung):
            await asyncio.sleep(0.01)
        assert isinstance(await node.operation(attempt=4).run(), OperationDone)

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert (dead_mount / "data").read_bytes() == b"x" * MIB and os.listdir(dead_mount) == ["data"]


def test_when_too_much_hangs_no_more_is_moved_but_teardowns_go_on(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.cluster.agent.activities.HUNG_MAX", 0)

    async def story() -> None:
        clock = SystemClock()
        outbox = ReportOutbox(node.home.outbox, clock, node.home.reserve_files)
        activities = Activities(node.home, outbox, AgentSettings(node="n1", accounts="own"), clock)
        orders = (node.order(), node.order("teardown", job=8, transfers=()))
        for _ in range(2):
            activities.reconcile(orders)
        while not outbox.reports():
            await asyncio.sleep(0.01)
        assert [report.job for report in outbox.reports()] == [8]
        await activities.stop()

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))
    assert caplog.text.count("this node moves no data until") == 1
