"""rsync, rclone and a site's own program: what they say is not believed, and what they do is put in place like our own
copies."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.transfer.errors import ReadBackFailed, TransferFailed
from forebay.cluster.agent.transfer.options import ItemKind, TransferOptions, Verify
from forebay.cluster.agent.transfer.rate_limit import TransferStopped
from forebay.cluster.agent.transfer.record_paths import part_name
from forebay.cluster.providers import Local
from forebay.cluster.system.processes import all_pids, environment_variables
from forebay.replica.model.transfers import LeftOut
from tests.cluster.agent.transfer.harness import SMALL, TAG, Harness, plant, tree_of

needs_rsync = pytest.mark.skipif(shutil.which("rsync") is None, reason="no rsync here: scripts/install-backends")
needs_rclone = pytest.mark.skipif(shutil.which("rclone") is None, reason="no rclone here: scripts/install-backends")

BACKENDS = (pytest.param("rsync", marks=needs_rsync), pytest.param("rclone", marks=needs_rclone), "template")

COPY = "/bin/cp -aT {source} {destination}"
"""A site's program that does what it should."""


def options(**changed: object) -> TransferOptions:
    made = msgspec.structs.replace(SMALL, **({"template": COPY} | changed))
    return msgspec.structs.replace(made, local=Local(allowed_programs=tuple(made.template.split()[:1])))


def script(harness: Harness, text: str) -> str:
    """Return the command line of a site's program, whose $1 is the source, $2 the destination, $3 the kind."""
    path = harness.directory / "program"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return f"{path} {{source}} {{destination}} {{kind}}"


def big(seed: int, size: int) -> bytes:
    return bytes((seed * 131 + at * 7 + (at >> 8)) & 255 for at in range(size))


TREE: dict[str, object] = {
    "a": b"x",
    "empty": b"",
    "-n": b"dash",
    "#c": b"comment",
    ";c": b"semicolon",
    " blank ": b"blanks",
    "é*?[a]\\": b"glob",
    "{source}": b"a name that is a place",
    "large": big(1, 40_000),
    "deep": {"er": {"f": big(2, 5_000), "g": b""}, "empty": {}},
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("level", [Verify.NONE, Verify.READ_BACK])
def test_a_tree_arrives_whole_whoever_moves_it_and_the_receipt_is_that_of_our_own_copy(
    harness: Harness, backend: str, level: Verify
) -> None:
    plant(harness.source, TREE)
    os.chmod(harness.source / "a", 0o6751)
    os.utime(harness.source / "a", ns=(1, 123_456_789_012_345_678))
    os.setxattr(harness.source / "a", "user.k", b"v")
    receipt = harness.carry([harness.item()._replace(backend=backend)], options(verify=level))
    assert tree_of(harness.destination) == tree_of(harness.source)
    status = (harness.destination / "a").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o751, 123_456_789_012_345_678)
    assert os.getxattr(harness.destination / "a", "user.k") == b"v"
    assert (receipt.files, receipt.directories, receipt.retries) == (11, 4, 0) and not harness.parts()
    theirs = [(line.path, line.size, line.digest) for line in harness.lines()]
    own = Harness(_beside(harness))
    try:
        plant(own.source, TREE)
        own.carry(None, options(verify=level))
        ours = [(line.path, line.size, line.digest) for line in own.lines()]
    finally:
        own.close()
    if level >= Verify.DIGEST:
        assert theirs == ours
    assert [row[:2] for row in theirs] == [row[:2] for row in ours]


def _beside(harness: Harness) -> Path:
    path = harness.directory / "own"
    path.mkdir()
    return path


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_single_file_goes_alone_and_replaces_the_old_one_at_once(harness: Harness, backend: str) -> None:
    plant(harness.source, {"a": b"new", "b": b"not asked for"})
    plant(harness.destination, {"z": b"old"})
    item = harness.item(ItemKind.FILE, harness.source / "a", harness.destination / "z")._replace(backend=backend)
    harness.carry([item], options())
    assert tree_of(harness.destination) == {"z": b"new"}


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_there_stays_where_nothing_may_be_replaced(harness: Harness, backend: str) -> None:
    plant(harness.source, {"a": b"new"})
    plant(harness.destination, {"a": b"old"})
    with pytest.raises(TransferFailed, match="exists and may not be replaced"):
        harness.carry([harness.item()._replace(backend=backend)], options(replace=False))
    assert (harness.destination / "a").read_bytes() == b"old"


@needs_rsync
@needs_rclone
def test_each_item_has_its_own_backend_in_one_transfer(harness: Harness) -> None:
    names = ("native", "rsync", "rclone", "template")
    plant(harness.source, {name: {"f": name.encode()} for name in names})
    items = [
        harness.item(source=harness.source / name, destination=harness.destination / name)._replace(backend=name)
        for name in names
    ]
    receipt = harness.carry(items, options())
    assert tree_of(harness.destination) == tree_of(harness.source) and receipt.files == 4


