"""Operations as real workers, scripts as real processes, with an agent's home and without an agent."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pwd
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster.agent.files.filesystems import mark
from forebay.cluster.agent.operation import AgentSettings, WorkerOperation
from forebay.cluster.agent.processes import ChildProcess
from forebay.cluster.agent.processes.environment import Mode
from forebay.cluster.agent.runtime.state_directory import StateDirectory
from forebay.cluster.agent.runtime.worker_watchdog import Handle
from forebay.cluster.agent.script_run import ScriptRun
from forebay.cluster.agent.scripts.record import RESUME, SUSPEND, ScriptRecord
from forebay.cluster.agent.service import Agent
from forebay.cluster.agent.worker.task import Outcome
from forebay.cluster.providers import Local
from forebay.cluster.schemas.agents import OperationReport, PollRequest, RegisterRequest, ReportsRequest
from forebay.cluster.schemas.jobs import PollAnswer, RegisterAnswer, ReportResult, ReportsAnswer
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import OperationDone, OperationFailed, ScriptEnded, ScriptStarted
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order, OrderFilesystem, SpecialTransfers
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent, JobOptions
from forebay.replica.model.transfers import TransferChoice, TransferRules
from tests.cluster.agent.double import script_of, shown

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")


class Node:
    """A home and a place for files, where other users may pass through."""

    def __init__(self, directory: Path, accounts: Mode) -> None:
        self.directory = directory
        self.accounts: Mode = accounts
        local = Local(allowed_programs=("/bin/sh",))
        self.settings = AgentSettings(node="n1", accounts=accounts, kill_wait_s=1.0, local=local)
        self.home = StateDirectory(directory / "n1", accounts)
        self.work = directory / "work"
        self.work.mkdir()
        self.started: list[int] = []

    def order(self, stage: str, **fields: object) -> Order:
        # As a controller has it: a script begins where its buffer was made.
        is_there = (self.home.path / "buffers" / str(fields.get("job", 7))).exists() or "filesystem" in fields
        standard = {
            "job": 7, "attempt": 1, "stage": stage, "user": "nobody", "name": "x", "workdir": str(self.work),
            "has_buffer": stage != "run" or is_there, "access": ("striped",), "roots": (str(self.work),),
            "timeout_s": 30, "capacity_bytes": 1 << 30,
        }  # fmt: skip
        return msgspec.convert(standard | {k: msgspec.to_builtins(v) for k, v in fields.items()}, type=Order)

    def spawned(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Return a list of the modules that are run as processes from now on."""
        found: list[str] = []
        spawn = self.home.fork_server.spawn

        def noting(module: str, *arguments: Any, **options: Any) -> ChildProcess:
            found.append(module)
            return spawn(module, *arguments, **options)

        monkeypatch.setattr(self.home.fork_server, "spawn", noting)
        return found

    def operate(self, stage: str, **fields: object) -> Outcome | None:
        async def story() -> Outcome | None:
            return await WorkerOperation(self.home, self.order(stage, **fields), self.settings).run()

        return asyncio.run(story())

    def step(self, script: str, **fields: object) -> ScriptRun:
        order = self.order("run", script=script, time_limit_s=30, **fields)
        return ScriptRun(
            self.home,
            order,
            self.settings,
            lambda: self.started.append(order.job),
        )

    def run(self, script: str, **fields: object) -> ScriptEnded:
        async def story() -> ScriptEnded:
            return await self.step(script, **fields).run()

        return asyncio.run(story())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path, "own")
    yield made
    made.home.close()


@pytest.fixture
def shared() -> Iterator[Node]:
    # Not below pytest's own directory, which is closed to other users.
    directory = Path(tempfile.mkdtemp(prefix="forebay-test-"))
    directory.chmod(0o711)
    made = Node(directory, "switch")
    shutil.chown(made.work, "nobody", pwd.getpwnam("nobody").pw_gid)
    try:
        yield made
    finally:
        made.home.close()
        shutil.rmtree(directory)


