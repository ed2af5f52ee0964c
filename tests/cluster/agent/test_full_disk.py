"""A disk that is full: the agent goes on, keeps what it knows, says so once a minute, and reports nothing too early."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.files import durable
from forebay.cluster.agent.files.durable import ReserveFiles, read_bounded, reserve, write_durably
from forebay.cluster.agent.limits import DISK_FULL_WARNING_S, RESERVE_BYTES, RESERVE_FILES
from forebay.cluster.agent.operation import AgentSettings, WorkerOperation
from forebay.cluster.agent.runtime.state_directory import DiskFullRetry, ReportOutbox, RetryAbandoned, StateDirectory
from forebay.cluster.agent.script_run import ScriptRun
from forebay.cluster.agent.scripts.record import ScriptRecord
from forebay.cluster.agent.scripts.supervisor import retry_write
from forebay.cluster.agent.service import Agent
from forebay.cluster.schemas.agents import OperationReport, PollRequest, RegisterRequest, ReportsRequest
from forebay.cluster.schemas.jobs import PollAnswer, RegisterAnswer, ReportResult, ReportsAnswer
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.descriptors import open_directory
from forebay.replica.messages.commands import OperationDone, OperationFailed, ScriptEnded, ScriptStarted
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.values.limits import MESSAGE_CHARACTERS_MAX
from tests.clocks import ManualClock
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import script_of, shown

OWN = AgentSettings(node="n1", accounts="own", kill_wait_s=1.0)


class Disk:
    """What a test does to the disk: new files cannot be made on it while it is full; what exists can be overwritten."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.full = False
        self.refused = 0
        fill = durable._fill

        def filling(directory: int, name: str, how: int, *rest: object, **more: object) -> None:
            if how & os.O_CREAT:
                self.check()
            fill(directory, name, how, *rest, **more)  # type: ignore[arg-type]

        def reserving(directory: int, name: str) -> None:
            self.check()
            reserve(directory, name)

        patch.setattr(durable, "_fill", filling)
        patch.setattr(durable, "reserve", reserving)

    def check(self) -> None:
        """Refuse as the kernel does."""
        if self.full:
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[StateDirectory]:
    with contextlib.closing(StateDirectory(tmp_path / "n1", "own")) as made:
        yield made


def order(job: int, stage: str, **fields: object) -> Order:
    standard = {"job": job, "attempt": 1, "stage": stage, "user": "alice", "name": "x", "workdir": "/", "timeout_s": 30}
    return msgspec.convert(standard | fields, type=Order)


# Room that was reserved


def test_a_file_with_reserved_room_is_written_on_a_full_disk_and_read_as_what_was_written(
    tmp_path: Path, disk: Disk
) -> None:
    directory = open_directory(tmp_path)
    reserve(directory, "f.room")
    disk.full = True
    write_durably(directory, "f", b'{"a": 1}')
    assert msgspec.json.decode(read_bounded(directory, "f") or b"") == {"a": 1}
    assert os.listdir(tmp_path) == ["f"]
    with pytest.raises(OSError, match="No space left"):
        write_durably(directory, "f", b'{"a": 2}')
    assert msgspec.json.decode(read_bounded(directory, "f") or b"") == {"a": 1}
    assert os.listdir(tmp_path) == ["f"]
    os.close(directory)


def test_the_longest_report_there_can_be_fits_into_a_spare_file() -> None:
    longest = OperationFailed("\x01" * MESSAGE_CHARACTERS_MAX)
    ended = ScriptEnded(JobState.NODE_FAIL, 255, 64, "\x01" * MESSAGE_CHARACTERS_MAX)
    for result in (longest, ended):
        report = OperationReport(command_id="f" * 32, job=2**63, attempt=2**31, stage="stage_out", result=result)
        assert len(msgspec.json.encode(report)) <= RESERVE_BYTES