LIES: dict[str, tuple[str, str]] = {
    "copies nothing": ("exit 0", "the copy does not exist"),
    "leaves one out": ('cp -aT "$1" "$2"; rm "$2/b"', "b: the copy does not exist"),
    "cuts one short": ('cp -aT "$1" "$2"; truncate -s 2 "$2/b"', "b: the copy has 2 bytes instead of 5"),
    "makes one longer": ('cp -aT "$1" "$2"; echo x >>"$2/b"', "b: the copy has 7 bytes instead of 5"),
    "changes a byte": ('cp -aT "$1" "$2"; printf hellO >"$2/b"', "b: the content of the copy differs"),
    "makes links": ('ln -s "$1b" "$2/b"; cp "$1/a" "$2/a"', "b: the copy is a symbolic link"),
    "makes second names": ('ln "$1/b" "$2/b"; cp "$1/a" "$2/a"', "b: the copy is a hard link to another file"),
    "makes pipes": ('mkfifo "$2/b"; cp "$1/a" "$2/a"', "b: the copy is a named pipe"),
    "makes directories": ('mkdir "$2/b"; cp "$1/a" "$2/a"', "b: the copy is a directory"),
}


@pytest.mark.parametrize("lie", LIES)
def test_no_program_is_believed_by_its_exit_code(harness: Harness, lie: str) -> None:
    text, says = LIES[lie]
    plant(harness.source, {"a": b"a", "b": b"hello"})
    plant(harness.destination, {"b": b"old"})
    template = script(harness, text)
    with pytest.raises(ReadBackFailed) as failed:
        harness.carry([harness.item()._replace(backend="template")], options(template=template))
    assert "template reported success but did not copy" in str(failed.value) and says in str(failed.value)
    assert (harness.destination / "b").read_bytes() == b"old" and (harness.source / "b").read_bytes() == b"hello"
    receipt = harness.carry([harness.item()._replace(backend="template")], options())
    assert receipt.files == 2 and tree_of(harness.destination) == tree_of(harness.source) and not harness.parts()


def test_what_was_wrong_once_is_copied_again(harness: Harness) -> None:
    plant(harness.source, {"a": b"a", "b": b"hello"})
    once = harness.directory / "once"
    template = script(harness, f'cp -aT "$1" "$2"; [ -e {once} ] || {{ touch {once}; printf hellO >"$2/b"; }}')
    receipt = harness.carry([harness.item()._replace(backend="template")], options(template=template))
    assert receipt.retries == 1 and tree_of(harness.destination) == tree_of(harness.source)


def test_a_program_that_fails_gives_its_last_words_and_nothing_is_put_in_place(harness: Harness) -> None:
    plant(harness.source, {"a": b"a", "b": b"b"})
    template = script(harness, 'cp -aT "$1" "$2"; echo first >&2; printf "tape\\033[2J robot\\n" >&2; exit 7')
    with pytest.raises(TransferFailed, match=r"template ended with code 7: tape.*robot") as failed:
        harness.carry([harness.item()._replace(backend="template")], options(template=template))
    assert "\033" not in str(failed.value)
    assert tree_of(harness.destination) == {}


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_a_file_that_a_killed_program_left_does_not_fail_the_next_attempt(harness: Harness, backend: str) -> None:
    plant(harness.source, {"a": b"a" * 5000, "d": {"b": b"b" * 5000}, "c": b"c"})
    left = harness.destination / os.fsdecode(part_name(TAG, b"0:scratch"))
    plant(left, {"a": b"a" * 100, "d": {"b": b"x" * 5000}})
    harness.carry([harness.item()._replace(backend=backend)], options())
    assert tree_of(harness.destination) == tree_of(harness.source)


class Ending:
    """A pace that ends the transfer as soon as a file is there."""

    def __init__(self, there: Callable[[], bool]) -> None:
        self._there = there

    def take(self, size_bytes: int, /) -> None:
        pass

    def check(self) -> None:
        if self._there():
            raise TransferStopped

    def step_bytes(self, most: int, /) -> int:
        return most

    def end(self, error: type[BaseException], /) -> None:
        pass


