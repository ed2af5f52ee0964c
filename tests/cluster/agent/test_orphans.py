"""What a killed transfer leaves in a destination is removed, and nothing else is."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.files.durable import FileRefused
from forebay.cluster.agent.operation import AgentSettings, WorkerOperation
from forebay.cluster.agent.processes.environment import Mode
from forebay.cluster.agent.runtime.state_directory import StateDirectory
from forebay.cluster.agent.worker import orphans
from forebay.cluster.agent.worker.orphans import Orphans, orphan_tag
from forebay.cluster.agent.worker.task import Outcome
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import DEADLINE_S, shown

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")

SLOW_BYTES_S = 64 * 1024


class Place:
    """An agent's home, and a destination."""

    def __init__(self, directory: Path, accounts: Mode) -> None:
        self.accounts: Mode = accounts
        self.home = StateDirectory(directory / "n1", accounts)
        self.outside = directory / "out"
        self.outside.mkdir()
        self.left = directory / "n1" / "leftovers"
        self.striped = directory / "n1" / "buffers" / "7" / "striped"

    def order(self, stage: str, **fields: object) -> Order:
        transfer = Transfer(TransferKind.DIRECTORY, str(self.outside / "tree"), "$DW_JOB_STRIPED")
        standard = {
            "job": 7, "attempt": 1, "stage": stage, "user": "nobody", "name": "x", "workdir": "/", "timeout_s": 30,
            "roots": (str(self.outside),), "transfers": (msgspec.to_builtins(transfer),),
        }  # fmt: skip
        return msgspec.convert(standard | fields, type=Order)

    def operate(self, stage: str, **fields: object) -> Outcome | None:
        return asyncio.run(
            WorkerOperation(
                self.home, self.order(stage, **fields), AgentSettings(node="n1", accounts=self.accounts)
            ).run()
        )

    def fill(self, size_bytes: int) -> None:
        """Let the buffer hold one file, two directories deep."""
        (self.striped / "a" / "b").mkdir(parents=True)
        (self.striped / "a" / "b" / "data").write_bytes(os.urandom(size_bytes))

    def record(self, *directories: Path) -> None:
        """Record directories as an operation does."""
        left = Orphans(user="nobody", roots=(str(self.outside),), directories=tuple(map(str, directories)))
        orphans.record_orphans(self.home.leftovers, self.home.reserve_files, 7, left)

    def part(self, directory: Path, *, job: int = 7, attempt: int = 3, storage_id: str = "") -> Path:
        """Make a temporary file in a staging directory."""
        staging = directory / f".forebay-alone-{job}" / f"{attempt}.{storage_id or self.home.storage_id}"
        staging.mkdir(parents=True, mode=0o700)
        staging.parent.chmod(0o700)
        file = staging / "x.part"
        file.write_text("half")
        return file


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path, "own")
    yield made
    made.home.close()


def parts_of(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob(".forebay-*/*/*") if path.is_file())


def worker_of(parent: int) -> int | None:
    """Return the worker that a process has, None if it has none."""
    for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
        with contextlib.suppress(OSError):
            if b"cluster.agent.worker.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


async def killed_stage_out(place: Place) -> Outcome | None:
    """Let a worker be killed while it copies, and return the result."""
    running = asyncio.create_task(
        WorkerOperation(
            place.home,
            place.order("stage_out"),
            AgentSettings(node="n1", accounts="own", copy_rate_bytes_s=SLOW_BYTES_S),
        ).run()
    )
    while not parts_of(place.outside):
        await asyncio.sleep(0.01)
    worker = worker_of(os.getpid())
    assert worker is not None
    os.kill(worker, signal.SIGKILL)
    return await running


@pytest.mark.parametrize("stage", ["teardown", "stage_out"])
def test_what_a_killed_stage_out_left_is_removed_by_what_follows(place: Place, stage: str) -> None:
    place.fill(1024 * 1024)
    failed = asyncio.run(killed_stage_out(place))
    assert isinstance(failed, OperationFailed) and "was killed by signal 9" in failed.message
    assert [part.parents[2] for part in parts_of(place.outside)] == [place.outside / "tree"]
    assert os.listdir(place.left) == ["7"]
    if stage == "stage_out":
        # It is not even the same file any more.
        shutil.rmtree(place.striped / "a")
        (place.striped / "other").write_text("x")
    assert isinstance(place.operate(stage), OperationDone)
    assert not list(place.outside.rglob(".forebay-*")) and os.listdir(place.left) == []


def test_a_stage_out_that_is_done_leaves_no_record_and_one_that_failed_nothing_but_that(place: Place) -> None:
    place.fill(10)
    assert isinstance(place.operate("stage_out"), OperationDone)
    assert os.listdir(place.left) == []
    (place.outside / "tree" / "a" / "b" / "data").unlink()
    (place.outside / "tree" / "a" / "b" / "data").mkdir()
    failed = place.operate("stage_out")
    assert isinstance(failed, OperationFailed) and "a file can only replace a regular file" in failed.message
    assert not list(place.outside.rglob(".forebay-*")) and os.listdir(place.left) == ["7"]
    assert isinstance(place.operate("teardown"), OperationDone)
    assert os.listdir(place.left) == []


