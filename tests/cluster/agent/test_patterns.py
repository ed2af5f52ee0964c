"""Patterns of transfers on a node: what matches, what does not, and what may not be matched."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.cluster.agent.files import PathRefused, Target, identity_of
from forebay.cluster.agent.processes.environment import environment_of
from forebay.cluster.agent.transfer import ItemKind, TransferFailed, TransferItem, Workspace
from forebay.cluster.agent.worker import patterns
from forebay.cluster.agent.worker.orphans import expected_orphans
from forebay.cluster.agent.worker.patterns import find_matches
from forebay.cluster.agent.worker.staging import Claims, TransferRun, claimant_of, stage_in, stage_out
from forebay.cluster.system import closing, open_directory
from forebay.replica.messages import OperationDone
from forebay.replica.model import ListTransfer, Order, SpecialTransfers, Transfer, TransferChoice, TransferKind
from tests.cluster.agent.test_parts import ACCOUNT
from tests.cluster.agent.test_staging import STORAGE_ID, Bench, bench, tree_of

__all__ = ["bench"]

FILE, DIRECTORY = TransferKind.FILE, TransferKind.DIRECTORY


def made(top: Path, *names: str) -> Path:
    for name in names:
        path = top / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir(exist_ok=True)
        else:
            path.write_text(name)
    return top


def matches(top: Path, pattern: str, *, directories: bool = False, barred: Path | None = None) -> list[str]:
    with closing(open_directory(top)) as anchor:
        home = None
        if barred is not None:
            with closing(open_directory(barred)) as other:
                home = identity_of(other)
        found = find_matches(Target(anchor, str(top), ()), pattern, directories=directories, barred=home)
        os.fstat(anchor)  # it stays open
    return ["/".join(match) for match in found]


def test_matches_are_sorted_and_hidden_names_only_match_a_dot(tmp_path: Path) -> None:
    made(tmp_path, "b.h5", "a.h5", "é.h5", "c.txt", ".d.h5", "[x].h5", "dir.h5/", "sub/e.h5")
    assert matches(tmp_path, "*.h5") == ["[x].h5", "a.h5", "b.h5", "é.h5"]
    assert matches(tmp_path, ".*.h5") == [".d.h5"]
    assert matches(tmp_path, "?.h5") == ["a.h5", "b.h5", "é.h5"]
    assert matches(tmp_path, "[!a]*.h5") == ["[x].h5", "b.h5", "é.h5"]
    assert matches(tmp_path, "[[]x].h5") == ["[x].h5"]
    assert matches(tmp_path, "*/*.h5") == ["sub/e.h5"]
    assert matches(tmp_path, "s?b/e.h5") == ["sub/e.h5"]
    assert matches(tmp_path, "*.h5", directories=True) == ["dir.h5"]
    assert matches(tmp_path, "none*/x") == matches(tmp_path, "c.*/x") == []


def test_a_match_never_lies_behind_a_link_and_a_link_is_what_it_leads_to(tmp_path: Path) -> None:
    outside = made(tmp_path / "outside", "secret.h5")
    top = made(tmp_path / "top", "a/x.h5", "b.h5")
    (top / "link").symlink_to(outside)
    (top / "other.h5").symlink_to("b.h5")
    (top / "gone.h5").symlink_to("nowhere")
    (top / "dir.h5").symlink_to("a")
    os.mkfifo(top / "pipe.h5")
    assert matches(top, "*/*.h5") == ["a/x.h5"]
    assert matches(top, "link/secret.?5") == []
    assert matches(top, "*.h5") == ["b.h5", "other.h5"]
    assert matches(top, "*", directories=True) == ["a", "dir.h5", "link"]


def test_the_agents_own_directory_is_not_searched(tmp_path: Path) -> None:
    made(tmp_path, "home/key.h5", "data/a.h5")
    assert matches(tmp_path, "*/*.h5", barred=tmp_path / "home") == ["data/a.h5"]


def test_two_matches_with_one_name_are_rejected(tmp_path: Path) -> None:
    made(tmp_path, "a/x", "b/x")
    with pytest.raises(PathRefused, match="a/x and b/x would both become 'x'"):
        matches(tmp_path, "*/x")


def test_matches_and_names_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path, *(f"{number}" for number in range(5)))
    monkeypatch.setattr(patterns, "MATCHES_MAX", 4)
    with pytest.raises(PathRefused, match="more than 4 names match"):
        matches(tmp_path, "*")
    assert matches(tmp_path, "[0-3]") == ["0", "1", "2", "3"]
    monkeypatch.setattr(patterns, "NAMES_READ_MAX", 4)
    with pytest.raises(PathRefused, match="more than 4 names below"):
        matches(tmp_path, "[0-3]")


def test_a_pattern_takes_no_exponential_time(tmp_path: Path) -> None:
    made(tmp_path, "a" * 200)
    started = time.monotonic()
    assert matches(tmp_path, "*a" * 100 + "b") == []
    assert time.monotonic() - started < 60


def test_stage_in_puts_every_match_into_the_destination(bench: Bench) -> None:
    made(bench.outside, "run/a.h5", "run/b.h5", "run/c.txt", "trees/one/x", "trees/two/y", "trees/no")
    bench.stage_in(
        Transfer(FILE, f"{bench.outside}/run/", "$DW_JOB_STRIPED/data", "*.h5"),
        Transfer(DIRECTORY, str(bench.outside), "$DW_JOB_STRIPED", "tr*/*"),
    )
    assert tree_of(bench.buffer / "striped") == {
        "data": None,
        "data/a.h5": b"run/a.h5",
        "data/b.h5": b"run/b.h5",
        "one": None,
        "one/x": b"trees/one/x",
        "two": None,
        "two/y": b"trees/two/y",
    }


def test_stage_in_without_a_match_fails_with_the_pattern(bench: Bench) -> None:
    made(bench.outside, "run/a.txt")
    with pytest.raises(TransferFailed, match=r"no file matches the pattern '\*.h5' in .*/run"):
        bench.stage_in(Transfer(FILE, f"{bench.outside}/run", "$DW_JOB_STRIPED", "*.h5"))
    with pytest.raises(TransferFailed, match=r"source=.*none/\*.h5.*none does not exist"):
        bench.stage_in(Transfer(FILE, f"{bench.outside}/none", "$DW_JOB_STRIPED", "*.h5"))


def test_stage_out_moves_matches_and_reports_a_pattern_without_any_after_the_others(bench: Bench) -> None:
    striped = made(bench.fill(), "a.h5", "b.h5", "c.txt", "run-1/x", "run-2/y", "run-3")
    out = bench.outside / "out"
    every = [
        Transfer(FILE, f"{out}/", "$DW_JOB_STRIPED/", "*.h5"),
        Transfer(DIRECTORY, f"{out}/runs", "$DW_JOB_STRIPED", "run-*"),
    ]
    bench.stage_out(*every, choices=(TransferChoice(move=True), TransferChoice()))
    expected = {
        "a.h5": b"a.h5", "b.h5": b"b.h5", "runs": None, "runs/run-1": None, "runs/run-1/x": b"run-1/x",
        "runs/run-2": None, "runs/run-2/y": b"run-2/y",
    }  # fmt: skip
    assert tree_of(out) == expected
    assert not (striped / "a.h5").exists() and (striped / "run-1" / "x").exists()
    none = Transfer(FILE, f"{out}/none", "$DW_JOB_STRIPED", "*.zip")
    also = Transfer(FILE, f"{out}/text", "$DW_JOB_STRIPED", "*.txt")
    with pytest.raises(TransferFailed, match=r"\*.zip"):
        bench.stage_out(none, also)
    assert (out / "text" / "c.txt").read_bytes() == b"c.txt"
    done = bench.stage_out(none, also, partial=True)
    assert done.receipt is not None and done.files == 1


def test_temporary_files_of_a_pattern_are_in_its_destination(bench: Bench) -> None:
    made(bench.fill(), "run-1/x")
    transfer = Transfer(DIRECTORY, f"{bench.outside}/runs", "$DW_JOB_STRIPED", "run-*")
    files = Transfer(FILE, f"{bench.outside}/files", "$DW_JOB_STRIPED", "*")
    order = bench.order(transfer, files)
    left = expected_orphans(replace(order, stage="stage_out"))
    assert left.directories == (f"{bench.outside}/runs", f"{bench.outside}/files")


def test_a_copy_is_of_a_file_or_a_directory_whichever_the_source_is(bench: Bench) -> None:
    made(bench.outside, "file", "tree/x", "deep/tree/y")
    (bench.outside / "link").symlink_to("tree")
    either = TransferKind.EITHER
    bench.stage_in(
        Transfer(either, f"{bench.outside}/file", "$DW_JOB_STRIPED"),
        Transfer(either, f"{bench.outside}/file", "$DW_JOB_STRIPED/new"),
        Transfer(either, f"{bench.outside}/tree", "$DW_JOB_STRIPED/t"),
        Transfer(either, f"{bench.outside}/link", "$DW_JOB_STRIPED/l/"),
    )
    assert tree_of(bench.buffer / "striped") == {
        "file": b"file", "new": b"file", "t": None, "t/x": b"tree/x", "l": None, "l/x": b"tree/x",
    }  # fmt: skip
    with pytest.raises(TransferFailed, match="none"):
        bench.stage_in(Transfer(either, f"{bench.outside}/none", "$DW_JOB_STRIPED"))
    out = bench.outside / "out"
    bench.stage_in(Transfer(either, f"{bench.outside}/tree", "$DW_JOB_STRIPED/t"))
    bench.fill(file="file")
    transfers = [
        Transfer(either, f"{out}/", "$DW_JOB_STRIPED/file"),
        Transfer(either, f"{out}/t", "$DW_JOB_STRIPED/t"),
        Transfer(either, f"{out}/none", "$DW_JOB_STRIPED/none"),
    ]
    with pytest.raises(TransferFailed, match="none"):
        bench.stage_out(*transfers)
    assert tree_of(out) == {"file": b"file", "t": None, "t/x": b"tree/x"}
    left = expected_orphans(replace(bench.order(*transfers[:2]), stage="stage_out"))
    assert set(left.directories) >= {f"{out}/", f"{out}/t", str(out)}


def test_named_buffers_are_directories_of_the_buffer(bench: Bench) -> None:
    made(bench.outside, "a", "list")
    (bench.outside / "list").write_text("$DW_JOB_PRIVATE_b-c/a\n")
    order = replace(
        bench.order(Transfer(FILE, f"{bench.outside}/a", "$DW_JOB_PRIVATE/b-c/a")),
        names=("a", "b-c"),
        access=("striped", "private"),
    )
    bench.run(stage_in, order)
    assert sorted(tree_of(bench.buffer)) == [
        "private", "private/a", "private/b-c", "private/b-c/a", "striped", "striped/a", "striped/b-c",
    ]  # fmt: skip
    listed = SpecialTransfers(
        lists=(ListTransfer(True, f"{bench.outside}/list", f"{bench.outside}/out"),), list_roots=(str(bench.outside),)
    )
    bench.run(stage_out, replace(order, stage="stage_out", transfers=(), special=listed))
    assert (bench.outside / "out" / "a").read_bytes() == b"a"


def test_a_script_gets_the_variables_of_named_buffers(bench: Bench) -> None:
    order = replace(bench.order(), stage="run", has_buffer=True, names=("b-c",), access=("private", "striped"))
    found = environment_of(order, ACCOUNT, buffer="/bb/jobs/7", node="n1", marker="s.7")
    assert {name: value for name, value in found.items() if "b_c" in name} == {
        "DW_JOB_PRIVATE_b_c": "/bb/jobs/7/private/b-c",
        "DW_JOB_STRIPED_b_c": "/bb/jobs/7/striped/b-c",
        "DW_JOB_b_c": "/bb/jobs/7/private/b-c",
    }


def test_the_staging_directory_of_a_matching_directory_is_beside_it(bench: Bench) -> None:
    made(bench.outside, "runs/")
    made(bench.fill(), "run-1/x", "run-2/y")
    home, source, top = (open_directory(path) for path in (bench.home, bench.buffer / "striped", bench.outside))
    workspace = Workspace.open(home, 7, 1, "stage_out")
    try:
        with Claims(claimant_of("", 7, 1, STORAGE_ID)) as claims:
            for name in ("run-1", "run-2"):
                item = TransferItem(
                    ItemKind.DIRECTORY, Target(source, "$DW_JOB_STRIPED", (name,)), Target(top, "/out", ("runs", name))
                )
                staged = claims.stage(item, workspace, outgoing=True, above=True)
                where = Path(os.readlink(f"/proc/self/fd/{staged.staging}"))
                assert where.parents[1] == bench.outside / "runs"
                # Only this transfer may enter a directory that it fills.
                assert (bench.outside / "runs" / name).stat().st_mode & 0o777 == 0o700
            claims.release()
    finally:
        workspace.close()
        for descriptor in (home, source, top):
            os.close(descriptor)


def test_a_mover_continues_with_the_empty_directories_of_named_buffers_and_no_others(bench: Bench) -> None:
    made(bench.outside, "a")
    transfer = Transfer(FILE, f"{bench.outside}/a", "$DW_JOB_STRIPED/b/a")
    order = replace(bench.order(transfer), names=("b", "c"), access=("striped",))

    def by_mover(order: Order, buffer: int, run: TransferRun) -> OperationDone:
        return stage_in(order, buffer, run._replace(shared=True))

    made(bench.buffer, "striped/b/", "private/")
    bench.run(by_mover, order)
    assert (bench.buffer / "striped/b/a").read_bytes() == b"a" and (bench.buffer / "private/c").is_dir()
    # Its content is recorded only in the agent that staged it.
    with pytest.raises(TransferFailed, match="which is not recorded"):
        bench.run(by_mover, replace(order, job=8))