def test_results_go_on_through_a_full_disk_for_ever_because_acknowledged_ones_come_back(
    home: StateDirectory, disk: Disk
) -> None:
    async def story() -> None:
        outbox = ReportOutbox(home.outbox, SystemClock(), home.reserve_files)
        disk.full = True
        for job in range(3 * RESERVE_FILES):
            outbox.add(job, 1, "post_run", OperationDone())
            assert ReportOutbox(home.outbox, SystemClock(), home.reserve_files).reports() == outbox.reports()
            assert outbox.acknowledge(outbox.batch()[0].command_id) is not None
        assert len(home.reserve_files) == RESERVE_FILES and os.listdir(home.outbox) == []

    asyncio.run(story())


def test_spare_files_that_are_used_up_are_made_again_when_there_is_room(home: StateDirectory, disk: Disk) -> None:
    async def story() -> None:
        outbox = ReportOutbox(home.outbox, SystemClock(), home.reserve_files)
        disk.full = True
        for job in range(RESERVE_FILES):
            outbox.add(job, 1, "post_run", OperationDone())
        with pytest.raises(OSError, match="No space left"):
            outbox.add(RESERVE_FILES, 1, "post_run", OperationDone())
        assert len(outbox) == RESERVE_FILES and len(home.reserve_files) == 0
        disk.full = False
        outbox.add(RESERVE_FILES, 1, "post_run", OperationDone())
        assert len(home.reserve_files) == RESERVE_FILES
        assert [report.job for report in outbox.reports()] == list(range(RESERVE_FILES + 1))

    asyncio.run(story())


def test_spare_files_are_taken_stock_of_at_a_start(tmp_path: Path) -> None:
    (tmp_path / "3").write_bytes(bytes(RESERVE_BYTES))
    (tmp_path / "x").write_bytes(b"cut off by a crash")
    directory = open_directory(tmp_path)
    assert len(ReserveFiles(directory)) == len(ReserveFiles(directory)) == len(os.listdir(directory)) == RESERVE_FILES
    assert not (tmp_path / "x").exists()
    os.close(directory)


# Waiting


def test_who_waits_for_room_says_so_once_a_minute_and_goes_on_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ManualClock()
    room = DiskFullRetry("/n1", clock)
    caplog.set_level(logging.INFO)
    tries = 0

    def act() -> str:
        nonlocal tries
        tries += 1
        clock.advance(DISK_FULL_WARNING_S / 4)
        if tries <= 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return "done"

    monkeypatch.setattr("forebay.cluster.agent.runtime.state_directory.DISK_FULL_RETRY_S_MAX", 0.001)
    monkeypatch.setattr("forebay.cluster.agent.runtime.state_directory.DISK_FULL_RETRY_S", 0.001)
    assert asyncio.run(room.keep_trying("a result", act, asyncio.Event())) == "done"
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["/n1: No space left on device: a result waits for space; free some, nothing is lost"] * 3
    assert caplog.records[-1].getMessage() == "/n1: there is space again"


def test_what_has_nothing_to_do_with_room_is_not_waited_for_and_what_is_unwanted_gives_up() -> None:
    def broken() -> None:
        raise OSError(errno.EIO, "broken")

    def full() -> None:
        unwanted.set()
        raise OSError(errno.EDQUOT, "over quota")

    room, unwanted = DiskFullRetry("/n1", ManualClock()), asyncio.Event()
    with pytest.raises(OSError, match="broken"):
        asyncio.run(room.keep_trying("x", broken, unwanted))
    with pytest.raises(RetryAbandoned):
        asyncio.run(room.keep_trying("x", full, unwanted))


class Watching:
    """A controller that answers every poll at once and looks, for each report, whether it is on the disk."""

    def __init__(self, home: StateDirectory, orders: tuple[Order, ...]) -> None:
        self._home = home
        self._orders = orders
        self.polls = 0
        self.polled = asyncio.Condition()
        self.reports: asyncio.Queue[OperationReport] = asyncio.Queue()
        self.early: list[OperationReport] = []

    async def register(self, node: str, request: RegisterRequest) -> RegisterAnswer:
        return RegisterAnswer(revision=4)

    async def poll(self, node: str, request: PollRequest) -> PollAnswer:
        await asyncio.sleep(0.01)
        async with self.polled:
            self.polls += 1
            self.polled.notify_all()
        return PollAnswer(revision=5, orders=self._orders)

    async def report(self, node: str, request: ReportsRequest) -> ReportsAnswer:
        kept = ReportOutbox(os.dup(self._home.outbox), SystemClock(), self._home.reserve_files).reports()
        self.early.extend(report for report in request.reports if report not in kept)
        for report in request.reports:
            self.reports.put_nowait(report)
        results = tuple(ReportResult(command_id=report.command_id, outcome="accepted") for report in request.reports)
        return ReportsAnswer(revision=5, results=results)

    async def polls_more(self, count: int) -> None:
        """Wait for so many further polls."""
        wanted = self.polls + count
        async with self.polled:
            await self.polled.wait_for(lambda: self.polls >= wanted)


