"""Stage-in and stage-out: whole or not at all, and nothing that is no file or lies elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.files.paths import identity_of, inside_target
from forebay.cluster.agent.transfer import plan
from forebay.cluster.agent.transfer.errors import TransferFailed
from forebay.cluster.agent.transfer.progress import SharedCounters
from forebay.cluster.agent.transfer.rate_limit import TransferControl
from forebay.cluster.agent.transfer.transfer_state import TransferContext
from forebay.cluster.agent.transfer.workspace import Workspace
from forebay.cluster.agent.worker.items import persistent_of
from forebay.cluster.agent.worker.orphans import orphan_tag
from forebay.cluster.agent.worker.staging import NO_PERSISTENT, TransferRun, claimant_of, stage_in, stage_out
from forebay.cluster.agent.worker.task import WorkerTask
from forebay.cluster.agent.worker.worker import is_final
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.descriptors import open_directory
from forebay.replica.messages.commands import OperationDone
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order, SpecialTransfers
from forebay.replica.model.stages import Stage
from forebay.replica.model.transfers import DEFAULT_TRANSFER_RULES, LeftOut, TransferChoice, TransferRules
from tests.cluster.agent.transfer.harness import Unpaced

STORAGE_ID = "0" * 32

FILE, DIRECTORY = TransferKind.FILE, TransferKind.DIRECTORY


class Bench:
    """A buffer and places outside, without processes."""

    def __init__(self, directory: Path) -> None:
        self.rules = DEFAULT_TRANSFER_RULES
        self.outside = directory / "outside"
        self.home = directory / "home"
        self.buffer = self.home / "buffers" / "7"
        self.outside.mkdir()
        self.buffer.mkdir(parents=True)

    def order(
        self, *transfers: Transfer, capacity_bytes: int = 1 << 30, choices: tuple[TransferChoice, ...] = ()
    ) -> Order:
        return Order(
            rules=self.rules,
            special=SpecialTransfers(choices=choices) if choices else None,
            job=7,
            attempt=1,
            stage="stage_in",
            user="alice",
            name="x",
            workdir="/",
            transfers=transfers,
            roots=(str(self.outside),),
            capacity_bytes=capacity_bytes,
        )

    def run(
        self, stage: Callable[..., OperationDone], order: Order, persistent: Mapping[str, str] = NO_PERSISTENT
    ) -> OperationDone:
        buffer, home = open_directory(self.buffer), open_directory(self.home)
        workspace = Workspace.open(home, order.job, order.attempt, order.stage)
        context = TransferContext(
            orphan_tag(order.job, STORAGE_ID), workspace, SystemClock(), Unpaced(), Stage.STAGE_IN, order.attempt
        )
        try:
            claimant = claimant_of("", order.job, order.attempt, STORAGE_ID)
            return stage(order, buffer, TransferRun(context, claimant, identity_of(home), persistent))
        finally:
            workspace.close()
            for descriptor in (buffer, home):
                os.close(descriptor)

    def stage_in(
        self, *transfers: Transfer, capacity_bytes: int = 1 << 30, choices: tuple[TransferChoice, ...] = ()
    ) -> OperationDone:
        return self.run(stage_in, self.order(*transfers, capacity_bytes=capacity_bytes, choices=choices))

    def stage_out(
        self, *transfers: Transfer, partial: bool = False, choices: tuple[TransferChoice, ...] = ()
    ) -> OperationDone:
        order = self.order(*transfers, choices=choices)
        return self.run(stage_out, msgspec.structs.replace(order, stage="stage_out", partial=partial))

    def fill(self, **files: str) -> Path:
        striped = self.buffer / "striped"
        striped.mkdir(exist_ok=True)
        for name, text in files.items():
            (striped / name).write_text(text)
        return striped


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def tree_of(directory: Path) -> dict[str, bytes | None]:
    """Return every path below a directory with its contents, None for a directory."""
    return {
        str(path.relative_to(directory)): None if path.is_dir() else path.read_bytes()
        for path in sorted(directory.rglob("*"))
    }


names = st.text(alphabet="ab.é \n$-", min_size=1, max_size=4).filter(lambda name: name not in (".", ".."))
trees = st.recursive(
    st.binary(max_size=300), lambda inner: st.dictionaries(names, inner, max_size=4), max_leaves=12
).map(lambda tree: tree if isinstance(tree, dict) else {"f": tree})


def plant(directory: Path, tree: dict[str, object]) -> None:
    """Make a tree of files."""
    directory.mkdir()
    for name, inner in tree.items():
        if isinstance(inner, bytes):
            (directory / name).write_bytes(inner)
        else:
            assert isinstance(inner, dict)
            plant(directory / name, inner)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(tree=trees)
def test_a_directory_comes_back_from_the_buffer_as_it_went_in(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[str, object]
) -> None:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    plant(bench.outside / "tree", tree)
    into = bench.stage_in(Transfer(DIRECTORY, str(bench.outside / "tree"), "$DW_JOB_STRIPED/t"))
    back = bench.stage_out(Transfer(DIRECTORY, str(bench.outside / "back"), "$DW_JOB_STRIPED/t"))
    expected = tree_of(bench.outside / "tree")
    assert tree_of(bench.outside / "back") == tree_of(bench.buffer / "striped" / "t") == expected
    sizes = [len(data) for data in expected.values() if data is not None]
    assert (into.files, into.size_bytes) == (back.files, back.size_bytes) == (len(sizes), sum(sizes))
    assert into.digest == back.digest


def test_the_digest_tells_contents_names_and_their_boundaries_apart(bench: Bench) -> None:
    seen = set()
    for number, tree in enumerate(({"a": b"1"}, {"a": b"2"}, {"b": b"1"}, {"a": {"b": b"1"}}, {"a": b"", "b": b"1"})):
        plant(bench.outside / str(number), tree)
        seen.add(bench.stage_in(Transfer(DIRECTORY, str(bench.outside / str(number)), "$DW_JOB_STRIPED")).digest)
    assert len(seen) == 5


def test_modes_are_kept_but_set_id_bits_are_stripped_and_times_are_kept(bench: Bench) -> None:
    source = bench.outside / "tool"
    source.write_text("x")
    source.chmod(0o6755)
    os.utime(source, ns=(10**18, 10**18 + 5))
    bench.stage_in(Transfer(FILE, str(source), "$DW_JOB_PRIVATE/tool"))
    status = (bench.buffer / "private" / "tool").stat()
    assert stat.S_IMODE(status.st_mode) == 0o755
    assert status.st_mtime_ns == 10**18 + 5


def make_link(path: Path) -> None:
    path.symlink_to("/etc/passwd")


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))


ODD = {"symbolic link": make_link, "named pipe": make_pipe, "socket": make_socket}


@pytest.mark.parametrize("kind", ODD)
def test_whatever_is_no_file_and_is_named_itself_is_refused_by_name_and_nothing_is_copied(
    bench: Bench, kind: str
) -> None:
    (bench.outside / "d").mkdir()
    ODD[kind](bench.outside / "d" / "odd")
    with pytest.raises(TransferFailed, match=f"d/odd is a {kind}"):
        bench.stage_in(Transfer(FILE, str(bench.outside / "d" / "odd"), "$DW_JOB_STRIPED/odd"))
    assert tree_of(bench.buffer) == {"striped": None, "private": None}
    bench.fill(a="a")
    ODD[kind](bench.buffer / "striped" / "odd")
    with pytest.raises(TransferFailed, match=f"STRIPED/odd is a {kind}"):
        bench.stage_out(Transfer(FILE, str(bench.outside / "o"), "$DW_JOB_STRIPED/odd"))
    assert not (bench.outside / "o").exists()


STRICT = TransferRules(outside_links=False)


def test_where_the_site_says_so_a_link_out_of_a_tree_fails_a_stage_in_and_is_left_out_of_a_stage_out(
    bench: Bench,
) -> None:
    bench.rules = STRICT
    plant(bench.outside / "d", {"a": b"a"})
    make_link(bench.outside / "d" / "odd")
    with pytest.raises(TransferFailed, match="d/odd is a symbolic link to '/etc/passwd', outside the staged tree"):
        bench.stage_in(Transfer(DIRECTORY, str(bench.outside / "d"), "$DW_JOB_STRIPED/d"))
    assert tree_of(bench.buffer) == {"striped": None, "private": None}
    bench.fill(a="a")
    make_link(bench.buffer / "striped" / "odd")
    done = bench.stage_out(Transfer(DIRECTORY, str(bench.outside / "o"), "$DW_JOB_STRIPED"))
    assert tree_of(bench.outside / "o") == {"a": b"a"}
    assert done.receipt is not None
    why = "a symbolic link to /etc/passwd, outside the staged tree"
    assert done.receipt.left_out_first == (LeftOut("odd", why),)


@pytest.mark.parametrize("links", ["", "asis", "keep"])
@pytest.mark.parametrize("allowed", [True, False])
def test_a_virtualenv_is_staged_both_ways_and_runs_where_it_arrives(bench: Bench, links: str, allowed: bool) -> None:
    bench.rules = TransferRules(outside_links=allowed)
    venv.create(bench.outside / "venv", symlinks=True)
    (bench.outside / "venv" / "gone").symlink_to("/nowhere/at/all")
    choices = (TransferChoice(links=links),)
    there = Transfer(DIRECTORY, str(bench.outside / "venv"), "$DW_JOB_STRIPED/venv")
    if links == "keep" or not allowed:
        why = "not allowed here" if links == "asis" else "outside the staged tree"
        with pytest.raises(TransferFailed, match=why):
            bench.stage_in(there, choices=choices)
        return
    came = bench.stage_in(there, choices=choices)
    inside = bench.buffer / "striped" / "venv"
    (bench.buffer / "striped" / "other").write_text("there until the teardown")
    (inside / "made").symlink_to(bench.buffer / "striped" / "other")
    back = bench.stage_out(Transfer(DIRECTORY, str(bench.outside / "o"), "$DW_JOB_STRIPED/venv"), choices=choices)
    for tree in (inside, bench.outside / "o"):
        assert os.readlink(tree / "bin" / "python3") == os.readlink(bench.outside / "venv" / "bin" / "python3")
        said = subprocess.run([tree / "bin" / "python3", "-c", "print(6 * 7)"], capture_output=True, check=True)
        assert said.stdout == b"42\n"
    assert came.receipt is not None and back.receipt is not None
    assert (came.receipt.dangling, came.receipt.left_out) == (1, 0)
    assert (back.receipt.dangling, back.receipt.left_out) == (2, 0), "one that leads into the buffer dangles, too"


def test_a_results_link_to_its_newest_step_is_staged_out_as_a_link(bench: Bench) -> None:
    striped = bench.fill()
    plant(striped / "out", {"step100": {"x": b"100"}})
    (striped / "out" / "latest").symlink_to("step100")
    (striped / "out" / "absolute").symlink_to(striped / "out" / "step100" / "x")
    done = bench.stage_out(Transfer(DIRECTORY, str(bench.outside / "o"), "$DW_JOB_STRIPED/out"))
    assert os.readlink(bench.outside / "o" / "latest") == "step100"
    assert os.readlink(bench.outside / "o" / "absolute") == "step100/x"
    assert (bench.outside / "o" / "latest" / "x").read_bytes() == b"100"
    assert done.receipt is not None and (done.receipt.links, done.receipt.left_out) == (2, 0)


def test_a_link_that_is_named_itself_stands_for_what_it_leads_to_in_the_buffer(bench: Bench) -> None:
    striped = bench.fill()
    plant(striped / "step100", {"x": b"100"})
    (striped / "latest").symlink_to("step100")
    (striped / "best").symlink_to(striped / "latest" / "x")
    bench.stage_out(
        Transfer(DIRECTORY, str(bench.outside / "o"), "$DW_JOB_STRIPED/latest"),
        Transfer(FILE, str(bench.outside / "x"), "$DW_JOB_STRIPED/best"),
    )
    assert tree_of(bench.outside / "o") == {"x": b"100"}
    assert (bench.outside / "x").read_bytes() == b"100" and not (bench.outside / "x").is_symlink()


def test_what_a_script_did_not_make_costs_none_of_its_other_results_and_partial_gives_it_up(bench: Bench) -> None:
    bench.fill(a="a")
    both = [Transfer(FILE, str(bench.outside / name), f"$DW_JOB_STRIPED/{name}") for name in ("gone", "a")]
    tree = Transfer(DIRECTORY, str(bench.outside / "tree"), "$DW_JOB_STRIPED/none/tree")
    with pytest.raises(
        TransferFailed, match=r"STRIPED/gone does not exist \(and 1 more\); everything else is at"
    ) as caught:
        bench.stage_out(*both, tree)
    assert (bench.outside / "a").read_text() == "a"
    assert is_final(caught.value) and caught.value.receipt is not None and not caught.value.receipt.complete
    done = bench.stage_out(*both, tree, partial=True)
    assert done.receipt is not None and done.receipt.complete and done.receipt.files == 1
    assert done.receipt.left_out_first == (
        LeftOut("$DW_JOB_STRIPED/gone", "$DW_JOB_STRIPED/gone does not exist"),
        LeftOut("$DW_JOB_STRIPED/none/tree", "$DW_JOB_STRIPED/none does not exist"),
    )
    assert sorted(os.listdir(bench.outside)) == ["a"]


@pytest.mark.parametrize("kind", ["named pipe", "socket"])
def test_what_holds_no_data_in_a_tree_is_left_out_and_named_in_the_receipt(bench: Bench, kind: str) -> None:
    plant(bench.outside / "d", {"a": b"a"})
    ODD[kind](bench.outside / "d" / "odd")
    into = bench.stage_in(Transfer(DIRECTORY, str(bench.outside / "d"), "$DW_JOB_STRIPED/d"))
    ODD[kind](bench.buffer / "striped" / "d" / "new")
    back = bench.stage_out(Transfer(DIRECTORY, str(bench.outside / "o"), "$DW_JOB_STRIPED/d"))
    assert tree_of(bench.outside / "o") == {"a": b"a"}
    for done, name in ((into, "odd"), (back, "new")):
        assert done.receipt is not None and done.files == 1
        assert (done.receipt.left_out, done.receipt.left_out_first) == (1, (LeftOut(name, f"a {kind}"),))


def test_a_missing_source_is_named_with_its_transfer(bench: Bench) -> None:
    outside = str(bench.outside / "gone")
    with pytest.raises(TransferFailed) as caught:
        bench.stage_in(Transfer(FILE, outside, "$DW_JOB_STRIPED/x"))
    assert str(caught.value) == f"stage_in source={outside} destination=$DW_JOB_STRIPED/x: {outside} does not exist"
    with pytest.raises(
        TransferFailed, match=r"stage_out source=\$DW_JOB_STRIPED/y .*\$DW_JOB_STRIPED/y does not exist"
    ):
        bench.stage_out(Transfer(FILE, str(bench.outside / "y"), "$DW_JOB_STRIPED/y"))


def test_more_than_the_capacity_is_refused_with_both_figures_before_anything_is_copied(bench: Bench) -> None:
    (bench.outside / "a").write_bytes(bytes(600))
    (bench.outside / "b").write_bytes(bytes(425))
    both = [Transfer(FILE, str(bench.outside / name), f"$DW_JOB_STRIPED/{name}") for name in "ab"]
    with pytest.raises(TransferFailed, match=r"needs 1025 bytes, the buffer has 1KiB \(1024 bytes\)"):
        bench.stage_in(*both, capacity_bytes=1024)
    assert tree_of(bench.buffer / "striped") == {}
    assert bench.stage_in(*both, capacity_bytes=1025).size_bytes == 1025


def test_stage_out_replaces_files_leaves_others_alone_and_keeps_its_sources(bench: Bench) -> None:
    striped = bench.fill(a="new a", b="b")
    out = bench.outside / "out"
    out.mkdir(mode=0o750)
    (out / "a").write_text("old a")
    (out / "other").write_text("other")
    bench.stage_out(Transfer(DIRECTORY, str(out), "$DW_JOB_STRIPED"))
    assert tree_of(out) == {"a": b"new a", "b": b"b", "other": b"other"}
    assert tree_of(striped) == {"a": b"new a", "b": b"b"}
    assert stat.S_IMODE(out.stat().st_mode) == 0o750


def test_a_destination_that_is_no_regular_file_is_not_replaced(bench: Bench) -> None:
    bench.fill(a="a")
    for kind, make in {**ODD, "directory": Path.mkdir}.items():
        target = bench.outside / kind
        make(target)
        with pytest.raises(TransferFailed, match=f"exists and is a {kind}"):
            bench.stage_out(Transfer(FILE, str(target), "$DW_JOB_STRIPED/a"))


BAD_OUTSIDE = {
    "relative/x": "not an absolute path",
    "{outside}/../x": r"contains '\.\.'",
    "/etc/passwd": "lies outside the directories",
    "{outside}x/y": "lies outside the directories",
    "{outside}/link/x": "link is a symbolic link, not a directory",
    "{outside}/file/x": "file is a regular file, not a directory",
    "{outside}": "names a directory",
    "{outside}/a\0b": "zero byte",
}


@pytest.mark.parametrize("path", BAD_OUTSIDE)
@pytest.mark.parametrize("way", ["in", "out"])
def test_a_path_that_does_not_lie_beneath_a_root_is_refused_by_name(bench: Bench, path: str, way: str) -> None:
    bench.fill(a="a")
    (bench.outside / "file").write_text("x")
    (bench.outside / "link").symlink_to("/etc")
    stage = bench.stage_in if way == "in" else bench.stage_out
    with pytest.raises(TransferFailed, match=BAD_OUTSIDE[path]):
        stage(Transfer(FILE, path.format(outside=bench.outside), "$DW_JOB_STRIPED/a"))


@pytest.mark.parametrize(
    "inside", ["a", "/etc/passwd", "$HOME/a", "$DW_JOB_STRIPEDx/a", "$DW_JOB_STRIPED/../../x", "", "${DW_JOB_STRIPED/a"]
)
def test_a_path_that_is_not_in_the_buffer_is_refused_by_name(bench: Bench, inside: str) -> None:
    (bench.outside / "a").write_text("a")
    with pytest.raises(TransferFailed, match="is not a path in the buffer|contains '..'"):
        bench.stage_in(Transfer(FILE, str(bench.outside / "a"), inside))


@pytest.mark.parametrize(
    ("inside", "place"),
    [
        ("$DW_JOB_STRIPED/d/x", "striped/d/x"),
        ("${DW_JOB_STRIPED}/x", "striped/x"),
        ("$DW_JOB_PRIVATE//x/", "private/x"),
        ("$DW_JOB_LDBALANCE/x", "striped/x"),
        ("$FOREBAY_JOB_DIR/x", "x"),
    ],
)
def test_each_variable_of_the_buffer_points_where_the_job_sees_it(bench: Bench, inside: str, place: str) -> None:
    (bench.outside / "a").write_text("a")
    bench.stage_in(Transfer(FILE, str(bench.outside / "a"), inside))
    assert (bench.buffer / place).read_text() == "a"


def test_a_link_in_the_buffer_cannot_lead_a_stage_out_elsewhere(bench: Bench) -> None:
    striped = bench.fill()
    (striped / "etc").symlink_to("/etc")
    for inside in ("$DW_JOB_STRIPED/etc/hostname", "$DW_JOB_STRIPED/etc"):
        with pytest.raises(TransferFailed, match="symbolic link"):
            bench.stage_out(Transfer(FILE, str(bench.outside / "x"), inside))
    with pytest.raises(TransferFailed, match="symbolic link"):
        bench.stage_out(Transfer(DIRECTORY, str(bench.outside / "x"), "$DW_JOB_STRIPED/etc"))


def test_the_agents_own_directory_is_nobodys_source_or_destination(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    bench = Bench(tmp_path / "outside")
    bench.outside = tmp_path
    bench.fill(a="a")
    inside_home = str(bench.home / "buffers" / "9" / "stolen")
    with pytest.raises(TransferFailed, match="is the agent's own directory"):
        bench.stage_out(Transfer(FILE, inside_home, "$DW_JOB_STRIPED/a"))
    with pytest.raises(TransferFailed, match="is the agent's own directory"):
        bench.stage_in(Transfer(FILE, str(bench.home / "storage-id"), "$DW_JOB_STRIPED/a"))
    with pytest.raises(TransferFailed, match="is the agent's own directory"):
        bench.stage_in(Transfer(DIRECTORY, str(bench.home.parent), "$DW_JOB_STRIPED"))
    striped = bench.fill()
    (striped / "home").mkdir()
    with pytest.raises(TransferFailed, match="is the agent's own directory"):
        bench.stage_out(Transfer(DIRECTORY, str(bench.home.parent), "$DW_JOB_STRIPED"))


def test_a_tree_that_is_too_deep_is_refused_by_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "DIRECTORY_DEPTH_MAX", 3)
    (bench.outside / "1" / "2" / "3" / "4").mkdir(parents=True)
    with pytest.raises(TransferFailed, match="1/2/3/4 is nested more than 3 directories deep"):
        bench.stage_in(Transfer(DIRECTORY, str(bench.outside / "1"), "$DW_JOB_STRIPED"))


@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(bytes_before=st.integers(0, 9), end=st.sampled_from([signal.SIGKILL, signal.SIGTERM]))
def test_a_worker_ended_at_any_point_leaves_a_destination_absent_old_or_complete(
    tmp_path_factory: pytest.TempPathFactory, bytes_before: int, end: signal.Signals
) -> None:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    chunk = 4096
    old, new = b"old" * 100, os.urandom(chunk * 4)
    striped = bench.fill()
    (striped / "a").write_bytes(new)
    (striped / "b").write_bytes(new)
    (bench.outside / "a").write_bytes(old)
    # Ten moments in the copies of two files of four chunks each, by what the worker itself has counted.
    worker = Worker(
        bench, [Transfer(FILE, str(bench.outside / name), f"$DW_JOB_STRIPED/{name}") for name in "ab"], chunk * 100
    )
    worker.await_bytes(bytes_before * chunk)
    worker.end(end)
    assert (bench.outside / "a").read_bytes() in (old, new)
    assert not (bench.outside / "b").exists() or (bench.outside / "b").read_bytes() == new
    if end is signal.SIGTERM:
        assert set(os.listdir(bench.outside)) <= {"a", "b"}
    again = Worker(bench, [Transfer(FILE, str(bench.outside / name), f"$DW_JOB_STRIPED/{name}") for name in "ab"], 0)
    assert isinstance(again.result(), OperationDone)
    assert tree_of(bench.outside) == {"a": new, "b": new}


class Worker:
    """A worker as a process, without an agent."""

    def __init__(self, bench: Bench, transfers: list[Transfer], rate_bytes_s: int) -> None:
        self._progress = SharedCounters.create()
        self._counters = SharedCounters(self._progress)
        self._control = TransferControl()
        self._control.rate_bytes_s = rate_bytes_s or -1
        order = msgspec.structs.replace(bench.order(*transfers), stage="stage_out")
        work = WorkerTask(
            order=order,
            home=str(bench.home),
            storage_id=STORAGE_ID,
            accounts="own",
            progress=self._progress,
            control=self._control.descriptor,
            agent=os.getpid(),
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "forebay.cluster.agent.worker.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=(self._progress, self._control.descriptor),
            cwd=Path(__file__).resolve().parents[3],
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(work))
        self._process.stdin.close()

    def await_bytes(self, count: int) -> None:
        """Wait until the worker has copied this much, or is over."""
        while self._counters.read().bytes_done < count and self._process.poll() is None:
            os.sched_yield()

    def end(self, number: signal.Signals) -> None:
        """Signal it and wait for its end."""
        self._process.send_signal(number)
        self._process.wait()
        self._close()

    def result(self) -> object:
        """Wait for its result."""
        assert self._process.stdout is not None
        data = self._process.stdout.read()
        assert self._process.wait() == 0
        self._close()
        return msgspec.json.decode(data, type=OperationDone)

    def _close(self) -> None:
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._counters.close()
        self._control.close()
        os.close(self._progress)


ROOTS = ["$DW_JOB_STRIPED", "$DW_JOB_STRIPED/", "${DW_JOB_STRIPED}/."]


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("move", [False, True])
def test_a_directory_goes_into_the_root_of_the_buffer_and_comes_back_from_it(
    bench: Bench, root: str, move: bool
) -> None:
    plant(bench.outside / "tree", {"a": b"1", "sub": {"b": b"2"}})
    into = bench.stage_in(Transfer(DIRECTORY, str(bench.outside / "tree"), root), capacity_bytes=1 << 20)
    striped = bench.buffer / "striped"
    assert into.files == 2 and tree_of(striped) == {"a": b"1", "sub": None, "sub/b": b"2"}
    mode = striped.stat().st_mode
    order = msgspec.structs.replace(
        bench.order(Transfer(DIRECTORY, str(bench.outside / "back"), root)),
        stage="stage_out",
        special=SpecialTransfers(choices=(TransferChoice(move=move),)),
    )
    back = bench.run(stage_out, order)
    assert back.files == 2 and tree_of(bench.outside / "back") == {"a": b"1", "sub": None, "sub/b": b"2"}
    # The root itself is never replaced, nor removed with what was moved out of it.
    assert striped.stat().st_mode == mode
    assert any(path.is_file() for path in striped.rglob("*")) is not move


def test_two_directories_and_a_file_are_merged_into_the_root_of_the_buffer(bench: Bench) -> None:
    plant(bench.outside / "one", {"a": b"1", "sub": {"b": b"2"}})
    plant(bench.outside / "two", {"c": b"3", "sub": {"d": b"4"}})
    (bench.outside / "e").write_bytes(b"5")
    moved = [
        Transfer(DIRECTORY, str(bench.outside / "one"), "$DW_JOB_STRIPED/"),
        Transfer(DIRECTORY, str(bench.outside / "two"), "$DW_JOB_STRIPED/"),
        Transfer(FILE, str(bench.outside / "e"), "$DW_JOB_STRIPED/e"),
    ]
    # A second time is what an attempt does that begins again.
    for _ in range(2):
        assert bench.stage_in(*moved).files == 5
        expected = {"a": b"1", "c": b"3", "e": b"5", "sub": None, "sub/b": b"2", "sub/d": b"4"}
        assert tree_of(bench.buffer / "striped") == expected


@pytest.mark.parametrize(
    "root", ["$DW_JOB_STRIPED", "${DW_JOB_STRIPED}/", "$DW_JOB_LDBALANCE/", "$FOREBAY_JOB_DIR/striped"]
)
def test_two_files_with_one_destination_are_rejected_before_anything_is_copied(bench: Bench, root: str) -> None:
    plant(bench.outside / "one", {"a": b"1", "sub": {"b": b"2"}})
    plant(bench.outside / "two", {"c": b"3", "b": b"4"})
    one = Transfer(DIRECTORY, str(bench.outside / "one"), "$DW_JOB_STRIPED/")
    two = Transfer(DIRECTORY, str(bench.outside / "two"), f"{root}/sub")
    with pytest.raises(TransferFailed, match="one/sub/b and .*two/b have the same destination"):
        bench.stage_in(one, two)
    assert not any(tree_of(bench.buffer / "striped").values())
    bench.fill(a="1", b="2")
    target = str(bench.outside / "r")
    with pytest.raises(TransferFailed, match="have the same destination"):
        bench.stage_out(Transfer(FILE, target, "$DW_JOB_STRIPED/a"), Transfer(FILE, target, "$DW_JOB_STRIPED/b"))
    assert not (bench.outside / "r").exists()


@given(bytes_before=st.integers(0, 9), end=st.sampled_from([signal.SIGKILL, signal.SIGTERM]))
@settings(max_examples=6, deadline=None)
def test_a_worker_that_was_ended_goes_on_with_the_root_of_the_buffer(
    tmp_path_factory: pytest.TempPathFactory, bytes_before: int, end: signal.Signals
) -> None:
    bench = Bench(tmp_path_factory.mktemp("bench"))
    chunk, data = 4096, os.urandom(4096 * 4)
    striped = bench.fill()
    plant(striped / "sub", {"b": data})
    (striped / "a").write_bytes(data)
    root = striped.stat()
    transfers = [Transfer(DIRECTORY, str(bench.outside / "back"), "$DW_JOB_STRIPED/")]
    worker = Worker(bench, transfers, chunk * 100)
    worker.await_bytes(bytes_before * chunk)
    worker.end(end)
    found = Worker(bench, transfers, 0).result()
    assert isinstance(found, OperationDone) and found.files == 2
    assert tree_of(bench.outside / "back") == tree_of(striped) == {"a": data, "sub": None, "sub/b": data}
    assert (striped.stat().st_ino, striped.stat().st_mode) == (root.st_ino, root.st_mode)


@pytest.mark.parametrize("count", [1, 50, 1000])
def test_the_root_of_a_persistent_buffer_stays_the_directory_that_it_was(
    bench: Bench, tmp_path: Path, count: int
) -> None:
    lake = tmp_path / "lake"
    plant(lake, {})
    lake.chmod(0o770)
    files = {f"f{number}": b"1" for number in range(count)}
    plant(bench.outside / "one", files | {"sub": files})
    (bench.outside / "one").chmod(0o755)
    before, persistent = lake.stat(), {"DW_PERSISTENT_STRIPED_lake": str(lake)}
    into = Transfer(DIRECTORY, str(bench.outside / "one"), "$DW_PERSISTENT_STRIPED_lake/")
    back = Transfer(DIRECTORY, str(bench.outside / "back"), "$DW_PERSISTENT_STRIPED_lake")
    order = msgspec.structs.replace(bench.order(into), uses=("lake",))
    assert bench.run(stage_in, order, persistent).files == 2 * count
    # What another job is still staging in lies in the same root, and its user may be another one.
    claimant = claimant_of("", 9, 1, STORAGE_ID)
    plant(lake / claimant.home, {claimant.place: {"part": b"half"}})
    (lake / claimant.home).chmod(0o700)
    order = msgspec.structs.replace(bench.order(back), stage="stage_out", uses=("lake",))
    assert bench.run(stage_out, order, persistent).files == 2 * count
    assert tree_of(bench.outside / "back") == tree_of(bench.outside / "one")
    after = lake.stat()
    assert (after.st_ino, after.st_mode, after.st_uid) == (before.st_ino, before.st_mode, before.st_uid)


def test_paths_of_a_persistent_buffer_are_found_by_either_spelling(bench: Bench, tmp_path: Path) -> None:
    lake = tmp_path / "lake-2"
    lake.mkdir()
    persistent = {"DW_PERSISTENT_STRIPED_lake_2": str(lake)}
    buffer = open_directory(bench.buffer)
    try:
        for spelling in ("$DW_PERSISTENT_STRIPED_lake_2", "${DW_PERSISTENT_STRIPED_lake-2}"):
            target = inside_target(buffer, f"{spelling}/a", persistent)
            assert os.fstat(target.anchor).st_ino == lake.stat().st_ino and target.parts == ("a",)
            os.close(target.anchor)
            assert persistent_of(f"{spelling}/a", ("pond", "lake-2")) == "lake-2"
    finally:
        os.close(buffer)
