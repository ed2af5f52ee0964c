"""The agent's parts on their own: orders against activities, outbox, home, removal, accounts, environment."""

from __future__ import annotations

import asyncio
import itertools
import os
import pwd
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.agent.activities import _is_found_again
from forebay.cluster.agent.files.durable import FileRefused, ReserveFiles, read_bounded, write_durably
from forebay.cluster.agent.files.removal import RemovalFailed, remove_tree
from forebay.cluster.agent.limits import FILE_BYTES_MAX
from forebay.cluster.agent.messages import failure
from forebay.cluster.agent.processes.cgroups import CgroupName
from forebay.cluster.agent.processes.environment import (
    AccountRefused,
    UnixAccount,
    account_for,
    environment_of,
    output_path,
)
from forebay.cluster.agent.reconcile import (
    CancelScript,
    EndActivity,
    ForgetActivity,
    KnownActivity,
    StartActivity,
    plan,
)
from forebay.cluster.agent.runtime import state_directory as outbox_module
from forebay.cluster.agent.runtime.state_directory import AgentFailed, ReportOutbox, StateDirectory
from forebay.cluster.agent.scripts.record import ScriptOrder, create_record
from forebay.cluster.agent.transfer.progress import Rate
from forebay.cluster.schemas.command_ids import instant_of
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.descriptors import open_directory
from forebay.replica.messages.commands import OperationDone, OperationFailed, ScriptEnded, ScriptStarted
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.provider import Provision
from forebay.replica.model.requests import ArrayTask, JobOptions
from forebay.replica.values.limits import MESSAGE_CHARACTERS_MAX
from tests.clocks import ManualClock


def order(job: int = 1, attempt: int = 1, stage: str = "stage_in", **fields: object) -> Order:
    return msgspec.convert(
        {"job": job, "attempt": attempt, "stage": stage, "user": "alice", "name": "x", "workdir": "/w", **fields},
        type=Order,
    )


def test_every_pair_of_activity_and_order_has_exactly_one_answer() -> None:
    orders = [
        None,
        *(order(attempt=a, stage=s, cancel=c) for a in (1, 2, 3) for s in ("run", "teardown") for c in (False, True)),
    ]
    activities = [
        None,
        *(KnownActivity(2, stage, finished) for stage in ("run", "teardown") for finished in (False, True)),
    ]
    for wanted, known in itertools.product(orders, activities):
        steps = plan([] if wanted is None else [wanted], {} if known is None else {1: known})
        if known is None:
            assert steps == ([] if wanted is None else [StartActivity(wanted)])
        elif wanted is not None and (wanted.attempt, wanted.stage) == (known.attempt, known.stage):
            ends = wanted.cancel and wanted.stage == "run" and not known.finished
            assert steps == ([CancelScript(1)] if ends else [])
        elif wanted is not None and wanted.attempt < known.attempt:
            assert steps == []
        elif known.finished:
            assert steps == [ForgetActivity(1), *([] if wanted is None else [StartActivity(wanted)])]
        else:
            # What is not wanted any more ends first; what is wanted starts when that is gone.
            assert steps == [EndActivity(1)]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3)), max_size=6),
    st.dictionaries(st.integers(1, 5), st.integers(1, 3)),
)
def test_no_job_is_started_while_it_has_an_activity(pairs: list[tuple[int, int]], going: dict[int, int]) -> None:
    steps = plan(
        [order(job, attempt) for job, attempt in pairs],
        {job: KnownActivity(attempt, "stage_in", False) for job, attempt in going.items()},
    )
    started = [step.order.job for step in steps if isinstance(step, StartActivity)]
    assert not set(started) & set(going) and len(started) == len(set(started))


def outbox_in(directory: Path, clock: ManualClock) -> ReportOutbox:
    reserve_files = directory.parent / "spare"
    reserve_files.mkdir(exist_ok=True)
    return ReportOutbox(open_directory(directory), clock, ReserveFiles(open_directory(reserve_files)))