@contextlib.asynccontextmanager
async def running(home: StateDirectory, controller: Watching):  # type: ignore[no-untyped-def]
    """An agent at work."""
    stop = asyncio.Event()
    task = asyncio.create_task(Agent(home, OWN, 2, controller, SystemClock()).run(stop))
    try:
        async with asyncio.timeout(30):
            yield task
    finally:
        stop.set()
        await task


def without_spares(home: StateDirectory, disk: Disk) -> None:
    """Use up every spare file, and let there be no room for more."""
    disk.full = True
    for number in range(RESERVE_FILES):
        assert home.reserve_files.lend(home.descriptor, f"used-{number}")


def test_a_result_that_finds_no_room_is_kept_and_reported_once_it_is_durable_while_the_agent_polls_on(
    home: StateDirectory, disk: Disk
) -> None:
    async def story() -> None:
        controller = Watching(home, (order(7, "post_run"),))
        without_spares(home, disk)
        async with running(home, controller) as agent:
            while not disk.refused:
                await controller.polls_more(1)
            await controller.polls_more(5)
            assert not agent.done() and controller.reports.empty() and os.listdir(home.outbox) == []
            disk.full = False
            report = await controller.reports.get()
            assert (report.job, report.result) == (7, OperationDone())
        assert controller.early == [] and controller.reports.empty()

    asyncio.run(story())


def test_a_result_that_waits_for_room_does_not_keep_the_agent_from_ending_and_its_script_is_reported_by_the_next(
    home: StateDirectory, disk: Disk, tmp_path: Path
) -> None:
    script = order(7, "run", script=script_of("exit 5"), workdir=str(tmp_path), roots=(str(tmp_path),))

    async def story() -> None:
        controller = Watching(home, (script, order(8, "post_run")))
        await prepared(home, script)
        without_spares(home, disk)
        async with running(home, controller):
            await until_ended(home, 7)
            while disk.refused < 3:
                await controller.polls_more(1)
        assert controller.reports.empty()
        disk.full = False
        later = Watching(home, (script,))
        async with running(home, later):
            while not isinstance((report := await later.reports.get()).result, ScriptEnded):
                pass
            assert report.result == ScriptEnded(JobState.FAILED, 5, 0)
        assert later.early == []

    asyncio.run(story())


async def prepared(home: StateDirectory, script: Order) -> None:
    """Make the record of a script while there is room."""
    ScriptRun(home, script, OWN, lambda: None)._create()


async def until_ended(home: StateDirectory, job: int) -> None:
    """Wait for the status of a script, which only the file system tells."""
    while True:
        record = ScriptRecord(home.steps, job)
        try:
            if record.status() is not None:
                return
        finally:
            record.close()
        await asyncio.sleep(0.01)


def test_a_script_that_finds_no_room_waits_and_is_cancelled_without_having_run_if_nobody_wants_it(
    home: StateDirectory, disk: Disk, tmp_path: Path
) -> None:
    async def story() -> None:
        script = order(7, "run", script=script_of("echo ran > ran"), workdir=str(tmp_path), roots=(str(tmp_path),))
        disk.full = True
        steps = [ScriptRun(home, script, OWN, lambda: None) for _ in range(2)]
        waiting = asyncio.create_task(steps[0].run())
        while not disk.refused:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        steps[0].end()
        assert await waiting == ScriptEnded(JobState.CANCELLED)
        assert not (tmp_path / "ran").exists()
        disk.full = False
        assert await steps[1].run() == ScriptEnded(JobState.COMPLETED)
        assert shown(tmp_path / "ran") == "ran\n"

    asyncio.run(story())