def test_a_program_is_ended_with_all_that_it_started_when_the_transfer_ends(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_OPERATION", marker := f"test.{os.getpid()}.{time.monotonic_ns()}")
    plant(harness.source, {"a": b"a"})
    started = harness.directory / "started"
    template = script(harness, f"(trap '' TERM; setsid sleep 600) & touch {started}; sleep 600")
    harness.pace = Ending(started.exists)
    began_s = time.monotonic()
    with pytest.raises(TransferStopped):
        harness.carry([harness.item()._replace(backend="template")], options(template=template))
    wanted = f"FOREBAY_OPERATION={marker}".encode()
    assert [pid for pid in all_pids() if pid != os.getpid() and wanted in environment_variables(pid)] == []
    assert time.monotonic() - began_s < 60 and not (harness.destination / "a").exists()


class Limited:
    """A pace that lets so many bytes through, and then only so many a second."""

    def __init__(self) -> None:
        self.taken = 0

    def take(self, size_bytes: int, /) -> None:
        self.taken += size_bytes

    def check(self) -> None:
        pass

    def step_bytes(self, most: int, /) -> int:
        return min(most, 4096)

    def end(self, error: type[BaseException], /) -> None:
        pass


def test_what_a_program_writes_is_taken_from_the_rate(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    template = script(harness, 'head -c 3000000 /dev/zero >"$2/x"; sleep 0.4; rm "$2/x"; cp -aT "$1" "$2"')
    harness.pace = limited = Limited()
    harness.carry([harness.item()._replace(backend="template")], options(template=template))
    assert limited.taken >= 3_000_000 and any(counters.steps for counters in harness.told)


@needs_rsync
@needs_rclone
def test_rclone_refuses_a_name_that_it_cannot_be_told_of(harness: Harness) -> None:
    for name, says in (("line\nbreak", "contains a line break"), (os.fsdecode(b"\xff"), "is not UTF-8")):
        (harness.source / name).write_bytes(b"x")
        with pytest.raises(TransferFailed, match=f"its name {says}; use backend=native"):
            harness.carry([harness.item()._replace(backend="rclone")], options())
        harness.carry([harness.item()._replace(backend="rsync")], options())
        assert tree_of(harness.destination) == tree_of(harness.source)
        (harness.source / name).unlink()
        (harness.destination / name).unlink()


def test_a_program_that_is_not_there_is_named(harness: Harness) -> None:
    plant(harness.source, {"a": b"a"})
    for template, says in (
        ("/proc/nowhere/copy {source} {destination}", "the site's program /proc/nowhere/copy cannot be opened"),
        ("copy {source} {destination}", "begins with 'copy', which is not an absolute path"),
        ("/bin/cp {source}", "has no {destination}"),
        ("", "is empty"),
        ('/bin/cp "{source} {destination}', "quotes that do not match"),
    ):
        with pytest.raises(TransferFailed) as failed:
            harness.carry([harness.item()._replace(backend="template")], options(template=template))
        assert says in str(failed.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sources_of_a_move_go_only_when_everything_is_there(harness: Harness, backend: str) -> None:
    plant(harness.source, {"a": b"a", "d": {"b": b"b"}})
    before = tree_of(harness.source)
    receipt = harness.carry([harness.item(move=True)._replace(backend=backend)], options())
    assert tree_of(harness.destination) == before and tree_of(harness.source) == {} and receipt.removed_files == 2


@pytest.mark.parametrize("backend", ["native", *BACKENDS])
@pytest.mark.parametrize("move", [False, True])
def test_what_is_left_out_of_a_tree_is_missed_by_nobody_and_never_removed_at_its_source(
    harness: Harness, backend: str, move: bool
) -> None:
    plant(harness.source, {"a": b"a", "d": {"b": b"b"}, "e": {"only": {}}})
    os.mkfifo(harness.source / "d" / "pipe")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(harness.source / "e" / "only" / "socket"))
    receipt = harness.carry([harness.item(move=move)._replace(backend=backend)], options())
    assert tree_of(harness.destination) == {"a": b"a", "d": None, "d/b": b"b", "e": None, "e/only": None}
    stays = "; it stays at the source" if move else ""
    assert receipt.left_out_first == (
        LeftOut("d/pipe", f"a named pipe{stays}"),
        LeftOut("e/only/socket", f"a socket{stays}"),
    )
    assert (receipt.complete, receipt.files, receipt.left_out) == (True, 2, 2) and not harness.parts()
    left = {str(path.relative_to(harness.source)) for path in harness.source.rglob("*")}
    around = {"d", "d/pipe", "e", "e/only", "e/only/socket"}
    assert left == (around if move else around | {"a", "d/b"})


@pytest.mark.parametrize("backend", ["native", *BACKENDS])
def test_what_is_no_file_and_is_named_itself_is_refused_whoever_moves_it(harness: Harness, backend: str) -> None:
    os.mkfifo(harness.source / "pipe")
    item = harness.item(ItemKind.FILE, harness.source / "pipe", harness.destination / "pipe")._replace(backend=backend)
    with pytest.raises(TransferFailed, match="source/pipe is a named pipe; only regular files and directories"):
        harness.carry([item], options())
    assert tree_of(harness.destination) == {}


@needs_rsync
def test_more_files_than_one_batch_are_moved_in_several(harness: Harness) -> None:
    plant(harness.source, {f"d{part}": {f"f{n}": b"%d" % n for n in range(350)} for part in range(3)})
    receipt = harness.carry([harness.item()._replace(backend="rsync")], options())
    assert receipt.files == 1050 and tree_of(harness.destination) == tree_of(harness.source) and not harness.parts()