def test_the_agent_removes_what_was_left_when_the_order_is_gone(site: Site) -> None:
    site.configure(more='copy_rate = "64KiB"')

    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 1, "stage_in"))
            await controller.result(7, 1)
            (site.home / "buffers" / "7" / "striped" / "big").write_bytes(os.urandom(1024 * 1024))
            transfer = Transfer(TransferKind.FILE, str(site.destinations / "new" / "big"), "$DW_JOB_STRIPED/big")
            await controller.order(site.order(7, 2, "stage_out", transfers=(transfer,)))
            while not parts_of(site.destinations):
                await asyncio.sleep(0.01)
            # The kernel kills the worker with its agent, and the controller gives the job up meanwhile.
            await site.kill_agent(agent)
            assert len(parts_of(site.destinations)) == 1
            await controller.withdraw(7)
            shutil.rmtree(site.home / "buffers" / "7")
            site.start_agent()
            # It is said last.
            said = "removed 1 temporary file of an ended transfer"
            while said not in shown(site.directory / "agent.log"):
                await asyncio.sleep(0.01)
            assert parts_of(site.destinations) == [] and os.listdir(site.home / "leftovers") == []
            assert os.listdir(site.destinations / "new") == []

    asyncio.run(asyncio.wait_for(story(), DEADLINE_S))


def test_only_temporary_files_of_this_job_and_this_node_are_removed(place: Place) -> None:
    mine = [place.part(place.outside), place.part(place.outside, attempt=4)]
    kept = {
        place.part(place.outside, job=77),
        place.part(place.outside, storage_id="f" * 32),
        place.outside / "data",
        place.outside / ".forebay-alone-7" / "mine",
        place.outside / f"{orphan_tag(7, place.home.storage_id)}{'0' * 16}.part.keep",
    }
    for path in kept:
        path.write_text("x")
    place.record(place.outside)
    assert isinstance(place.operate("teardown"), OperationDone)
    assert not any(path.exists() for path in mine) and all(path.exists() for path in kept)


def test_one_directory_that_cannot_be_swept_keeps_no_other_one_from_it(place: Place) -> None:
    (place.outside / "good").mkdir()
    part = place.part(place.outside / "good")
    place.record(place.outside.parent / "n1", place.outside / "good", place.outside / "gone")
    assert isinstance(place.operate("teardown"), OperationDone)
    assert not part.exists()


@pytest.mark.parametrize("way", ["outside the roots", "through a link", "into the agent's own directory"])
def test_a_forged_record_removes_nothing_where_the_job_may_not_write(place: Place, tmp_path: Path, way: str) -> None:
    victim = tmp_path / "n1" / "buffers" if way.startswith("into") else tmp_path / "victim"
    victim.mkdir(exist_ok=True)
    precious = place.part(victim)
    if way == "through a link":
        (place.outside / "link").symlink_to(victim)
        place.record(place.outside / "link")
    else:
        place.record(victim)
    # The teardown itself is done: nobody has to wait for what cannot be put right.
    assert isinstance(place.operate("teardown"), OperationDone)
    assert precious.read_text() == "half" and os.listdir(place.left) == []


def test_a_record_whose_directory_is_gone_or_was_never_written_is_nothing(place: Place) -> None:
    place.record(place.outside / "gone")
    assert isinstance(place.operate("teardown"), OperationDone)
    assert os.listdir(place.left) == []
    place.record()
    assert isinstance(place.operate("teardown"), OperationDone)
    assert os.listdir(place.left) == []


def test_a_damaged_record_is_named_and_stops_no_teardown(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    (place.left / "7").write_bytes(b"{")
    with pytest.raises(FileRefused, match=r"leftovers/7 is damaged .* and then this file"):
        orphans.read_orphans(place.home.leftovers, 7)
    assert isinstance(place.operate("teardown"), OperationDone)
    assert "leftovers/7 is damaged" in caplog.text


@needs_root
def test_with_switched_accounts_what_is_left_is_removed_as_the_jobs_user_and_only_so() -> None:
    # Not below pytest's own directory, which is closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="forebay-test-"))
    directory.chmod(0o711)
    place = Place(directory, "switch")
    try:
        of_root = place.part(place.outside)
        place.record(place.outside)
        assert isinstance(place.operate("teardown"), OperationDone)
        assert of_root.exists(), "removed as root"
        for path in (place.outside, of_root.parents[1], of_root.parents[0]):
            shutil.chown(path, "nobody")
        place.record(place.outside)
        assert isinstance(place.operate("teardown"), OperationDone)
        assert not of_root.exists()
    finally:
        place.home.close()
        shutil.rmtree(directory)