def test_the_start_of_a_script_that_finds_no_room_is_reported_once_when_there_is_some(
    home: StateDirectory, tmp_path: Path
) -> None:
    told: list[str] = []

    def on_started() -> None:
        told.append("asked")
        if len(told) < 3:
            raise OSError(errno.ENOSPC, "full")

    script = order(7, "run", script=script_of("sleep 0.1"), workdir=str(tmp_path), roots=(str(tmp_path),))
    assert asyncio.run(ScriptRun(home, script, OWN, on_started).run()) == ScriptEnded(JobState.COMPLETED)
    assert len(told) == 3


def test_an_operation_takes_a_spare_file_for_its_lock_and_gives_it_back(
    home: StateDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opening(path: object, flags: int, *rest: object, dir_fd: int | None = None) -> int:
        if dir_fd == home.operations and flags & os.O_CREAT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return opened(path, flags, *rest, dir_fd=dir_fd)  # type: ignore[arg-type]

    opened = os.open
    monkeypatch.setattr(os, "open", opening)
    assert asyncio.run(WorkerOperation(home, order(7, "teardown"), OWN).run()) == OperationDone()
    assert os.listdir(home.operations) == [] and len(home.reserve_files) == RESERVE_FILES


@pytest.fixture
def blocked() -> Iterator[None]:
    """A supervisor's signals, blocked as in a supervisor."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD, signal.SIGHUP, signal.SIGINT})
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


@pytest.mark.usefixtures("blocked")
def test_a_supervisor_writes_its_status_however_long_that_takes_and_whoever_wants_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("forebay.cluster.agent.scripts.supervisor.DISK_FULL_RETRY_S_MAX", 0.001)
    tries: list[str] = []

    def write() -> None:
        tries.append("try")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        if len(tries) < 4:
            raise OSError(errno.ENOSPC, "full")

    assert retry_write(write, unless_ended=False) and len(tries) == 4
    signal.sigtimedwait({signal.SIGTERM}, 0)

    def refuse() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
        raise OSError(errno.ENOSPC, "full")

    assert not retry_write(refuse, unless_ended=True)


# A disk that is really full


class SmallDisk:
    """A file system of a few megabytes for an agent's directory."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self._ballast = site.home / "ballast"

    def fill(self) -> None:
        """Leave no byte on it."""
        with self._ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            for size_bytes in (65536, 512, 1):
                with contextlib.suppress(OSError):
                    while True:
                        file.write(bytes(size_bytes))

    @property
    def full(self) -> bool:
        """Whether not even a small file can be made."""
        probe = self.site.home / "probe"
        try:
            probe.write_bytes(bytes(RESERVE_BYTES))
        except OSError:
            return True
        finally:
            probe.unlink(missing_ok=True)
        return False

    def free(self) -> None:
        """Make room again."""
        self._ballast.unlink()


@pytest.fixture
def small(site: Site) -> Iterator[SmallDisk]:
    """The site's agent on a small disk, where this machine lets one be mounted."""
    site.home.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m,nr_inodes=400,mode=700", "tmpfs", str(site.home)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small disk needs more rights")
    yield SmallDisk(site)
    site.clean_up()
    subprocess.run(["umount", "-l", str(site.home)], check=True)


FILLING = {
    "bytes": 'cat /dev/zero > "$DW_JOB_STRIPED/zeros" 2> /dev/null',
    "files": 'i=0; while : 2> /dev/null > "$DW_JOB_STRIPED/f$i"; do i=$((i + 1)); done 2> /dev/null',
}