def test_reports_outlive_the_agent_in_their_order_until_they_are_acknowledged(tmp_path: Path) -> None:
    clock = ManualClock(SystemClock().now())

    async def story() -> None:
        outbox = outbox_in(tmp_path, clock)
        assert not outbox.changed.is_set()
        outbox.add(7, 1, "run", ScriptStarted())
        outbox.add(8, 3, "stage_in", OperationDone(1, 2, "ff"))
        outbox.add(9, 1, "teardown", OperationFailed("no"))
        again = outbox_in(tmp_path, clock)
        assert again.changed.is_set() and again.reports() == outbox.reports() == outbox.batch()
        known = again.acknowledge(again.batch()[1].command_id)
        assert known is not None and (known.job, known.attempt, known.result) == (8, 3, OperationDone(1, 2, "ff"))
        assert again.acknowledge("0" * 32) is None
        again.add(10, 1, "post_run", OperationDone())
        assert [report.job for report in outbox_in(tmp_path, clock).reports()] == [7, 9, 10]

    asyncio.run(story())


def test_an_id_is_kept_for_200_seconds_and_then_replaced(tmp_path: Path) -> None:
    clock = ManualClock(SystemClock().now())

    async def story() -> None:
        outbox = outbox_in(tmp_path, clock)
        outbox.add(7, 1, "post_run", OperationDone())
        first = outbox.batch()[0].command_id
        clock.advance(199)
        assert outbox.batch()[0].command_id == first
        clock.advance(2)
        second = outbox.batch()[0].command_id
        assert second != first and abs(instant_of(second) - clock.now()) < 10_000
        assert outbox.acknowledge(first) is None and outbox.acknowledge(second) is not None
        assert os.listdir(tmp_path) == []

    asyncio.run(story())


def test_a_request_carries_a_bounded_number_of_reports_oldest_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_module, "REPORTS_PER_REQUEST_MAX", 3)

    async def story() -> None:
        outbox = outbox_in(tmp_path, ManualClock(SystemClock().now()))
        for job in range(1, 6):
            outbox.add(job, 1, "post_run", OperationDone())
        assert [report.job for report in outbox.batch()] == [1, 2, 3]

    asyncio.run(story())


def test_a_damaged_report_stops_the_agent_by_name_and_an_unfinished_one_is_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / f"{3:020}.json.new").write_text("{")
        assert len(outbox_in(tmp_path, ManualClock())) == 0
        (tmp_path / f"{4:020}.json").write_text("{")
        with pytest.raises(AgentFailed, match=r"outbox/0{19}4\.json is damaged .* move the file away"):
            outbox_in(tmp_path, ManualClock())

    asyncio.run(story())


def test_a_damaged_report_that_is_found_again_is_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        for number, damaged in enumerate((b"", b"{", bytes(100))):
            (tmp_path / f"{number:020}.unsynced").write_bytes(damaged)
        assert len(outbox_in(tmp_path, ManualClock())) == 0 and os.listdir(tmp_path) == []

    asyncio.run(story())