REFUSED = {
    "no #! line": ("echo x\n", {}, 126, "has no #! line"),
    "no interpreter": ("#!/no/such/interpreter\n", {}, 127, "the interpreter in the script"),
    "workdir missing": ("#!/bin/sh\n", {"workdir": "{work}/gone"}, 126, "gone cannot be entered on this node: No such"),
    "workdir the agent's": ("#!/bin/sh\n", {"workdir": "{work}/../n1/steps"}, 126, "contains '..'"),
    "workdir in the agent's": ("#!/bin/sh\n", {"workdir": "{home}/steps"}, 126, "is the agent's own directory"),
    "workdir a link to the agent's": ("#!/bin/sh\n", {"workdir": "{work}/home/steps"}, 126, "is the agent's own"),
    "output in the agent's": ("#!/bin/sh\n", {"output": "{home}/out"}, 126, "is the agent's own directory"),
    "output nowhere": ("#!/bin/sh\n", {"output": "{work}/gone/out"}, 126, "gone cannot be entered"),
    "output a directory": ("#!/bin/sh\n", {"output": "{work}/"}, 126, "names a directory"),
    "error in the agent's": ("#!/bin/sh\n", {"error": "{home}/out"}, 126, "is the agent's own directory"),
    "error a pipe": ("#!/bin/sh\n", {"error": "{work}/pipe"}, 126, "the output file"),
    "output upwards": ("#!/bin/sh\n", {"output": "../out"}, 126, "contains '..'"),
    "output a pipe": ("#!/bin/sh\n", {"output": "pipe"}, 126, "the output file"),
    "output a link": ("#!/bin/sh\n", {"output": "link"}, 126, "the output file"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_script_that_cannot_be_started_has_failed_with_the_code_of_a_shell_and_a_sentence(
    node: Node, case: str
) -> None:
    script, fields, exit_code, sentence = REFUSED[case]
    os.mkfifo(node.work / "pipe")
    (node.work / "link").symlink_to(node.directory / "elsewhere")
    (node.work / "home").symlink_to(node.directory / "n1")
    places = {"work": node.work, "home": node.directory / "n1"}
    ended = node.run(script, **{name: value.format_map(places) for name, value in fields.items()})
    assert (ended.result, ended.exit_code, ended.signal) == (JobState.FAILED, exit_code, 0)
    assert sentence in ended.message
    assert not (node.directory / "elsewhere").exists()


def test_a_script_runs_wherever_its_user_may_be_links_followed(
    node: Node, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (node.work / "there").symlink_to(elsewhere)
    assert node.run(script_of("pwd -P"), workdir=f"{node.work}/there") == ScriptEnded(JobState.COMPLETED)
    assert shown(elsewhere / "forebay-7.out") == f"{elsewhere}\n"


def test_standard_error_has_a_file_of_its_own_where_one_is_named(node: Node) -> None:
    script = script_of("echo out; echo err >&2")
    assert node.run(script, error=f"{node.work}/err") == ScriptEnded(JobState.COMPLETED)
    assert (shown(node.work / "forebay-7.out"), shown(node.work / "err")) == ("out\n", "err\n")


def test_output_and_error_of_one_name_are_one_file(node: Node) -> None:
    script = script_of("echo out; echo err >&2; echo more")
    both = f"{node.work}/both"
    assert node.run(script, output=both, error=both) == ScriptEnded(JobState.COMPLETED)
    assert shown(node.work / "both") == "out\nerr\nmore\n"


@pytest.mark.parametrize(("mode", "kept"), [("append", "before\n"), ("truncate", ""), ("", "")])
def test_what_an_output_file_holds_is_kept_where_it_is_to_be_added_to(node: Node, mode: str, kept: str) -> None:
    (node.work / "out").write_text("before\n")
    options = JobOptions(open_mode=mode)
    assert node.run(script_of("echo now"), output="out", options=options) == ScriptEnded(JobState.COMPLETED)
    assert shown(node.work / "out") == kept + "now\n"


def test_a_script_has_its_arguments_as_they_were_given(node: Node) -> None:
    given = ("a b", "", "--x", "*", "ü")
    options = JobOptions(arguments=given)
    assert node.run(script_of('printf "%s\\n" "$#" "$@"'), options=options) == ScriptEnded(JobState.COMPLETED)
    assert shown(node.work / "forebay-7.out").split("\n")[:-1] == ["5", *given]


def test_a_script_whose_output_is_dev_null_runs_and_leaves_none(node: Node) -> None:
    assert node.run(script_of("echo nobody reads this"), output="/dev/null") == ScriptEnded(JobState.COMPLETED)
    assert os.listdir(node.work) == []


@pytest.mark.parametrize(
    ("line", "result", "exit_code", "number"),
    [
        ("exit 0", JobState.COMPLETED, 0, 0),
        ("exit 5", JobState.FAILED, 5, 0),
        ("kill -SEGV $$", JobState.FAILED, 0, signal.SIGSEGV),
    ],
)
def test_how_a_script_ended_is_reported_as_it_was(
    node: Node, line: str, result: JobState, exit_code: int, number: int
) -> None:
    assert node.run(script_of(line)) == ScriptEnded(result, exit_code, number)
    assert node.started == [7]


def test_a_record_that_exists_is_never_run_again(node: Node) -> None:
    script = script_of("echo ran >> ran")
    for _ in range(3):
        assert node.run(script) == ScriptEnded(JobState.COMPLETED)
    assert shown(node.work / "ran") == "ran\n"


def test_a_newer_attempt_is_a_new_run_and_replaces_the_record_of_the_older_one(node: Node) -> None:
    script = script_of('echo "$FOREBAY_ATTEMPT" >> ran')
    for attempt in (1, 1, 2, 2, 3):
        assert node.run(script, attempt=attempt) == ScriptEnded(JobState.COMPLETED)
    assert shown(node.work / "ran") == "1\n2\n3\n"


def test_a_supervisor_that_died_before_the_script_could_run_is_launched_again(node: Node) -> None:
    step = node.step(script_of("echo ran >> ran"))
    step._create()
    assert asyncio.run(step.run()) == ScriptEnded(JobState.COMPLETED)
    assert shown(node.work / "ran") == "ran\n"


def test_a_supervisor_that_cannot_come_up_is_given_up_after_three_launches(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    ended = node.run(script_of("echo ran >> ran"))
    assert ended.result is JobState.NODE_FAIL and "died 3 times" in ended.message
    monkeypatch.undo()
    assert node.run(script_of("echo ran >> ran")) == ended
    assert not (node.work / "ran").exists()


def test_a_script_that_may_have_run_under_a_lost_supervisor_is_node_fail_for_ever(node: Node) -> None:
    step = node.step(script_of("echo ran >> ran"))
    step._create()
    record = ScriptRecord(node.home.steps, 7)
    (node.directory / "n1" / "steps" / "7" / "started.json").write_text(
        '{"pid": 999999999, "started": 1, "boot": "another"}'
    )
    record.close()
    for _ in range(2):
        assert asyncio.run(step.run()).result is JobState.NODE_FAIL
    assert not (node.work / "ran").exists()


def marked(node: Node, job: int, storage_id: str) -> subprocess.Popen[bytes]:
    """Start a process that carries the marker of a job."""
    return subprocess.Popen(
        ["sleep", "600"],
        env={"PATH": os.environ["PATH"], "FOREBAY_STEP": f"{storage_id}.{job}", "FOREBAY_JOB_ID": str(job)},
        start_new_session=True,
    )


@pytest.mark.parametrize("stage", ["post_run", "teardown"])
def test_post_run_and_teardown_leave_no_process_of_the_job_and_touch_no_other(node: Node, stage: str) -> None:
    mine = marked(node, 7, node.home.storage_id)
    others = [marked(node, 8, node.home.storage_id), marked(node, 7, "f" * 32)]
    try:
        assert isinstance(node.operate(stage), OperationDone)
        assert mine.wait(10) == -signal.SIGKILL
        assert [other.poll() for other in others] == [None, None]
    finally:
        for process in (mine, *others):
            process.kill()
            process.wait()


def test_teardown_may_be_done_any_number_of_times(node: Node) -> None:
    assert isinstance(node.operate("stage_in"), OperationDone)
    assert os.listdir(node.directory / "n1" / "buffers") == ["7"]
    for _ in range(2):
        assert node.operate("teardown") == OperationDone()
        assert os.listdir(node.directory / "n1" / "buffers") == []


def test_an_operation_waits_until_the_worker_of_an_earlier_agent_is_gone(node: Node) -> None:
    async def story() -> None:
        with (node.directory / "n1" / "operations" / "7").open("w") as former:
            fcntl.flock(former, fcntl.LOCK_EX)
            waiting = WorkerOperation(node.home, node.order("stage_in"), AgentSettings(node="n1", accounts="own"))
            given_up = WorkerOperation(node.home, node.order("stage_in"), AgentSettings(node="n1", accounts="own"))
            tasks = [asyncio.create_task(operation.run()) for operation in (waiting, given_up)]
            given_up.end()
            assert await tasks[1] is None
            # Longer than a worker needs: it would have made the buffer by now.
            done, _ = await asyncio.wait({tasks[0]}, timeout=1)
            assert not done and not (node.directory / "n1" / "buffers" / "7").exists()
        assert isinstance(await tasks[0], OperationDone)

    asyncio.run(story())


def test_stage_out_without_a_buffer_says_so(node: Node) -> None:
    assert node.operate("stage_out") == OperationFailed(
        "the buffer of job 7 is not on this node; nothing can be staged out"
    )


def test_a_worker_that_is_killed_is_a_failure_that_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    killer = node.directory / "killer"
    killer.write_text("#!/bin/sh\nkill -KILL $$\n")
    killer.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(killer))
    failed = node.operate("stage_in")
    assert isinstance(failed, OperationFailed) and "was killed by signal 9" in failed.message


class Scripted:
    """A controller that answers polls with what a test puts into a queue."""

    def __init__(self) -> None:
        self.answers: asyncio.Queue[PollAnswer] = asyncio.Queue()
        self.reports: asyncio.Queue[OperationReport] = asyncio.Queue()

    async def register(self, node: str, request: RegisterRequest) -> RegisterAnswer:
        return RegisterAnswer(revision=4)

    async def poll(self, node: str, request: PollRequest) -> PollAnswer:
        return await self.answers.get()

    async def report(self, node: str, request: ReportsRequest) -> ReportsAnswer:
        for report in request.reports:
            self.reports.put_nowait(report)
        results = tuple(ReportResult(command_id=report.command_id, outcome="accepted") for report in request.reports)
        return ReportsAnswer(revision=5, results=results)


def test_orders_of_an_older_revision_end_nothing(node: Node) -> None:
    order = node.order("run", script=script_of("until [ -e gate ]; do sleep 0.02; done"), time_limit_s=30)

    async def story() -> None:
        controller, stop = Scripted(), asyncio.Event()
        agent = Agent(node.home, AgentSettings(node="n1", accounts="own"), 2, controller, SystemClock())
        running = asyncio.create_task(agent.run(stop))
        try:
            async with asyncio.timeout(20):
                controller.answers.put_nowait(PollAnswer(revision=5, orders=(order,)))
                assert isinstance((await controller.reports.get()).result, ScriptStarted)
                for _ in range(3):
                    # A leader that was deposed before the order was given.
                    controller.answers.put_nowait(PollAnswer(revision=3, orders=()))
                while not controller.answers.empty():
                    await asyncio.sleep(0.01)
                (node.work / "gate").touch()
                assert (await controller.reports.get()).result == ScriptEnded(JobState.COMPLETED)
        finally:
            stop.set()
            await running

    asyncio.run(story())


@needs_root
def test_a_job_without_capacity_has_no_directory_that_its_user_may_write_to(shared: Node) -> None:
    lake = shared.directory / "n1" / "persistent" / "lake"
    lake.mkdir()
    lake.chmod(0o770)
    shutil.chown(lake, "nobody", "nogroup")
    (shared.work / "in").write_text("in")
    shutil.chown(shared.work / "in", "nobody")
    no_space: dict[str, object] = {"capacity_bytes": 0, "uses": ("lake",)}
    inwards = Transfer(TransferKind.FILE, str(shared.work / "in"), "$DW_PERSISTENT_STRIPED_lake/in")
    assert isinstance(shared.operate("stage_in", transfers=(inwards,), **no_space), OperationDone)
    assert (lake / "in").read_text() == "in"
    buffer = shared.directory / "n1" / "buffers" / "7"
    assert not os.listdir(buffer) and (buffer.stat().st_uid, stat.S_IMODE(buffer.stat().st_mode)) == (0, 0o700)
    writes = f"echo x > {buffer}/x || echo rejected; chmod 777 {buffer}"
    ended = shared.run(
        script_of(writes, 'echo "$DW_JOB_STRIPED$FOREBAY_JOB_DIR."; cat "$DW_PERSISTENT_STRIPED_lake/in"'), **no_space
    )
    output = shown(shared.work / "forebay-7.out")
    assert ended.result is JobState.COMPLETED and ".\nin" in output
    assert "rejected" in output and not os.listdir(buffer) and buffer.stat().st_uid == 0, output
    outwards = Transfer(TransferKind.FILE, str(shared.work / "out"), "$DW_PERSISTENT_STRIPED_lake/in")
    assert isinstance(shared.operate("stage_out", transfers=(outwards,), **no_space), OperationDone)
    assert (shared.work / "out").read_text() == "in"
    assert isinstance(shared.operate("post_run", **no_space), OperationDone)
    assert isinstance(shared.operate("teardown", **no_space), OperationDone)
    assert not buffer.exists() and (lake / "in").exists()


@needs_root
def test_with_switched_accounts_everything_of_a_job_is_done_as_its_user(shared: Node) -> None:
    nobody = pwd.getpwnam("nobody").pw_uid
    (shared.work / "in").write_text("in")
    secret = shared.work / "secret"
    secret.write_text("root only")
    secret.chmod(0o600)
    inwards = Transfer(TransferKind.FILE, str(shared.work / "in"), "$DW_JOB_STRIPED/in")
    assert isinstance(shared.operate("stage_in", transfers=(inwards,)), OperationDone)
    buffer = shared.directory / "n1" / "buffers" / "7"
    assert (buffer.stat().st_uid, stat.S_IMODE(buffer.stat().st_mode)) == (nobody, 0o700)
    assert (buffer / "striped" / "in").stat().st_uid == nobody
    script = script_of(
        'id -un; id -ru; cat "$DW_JOB_STRIPED/in"; cat secret; echo out > "$DW_JOB_STRIPED/out"',
        "cat ../n1/steps/7/order.json; ls ../n1",
    )
    assert shared.run(script, capacity_bytes=1 << 20).result is JobState.FAILED
    output = shown(shared.work / "forebay-7.out")
    assert output.startswith(f"nobody\n{nobody}\nin") and "root only" not in output and "alice" not in output
    assert output.count("ermission denied") == 3, output
    assert (shared.work / "forebay-7.out").stat().st_uid == nobody
    outwards = Transfer(TransferKind.FILE, str(shared.work / "out"), "$DW_JOB_STRIPED/out")
    assert isinstance(shared.operate("stage_out", transfers=(outwards,)), OperationDone)
    assert (shared.work / "out").stat().st_uid == nobody
    assert isinstance(shared.operate("teardown"), OperationDone)
    assert not buffer.exists()


@needs_root
def test_with_switched_accounts_a_user_cannot_stage_what_he_may_not_read(shared: Node) -> None:
    secret = shared.work / "secret"
    secret.write_text("root only")
    secret.chmod(0o600)
    transfer = Transfer(TransferKind.FILE, str(secret), "$DW_JOB_STRIPED/x")
    failed = shared.operate("stage_in", transfers=(transfer,))
    assert isinstance(failed, OperationFailed) and "Permission denied" in failed.message


@needs_root
@pytest.mark.parametrize("stage", ["stage_in", "stage_out", "post_run", "run"])
@pytest.mark.parametrize("user", ["nobody-at-all", "root"])
def test_with_switched_accounts_an_unknown_user_and_root_fail_by_name(shared: Node, stage: str, user: str) -> None:
    (shared.directory / "n1" / "buffers" / "7").mkdir()
    result = shared.run("#!/bin/sh\n", user=user) if stage == "run" else shared.operate(stage, user=user)
    assert isinstance(result, OperationFailed | ScriptEnded) and f"the user {user!r}" in result.message


@needs_root
def test_with_switched_accounts_commands_and_programs_run_as_the_jobs_user(shared: Node) -> None:
    secret = shared.work / "secret"
    secret.write_text("root only")
    secret.chmod(0o600)
    (shared.work / "in").write_text("in")
    reading = SpecialTransfers(commands=(f"cat {secret}",))
    failed = shared.operate("stage_in", special=reading)
    assert isinstance(failed, OperationFailed) and "Permission denied" in failed.message
    writing = SpecialTransfers(commands=('id -un >"$DW_JOB_STRIPED/who"',))
    inwards = Transfer(TransferKind.FILE, str(shared.work / "in"), "$DW_JOB_STRIPED/in")
    rules = TransferRules(
        backends=("template", "command"), template="/bin/sh -c 'id -un >>who; cp $0 $1' {source} {destination}"
    )
    done = shared.operate(
        "stage_in", attempt=3, special=writing, rules=rules, transfers=(inwards,), capacity_bytes=1 << 20
    )
    assert isinstance(done, OperationDone) and done.receipt is not None
    assert done.receipt.backends == ("template", "command")
    striped = shared.directory / "n1" / "buffers" / "7" / "striped"
    assert (striped / "who").read_text() == "nobody\n" == (shared.work / "who").read_text()
    assert (striped / "in").stat().st_uid == pwd.getpwnam("nobody").pw_uid


@needs_root
def test_with_switched_accounts_a_persistent_buffer_of_others_takes_no_transfer(shared: Node) -> None:
    lake = shared.directory / "n1" / "persistent" / "lake"
    lake.mkdir(mode=0o770)
    (shared.work / "in").write_text("in")
    inwards = Transfer(TransferKind.FILE, str(shared.work / "in"), "$DW_PERSISTENT_STRIPED_lake/in")
    failed = shared.operate("stage_in", transfers=(inwards,), uses=("lake",))
    assert isinstance(failed, OperationFailed) and "this user may not use" in failed.message and failed.final
    # Nothing is staged, and the script would fail: the job is told before it starts.
    for mode in (0o770, 0o774):
        lake.chmod(mode)
        failed = shared.operate("stage_in", uses=("lake",))
        assert isinstance(failed, OperationFailed) and "this user may not use" in failed.message and failed.final
    shutil.chown(lake, "nobody")
    done = shared.operate("stage_in", attempt=2, transfers=(inwards,), uses=("lake",))
    assert isinstance(done, OperationDone) and (lake / "in").read_text() == "in"


@needs_root
def test_with_switched_accounts_a_persistent_buffer_in_a_place_is_its_user_s_from_first_to_last(shared: Node) -> None:
    top = shared.directory / "bb"
    top.mkdir()
    top.chmod(0o711)
    identity = mark(str(top))
    own, lake = (OrderFilesystem("bb", str(top), identity, f"test/{name}") for name in ("7.1", "lake.7.1"))
    directory, nobody = top / lake.directory, pwd.getpwnam("nobody").pw_uid
    (top / "test").mkdir(mode=0o700)  # as a mover left it that was killed just then
    create = {"creates": (CreatePersistent("lake", 10**9),), "persistent": (("lake", lake),), "filesystem": own}
    for attempt in (1, 2):  # the second as another mover that takes over
        assert isinstance(shared.operate("stage_in", attempt=attempt, **create), OperationDone)
        status = directory.stat()
        assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (nobody, 0o770)
    assert stat.S_IMODE((top / "test").stat().st_mode) == 0o711

    (shared.work / "in").write_text("in")
    inwards = Transfer(TransferKind.FILE, str(shared.work / "in"), "$DW_PERSISTENT_STRIPED_lake/in")
    use = {"uses": ("lake",), "persistent": (("lake", lake),)}
    for job, user in ((8, "nobody"), (9, "daemon")):
        filesystem = msgspec.structs.replace(own, directory=f"test/{job}.1")
        done = shared.operate("stage_in", job=job, user=user, filesystem=filesystem, transfers=(inwards,), **use)
        if user == "daemon":
            assert isinstance(done, OperationFailed) and "this user may not use" in done.message
            continue
        assert isinstance(done, OperationDone) and (directory / "in").stat().st_uid == nobody
        script = script_of('id -un; echo more > "$DW_PERSISTENT_STRIPED_lake/more"')
        assert shared.run(script, job=job, attempt=2, filesystem=filesystem, **use) == ScriptEnded(JobState.COMPLETED)
        outwards = Transfer(TransferKind.FILE, str(shared.work / "more"), "$DW_PERSISTENT_STRIPED_lake/more")
        moves = SpecialTransfers(choices=(TransferChoice(move=True),))
        more = {"transfers": (outwards,), "special": moves, "rules": TransferRules(), **use}
        assert isinstance(shared.operate("stage_out", job=job, attempt=3, filesystem=filesystem, **more), OperationDone)
        assert shown(shared.work / "more") == "more\n" and os.listdir(directory) == ["in"]

    theirs = foreign(directory)
    gone = {"job": 10, "destroys": (DestroyPersistent("lake"),), "persistent": (("lake", lake),)}
    gone["filesystem"] = msgspec.structs.replace(own, directory="test/10.1")
    failed = shared.operate("stage_in", **gone)
    assert isinstance(failed, OperationFailed) and failed.final and failed.operation == "destroy_persistent"
    assert "because user nobody may not remove" in failed.message and not (directory / "in").exists()
    (kept,) = directory.rglob("thesis")
    shutil.rmtree(kept.parent)
    assert not theirs.exists()
    assert isinstance(shared.operate("stage_in", attempt=2, **gone), OperationDone)
    assert not directory.exists()


def foreign(directory: Path) -> Path:
    """Make a private directory of another user's in one of nobody's, as a parent that was moved in brings it."""
    moved = directory / "moved"
    (moved / "private").mkdir(parents=True)
    (moved / "private" / "thesis").write_text("the only copy")
    (moved / "private").chmod(0o700)
    shutil.chown(moved, "nobody")
    return moved / "private"


@needs_root
def test_a_teardown_as_root_removes_what_the_jobs_user_could_and_names_what_it_keeps(shared: Node) -> None:
    assert isinstance(shared.operate("stage_in"), OperationDone)
    striped = shared.directory / "n1" / "buffers" / "7" / "striped"
    theirs = foreign(striped)
    (striped / "mine").write_text("x")
    shutil.chown(striped / "mine", "nobody")
    failed = shared.operate("teardown", attempt=2)
    assert isinstance(failed, OperationFailed) and failed.final
    assert "is kept in" in failed.message
    assert "private (of user 0)" in failed.message and "an operator must remove it" in failed.message
    (kept,) = (shared.directory / "n1" / "buffers" / "7").rglob("thesis")
    assert kept.read_text() == "the only copy" and not (striped / "mine").exists()
    shutil.rmtree(kept.parent)
    assert not theirs.exists()
    assert isinstance(shared.operate("teardown", attempt=3), OperationDone)
    assert os.listdir(shared.directory / "n1" / "buffers") == []


@needs_root
def test_a_persistent_buffer_goes_with_its_users_rights_unless_an_operator_destroys_it(shared: Node) -> None:
    creates, destroys = (CreatePersistent("lake", 1024),), (DestroyPersistent("lake"),)
    assert isinstance(shared.operate("stage_in", creates=creates), OperationDone)
    lake = shared.directory / "n1" / "persistent" / "lake"
    theirs = foreign(lake)
    failed = shared.operate("stage_in", attempt=2, destroys=destroys)
    assert isinstance(failed, OperationFailed) and failed.operation == "destroy_persistent"
    assert "private (of user 0)" in failed.message and theirs.exists()
    by_operator = JobOptions(by_operator=True)
    assert isinstance(shared.operate("stage_in", attempt=3, destroys=destroys, options=by_operator), OperationDone)
    assert not lake.exists()


@needs_root
def test_what_a_forgotten_persistent_buffer_keeps_is_nobodys_to_read(shared: Node) -> None:
    creates = (CreatePersistent("lake", 1024),)
    assert isinstance(shared.operate("stage_in", creates=creates), OperationDone)
    persistent = shared.directory / "n1" / "persistent"
    foreign(persistent / "lake")
    assert isinstance(shared.operate("stage_in", job=8, creates=creates), OperationDone)
    assert os.listdir(persistent / "lake") == []
    (kept,) = (path for path in persistent.iterdir() if path.name.startswith(".cleared-"))
    assert (kept.stat().st_uid, stat.S_IMODE(kept.stat().st_mode)) == (0, 0o700)
    assert isinstance(shared.operate("stage_in", job=9, creates=creates), OperationDone)
    assert [thesis.read_text() for thesis in kept.rglob("thesis")] == ["the only copy"]


def test_a_stage_out_that_names_nothing_needs_no_process(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(node.operate("stage_in"), OperationDone)
    begun = node.spawned(monkeypatch)
    assert node.operate("stage_out") == OperationDone()
    assert begun == []
    # What is not as it should be is looked at, and said, by a worker.
    shutil.rmtree(node.directory / "n1" / "buffers" / "7")
    failed = node.operate("stage_out")
    assert isinstance(failed, OperationFailed) and "is not on this node" in failed.message
    assert begun == ["forebay.cluster.agent.worker.worker"]


class _Supervisor:
    """A supervisor that does nothing but be told."""

    def __init__(self) -> None:
        self.has_ended, self.told = False, list[int]()
        self.is_slow = False
        """Whether it has not taken the signals that it was sent last."""

    def send(self, number: int) -> None:
        self.told.append(number)

    def awaits(self, *numbers: int) -> bool:
        return self.is_slow

    async def wait(self) -> None:
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class _Beginning:
    """The record of a script that is seen to have begun at the look at which it is asked for so many times."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def started_process(self) -> int | None:
        self._looks -= 1
        return None if self._looks >= 0 else 1

    def reported_attempt(self) -> int:
        return 0

    def note_reported(self, attempt: int) -> None:
        pass


async def _told(step: ScriptRun, looks: int, supervisor: _Supervisor, count: int) -> list[int]:
    """Return what a supervisor is told until it is told so much, while its script begins."""
    watching = asyncio.create_task(step._watch(_Beginning(looks)))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        while len(supervisor.told) < count:
            await asyncio.sleep(0.01)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    return supervisor.told


@pytest.mark.parametrize("looks", range(5))
def test_what_a_supervisor_is_to_be_told_never_waits_for_its_end_whenever_the_script_begins(
    node: Node, looks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = _Supervisor()
    monkeypatch.setattr(ScriptRun, "_hold", lambda *_: supervisor)
    step = node.step("#!/bin/sh\n", started=True)
    step.suspend(False)  # it may have been suspended by the agent before
    assert asyncio.run(_told(step, looks, supervisor, 1)) == [RESUME]


def test_a_supervisor_is_not_told_to_go_on_while_it_has_yet_to_hear_that_it_is_to_stand_still(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of two signals that wait, it would take the second first: the script would stand still for ever.
    supervisor = _Supervisor()
    monkeypatch.setattr(ScriptRun, "_hold", lambda *_: supervisor)
    step = node.step("#!/bin/sh\n", started=True)

    async def story() -> None:
        step.suspend(True)
        watching = asyncio.create_task(step._watch(_Beginning(0)))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            while supervisor.told != [SUSPEND]:
                await asyncio.sleep(0.01)
            supervisor.is_slow = True
            step.suspend(False)
            await asyncio.sleep(0.2)
            assert supervisor.told == [SUSPEND]
            supervisor.is_slow = False
            while supervisor.told != [SUSPEND, RESUME]:
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    asyncio.run(story())


def test_signals_that_a_process_has_yet_to_take_are_seen() -> None:
    async def story() -> None:
        program = "import signal,sys;signal.pthread_sigmask(0,{1,2});print(flush=True);sys.stdin.read(1);"
        program += "signal.sigwait({2});print(flush=True);sys.stdin.read()"
        command = (sys.executable, "-c", program)
        process = await asyncio.create_subprocess_exec(*command, stdin=-1, stdout=-1)
        assert process.stdin is not None and process.stdout is not None
        await process.stdout.readline()
        handle = Handle(process.pid)
        assert not handle.awaits(SUSPEND, RESUME)
        handle.send(SUSPEND)
        assert handle.awaits(SUSPEND, RESUME) and handle.awaits(SUSPEND) and not handle.awaits(RESUME)
        process.stdin.write(b".")
        await process.stdout.readline()
        assert not handle.awaits(SUSPEND, RESUME)
        process.stdin.close()
        await process.wait()
        assert not handle.awaits(SUSPEND)
        handle.close()

    asyncio.run(story())


def test_a_script_does_not_start_where_its_buffer_is_gone_and_the_job_is_told_what_to_type(node: Node) -> None:
    async def story() -> ScriptEnded | OperationFailed:
        return await node.step(f"#!/bin/sh\ntouch {node.work}/ran\n", has_buffer=True).run()

    result = asyncio.run(story())
    assert isinstance(result, OperationFailed) and not result.final
    assert result.message.startswith("the buffer of job 7 is not on this node: No such file or directory")
    assert "forebay buffer clear 7 --discard, then forebay job requeue 7" in result.message
    assert not (node.work / "ran").exists()


DYING_CHILD = """
import os, sys
from forebay.cluster.agent.scripts import supervisor

write = supervisor.ScriptRecord.write

def wait_for_child_and_write(record, name, what):
    if name == "started.json":
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
    write(record, name, what)

supervisor.ScriptRecord.write = wait_for_child_and_write
supervisor._child = lambda *_: os._exit(3)
sys.exit(supervisor.main(sys.argv[1:]))
"""
"""A supervisor whose child dies before it is released: started.json is written after its death."""


def test_a_script_whose_process_dies_before_its_release_fails_with_that_reason(node: Node) -> None:
    node.step("#!/bin/sh\ntrue\n")._create()
    record = ScriptRecord(node.home.steps, 7)
    lock = record.try_lock()
    assert lock is not None
    try:
        steps = os.path.join(node.home.path, "steps", "7")
        done = subprocess.run([sys.executable, "-c", DYING_CHILD, steps, str(lock)], pass_fds=(lock,), check=False)
        status = record.status()
    finally:
        os.close(lock)
        record.close()
    # Without the fix the supervisor dies of the broken pipe, and the job becomes NODE_FAIL.
    assert done.returncode == 0
    assert status is not None and status.result is JobState.FAILED
    assert "died before it could start the script" in status.message