@pytest.mark.parametrize("what", FILLING)
def test_a_job_that_fills_the_disk_is_reported_staged_out_and_torn_down_and_the_agent_lives(
    small: SmallDisk, what: str
) -> None:
    site, full = small.site, []

    async def story() -> None:
        async with site.running() as (controller, agent):
            controller.automatic = lambda _: full.append(small.full)
            await controller.order(site.order(7, 1, "stage_in"))
            await controller.result(7, 1)
            # It waits until its start is reported, so that its end alone meets the full disk.
            script = script_of(
                "until [ -e gate ]; do sleep 0.02; done", f"({FILLING[what]})", "echo full >> full; exit 5"
            )
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=10**12))
            await controller.result(7, 2, ScriptStarted)
            (site.destinations / "gate").touch()
            assert await controller.result(7, 2) == ScriptEnded(JobState.FAILED, 5, 0)
            assert full == [False, False, True]
            # Neither its own death nor what follows needs room.
            await site.kill_agent(agent)
            agent = site.start_agent()
            await controller.order(site.order(7, 3, "post_run"))
            assert await controller.result(7, 3) == OperationDone()
            await controller.order(site.order(7, 4, "teardown"))
            assert await controller.result(7, 4) == OperationDone()
            assert shown(site.destinations / "full") == "full\n"
            assert agent.poll() is None and os.listdir(site.home / "buffers") == []

    asyncio.run(story())


def test_a_supervisor_on_a_full_disk_without_reserved_room_waits_and_loses_nothing(small: SmallDisk) -> None:
    site = small.site

    async def story() -> None:
        async with site.serving() as controller:
            script = script_of(
                "echo begun > begun", "until [ -e gate ]; do sleep 0.02; done", "echo over > over; exit 5"
            )
            await controller.order(site.order(7, 2, "run", script=script))
            await controller.result(7, 2, ScriptStarted)
            record = site.home / "steps" / "7"
            # Nothing else gives or takes room from here on.
            while not (record / "reported").exists() or os.listdir(site.home / "outbox"):
                await asyncio.sleep(0.01)
            # As if an earlier release had made the record.
            (record / "status.json.room").unlink()
            small.fill()
            before_ns = record.stat().st_mtime_ns
            (site.destinations / "gate").touch()
            (supervisor,) = site.supervisors()
            children = Path(f"/proc/{supervisor}/task/{supervisor}/children")
            while children.read_text().strip():
                await asyncio.sleep(0.01)
            # A try makes a file and removes it.
            while record.stat().st_mtime_ns == before_ns:
                await asyncio.sleep(0.01)
            assert site.supervisors() == [supervisor] and not (record / "status.json").exists()
            small.free()
            assert await controller.result(7, 2) == ScriptEnded(JobState.FAILED, 5, 0)

    asyncio.run(story())


def test_an_agent_that_starts_for_the_first_time_on_a_full_disk_waits_for_room(small: SmallDisk) -> None:
    site = small.site
    small.fill()

    async def story() -> None:
        agent = site.start_agent()
        while "the agent's directory waits for space" not in shown(site.directory / "agent.log"):
            await asyncio.sleep(0.05)
        assert agent.poll() is None
        agent.terminate()
        assert await site.ended(agent) == 0
        async with site_running_after(small) as registered:
            assert registered

    asyncio.run(story())


@contextlib.asynccontextmanager
async def site_running_after(small: SmallDisk):  # type: ignore[no-untyped-def]
    """Start the agent on the full disk and make room."""
    small.free()
    async with small.site.serving() as controller:
        yield controller.registrations


def test_a_log_that_cannot_be_written_does_not_keep_the_agent_from_its_work(site: Site) -> None:
    async def story() -> None:
        (site.directory / "agent.log").symlink_to("/dev/full")
        try:
            async with site.running() as (controller, agent):
                await controller.order(site.order(7, 1, "stage_in"))
                assert isinstance(await controller.result(7, 1), OperationDone)
                agent.terminate()
                assert await site.ended(agent) == 0
        finally:
            # Reading it has no end.
            (site.directory / "agent.log").unlink()

    asyncio.run(story())


def test_staging_out_of_a_full_disk_needs_no_room_on_it(small: SmallDisk) -> None:
    site = small.site

    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 1, "stage_in"))
            await controller.result(7, 1)
            (site.home / "buffers" / "7" / "striped" / "r").write_text("42")
            small.fill()
            transfer = Transfer(TransferKind.FILE, str(site.destinations / "r"), "$DW_JOB_STRIPED/r")
            await controller.order(site.order(7, 2, "stage_out", transfers=(transfer,)))
            assert isinstance(await controller.result(7, 2), OperationDone)
            assert shown(site.destinations / "r") == "42"

    asyncio.run(story())