class Synced:
    """What has been synced since it was last written to, by inode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inodes: set[int] = set()
        real, write = os.fsync, os.write

        def fsync(descriptor: int) -> None:
            real(descriptor)
            self.inodes.add(os.fstat(descriptor).st_ino)

        def written(descriptor: int, data: bytes) -> int:
            self.inodes.discard(os.fstat(descriptor).st_ino)
            return write(descriptor, data)

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "write", written)


@pytest.mark.parametrize("stage", ["stage_in", "run", "post_run", "stage_out", "teardown"])
@pytest.mark.parametrize("provision", [None, Provision(provider="generic")], ids=["native", "generic"])
@pytest.mark.parametrize(
    "result",
    [OperationDone(), OperationFailed("no"), ScriptEnded(JobState.COMPLETED)],
    ids=lambda one: type(one).__name__,
)
def test_a_result_is_durable_before_it_is_sent_unless_a_power_cut_that_takes_it_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, provision: Provision | None, result: object
) -> None:
    again = isinstance(result, ScriptEnded) or (stage == "post_run" and provision is None)
    told = msgspec.structs.replace(order(stage=stage), provision=provision)
    synced = Synced(monkeypatch)

    async def story() -> None:
        outbox = outbox_in(tmp_path, ManualClock(SystemClock().now()))
        outbox.add(7, 1, stage, result, lasting=not _is_found_again(told, result))  # type: ignore[arg-type]

    asyncio.run(story())
    (name,) = os.listdir(tmp_path)
    kept = {(tmp_path / name).stat().st_ino, tmp_path.stat().st_ino}
    assert (kept <= synced.inodes) is not again and kept.isdisjoint(synced.inodes) is again


def test_all_of_a_record_is_durable_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, rename = Synced(monkeypatch), os.rename
    named: list[set[str]] = []

    def seen(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        record = tmp_path / source
        assert record.stat().st_ino in synced.inodes
        named.append({path.name for path in record.iterdir() if path.stat().st_ino in synced.inodes})
        rename(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(os, "rename", seen)
    wanted = ScriptOrder(
        order=order(stage="run"), node="n1", home="/h", storage_id="ab", accounts="own", kill_wait_s=1.0
    )
    directory = open_directory(tmp_path)
    account = account_for("own", "alice")
    cgroup = CgroupName(path="/sys/fs/cgroup/x", inode=1, boot="b")
    record = create_record(directory, wanted, account, cgroup)
    monkeypatch.setattr(os, "rename", rename)
    with closing(record):
        assert record.cgroup() == cgroup and record.order() == wanted
        assert (record.count_launch(), record.count_launch()) == (1, 2)
        assert record.reported_attempt() == 0
        record.note_reported(4)
        assert record.reported_attempt() == 4
        # What a power cut may leave of it.
        (tmp_path / "1" / "reported").write_bytes(b"")
        assert record.reported_attempt() == 0
    assert named == [{"order.json", "script", "cgroup.json"}]
    assert tmp_path.stat().st_ino in synced.inodes
    os.close(directory)


def test_a_home_has_one_agent_and_one_storage_id_for_ever(tmp_path: Path) -> None:
    home = StateDirectory(tmp_path / "n1", "own")
    for removed in ((), ("lock",)):
        for name in removed:
            (tmp_path / "n1" / name).unlink()
        with pytest.raises(AgentFailed, match="another agent uses this directory"):
            StateDirectory(tmp_path / "n1", "own")
    storage_id = home.storage_id
    assert stat.S_IMODE((tmp_path / "n1").stat().st_mode) == 0o700
    home.close()
    again = StateDirectory(tmp_path / "n1", "own")
    assert again.storage_id == storage_id
    again.close()
    (tmp_path / "n1" / "buffers" / "7").mkdir()
    (tmp_path / "n1" / "storage-id").unlink()
    with pytest.raises(AgentFailed, match="storage-id is missing although there are buffers"):
        StateDirectory(tmp_path / "n1", "own")
    (tmp_path / "n1" / "storage-id").write_text("nonsense")
    with pytest.raises(AgentFailed, match="does not contain 32 hexadecimal digits"):
        StateDirectory(tmp_path / "n1", "own")


def test_a_file_is_written_whole_and_a_huge_one_is_not_read(tmp_path: Path) -> None:
    directory = open_directory(tmp_path)
    write_durably(directory, "f", b"one")
    write_durably(directory, "f", b"two")
    assert read_bounded(directory, "f") == b"two" and os.listdir(tmp_path) == ["f"]
    assert read_bounded(directory, "g") is None
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(FILE_BYTES_MAX + 1)
    with pytest.raises(FileRefused, match="huge is longer than"):
        read_bounded(directory, "huge")
    os.close(directory)


DEPTH = 200


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Let this process have fewer descriptors than the tree below has levels."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DEPTH - 50, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("few_descriptors")
def test_a_tree_is_removed_without_following_links_whatever_its_depth_and_modes(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "precious").write_text("x")
    top = tmp_path / "buffers" / "7"
    top.mkdir(parents=True)
    (top / "link").symlink_to(victim)
    (top / "closed").mkdir()
    (top / "closed" / "file").write_text("x")
    (top / "closed" / "link").symlink_to(victim / "precious")
    (top / "closed").chmod(0)
    os.mkfifo(top / "pipe")
    # Deeper than there are descriptors, and than any path is long.
    descriptor = open_directory(top)
    for _ in range(DEPTH):
        os.mkdir("d" * 100, dir_fd=descriptor)
        below = open_directory("d" * 100, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = below
    os.close(descriptor)
    parent = open_directory(tmp_path / "buffers")
    for _ in range(2):
        remove_tree(parent, "7", shown="the buffer")
        assert os.listdir(tmp_path / "buffers") == []
    assert (victim / "precious").read_text() == "x"
    (tmp_path / "buffers" / "8").symlink_to(victim)
    with pytest.raises(RemovalFailed, match="the buffer cannot be removed"):
        remove_tree(parent, "8", shown="the buffer")
    assert (victim / "precious").exists()
    os.close(parent)


ACCOUNT = UnixAccount("alice", 1000, 1000, "/home/alice", "/bin/bash", False)


def test_the_environment_is_clean_and_what_forebay_promises_cannot_be_forged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_AGENT", "x")
    brought = (
        ("PATH", "/mine"),
        ("MINE", "1"),
        ("FOREBAY_JOB_ID", "99"),
        ("FOREBAY_STEP", ""),
        ("SLURM_JOB_ID", "99"),
        ("DW_JOB_PRIVATE", "/"),
    )
    wanted = order(7, 3, "run", has_buffer=True, capacity_bytes=1, access=("striped",), environment=brought)
    told = {
        "JOB_ID": "7", "JOB_NAME": "x", "JOB_USER": "alice", "JOB_UID": "1000", "JOB_GID": "1000",
        "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "JOB_CPUS_PER_NODE": "1", "CPUS_PER_TASK": "1", "CPUS_ON_NODE": "1",
        "NTASKS": "1", "SUBMIT_DIR": "/w",
    }  # fmt: skip
    assert environment_of(wanted, ACCOUNT, buffer="/b/7", node="n1", marker="s.7") == {
        "PATH": "/mine", "HOME": "/home/alice", "USER": "alice", "LOGNAME": "alice", "SHELL": "/bin/bash",
        "LANG": "C.UTF-8", "MINE": "1",
        **{f"SLURM_{name}": value for name, value in told.items()},
        **{f"FOREBAY_{name}": value for name, value in told.items()},
        "FOREBAY_ATTEMPT": "3",
        "FOREBAY_NODE": "n1", "FOREBAY_STEP": "s.7", "FOREBAY_JOB_DIR": "/b/7", "DW_JOB_STRIPED": "/b/7/striped",
        "SLURM_JOBID": "7", "SLURM_NODELIST": "n1", "SLURM_NNODES": "1", "SLURM_NPROCS": "1", "SLURM_NODEID": "0",
        "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "1", "SLURMD_NODENAME": "n1",
    }  # fmt: skip


def test_a_task_of_an_array_knows_its_number_and_a_job_what_it_was_given() -> None:
    asked = JobOptions(account="lab", qos="high", partition="debug", reservation="r")
    task = order(9, 1, "run", options=asked, array=ArrayTask(7, 3))
    found = environment_of(task, ACCOUNT, buffer="", node="n1", marker="s.9")
    for prefix in ("SLURM", "FOREBAY"):
        assert (found[f"{prefix}_ARRAY_JOB_ID"], found[f"{prefix}_ARRAY_TASK_ID"]) == ("7", "3")
        assert (found[f"{prefix}_JOB_PARTITION"], found[f"{prefix}_JOB_ACCOUNT"]) == ("debug", "lab")
        assert (found[f"{prefix}_JOB_QOS"], found[f"{prefix}_JOB_RESERVATION"]) == ("high", "r")
    plain = environment_of(order(9, 1, "run"), ACCOUNT, buffer="", node="n1", marker="s.9")
    assert not [name for name in plain if "ARRAY" in name or name.endswith(("PARTITION", "ACCOUNT", "QOS"))]


@pytest.mark.parametrize(
    ("has_buffer", "access", "expected"),
    [
        (False, (), {}),
        (True, (), {"DW_JOB_STRIPED": "/b/striped"}),
        (True, ("private",), {"DW_JOB_PRIVATE": "/b/private"}),
        (
            True,
            ("striped", "private", "ldbalance"),
            {"DW_JOB_STRIPED": "/b/striped", "DW_JOB_PRIVATE": "/b/private", "DW_JOB_LDBALANCE": "/b/striped"},
        ),
    ],
)
def test_a_job_has_the_variables_of_the_access_that_it_asked_for(
    has_buffer: bool, access: tuple[str, ...], expected: dict[str, str]
) -> None:
    environment = environment_of(
        order(has_buffer=has_buffer, capacity_bytes=int(has_buffer), access=access),
        ACCOUNT,
        buffer="/b",
        node="n",
        marker="m",
    )
    assert {name: value for name, value in environment.items() if name.startswith("DW_")} == expected
    assert ("FOREBAY_JOB_DIR" in environment) is has_buffer


def test_a_job_that_only_uses_persistent_buffers_has_no_variables_of_a_buffer_of_its_own() -> None:
    used = order(has_buffer=True, access=("striped",), uses=("lake",))
    environment = environment_of(used, ACCOUNT, buffer="/b/buffers/7", node="n", marker="m")
    assert environment["DW_PERSISTENT_STRIPED_lake"] == "/b/persistent/lake"
    assert not {"DW_JOB_STRIPED", "FOREBAY_JOB_DIR"} & set(environment)


@pytest.mark.parametrize(
    ("output", "expected"),
    [("", "/w/forebay-7.out"), ("o/x", "/w/o/x"), ("/abs/%j", "/abs/%j")],
)
def test_the_output_file_is_where_the_order_says_its_symbols_replaced_before(output: str, expected: str) -> None:
    assert output_path(order(7, output=output)) == expected


def test_a_user_who_does_not_exist_or_is_root_is_refused_by_name_where_accounts_are_switched() -> None:
    with pytest.raises(AccountRefused, match="the user 'nobody-at-all' does not exist on this node"):
        account_for("switch", "nobody-at-all")
    with pytest.raises(AccountRefused, match="the user 'root' is root on this node"):
        account_for("switch", pwd.getpwuid(0).pw_name)
    own = account_for("own", "nobody-at-all")
    assert (own.uid, own.switch) == (os.geteuid(), False)


def test_a_long_message_keeps_its_beginning_and_its_end_and_is_text() -> None:
    message = failure("begin" + "x" * 5000 + "\udcffend").message
    assert len(message) <= MESSAGE_CHARACTERS_MAX and message.startswith("begin") and message.endswith("?end")


def test_a_rate_follows_the_counter_and_forgets_a_pause() -> None:
    rate = Rate()
    assert [rate.sample(done, at) for done, at in ((0, 0.0), (100, 1.0), (100, 1.1), (300, 2.0))] == [
        0.0,
        100.0,
        100.0,
        150.0,
    ]
    assert [rate.sample(300, 3.0 + later) < 150.0 / 2**later for later in range(3)] == [True] * 3


def test_workers_and_supervisors_start_without_the_network_stack() -> None:
    heavy = (
        "import sys, forebay.cluster.agent.worker.worker, forebay.cluster.agent.scripts.supervisor;"
        "print(sorted({'aiohttp', 'asyncio', 'forebay.cluster.client'} & set(sys.modules)))"
    )
    root = Path(__file__).resolve().parents[3]
    assert subprocess.check_output([sys.executable, "-c", heavy], cwd=root, text=True).strip() == "[]"
