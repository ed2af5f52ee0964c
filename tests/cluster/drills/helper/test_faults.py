"""Faults and their reversal: after a crash at any step, settling the undo record removes the fault."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.drills.helper import faults as module
from forebay.cluster.drills.helper.faults import (
    Cut,
    Fault,
    Fill,
    Kill,
    Stop,
    TargetProcess,
    ThisMachine,
    Throttle,
    Undo,
    _locks,
    do,
    of_target,
    undo_fault,
)
from forebay.cluster.drills.helper.messages import HelperRefused
from forebay.cluster.drills.helper.record import Busy, UndoRecord
from forebay.cluster.system import start_time
from tests.cluster.drills.helper.held import holding, state_of

NEVER = 0


class Died(BaseException):
    """Simulated SIGKILL within one process: nothing runs after it."""


class World:
    """Simulated machine that dies at a given step; each operation has a step before and one after it."""

    def __init__(self) -> None:
        self.process: TargetProcess | None = TargetProcess(7, 1, "boot")
        self.stopped = False
        self.tables = set[str]()
        self.files = set[str]()
        self.bound = "before"
        self.dies_at = NEVER
        self.steps = 0
        self.waits_for_others = True

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.dies_at:
            raise Died

    def holder(self, directory: str) -> TargetProcess | None:
        self.step()
        return self.process

    def signal(self, process: TargetProcess, number: signal.Signals) -> bool:
        self.step()
        if process != self.process:
            return False
        if number is signal.SIGKILL:
            self.process = None
        else:
            self.stopped = number is signal.SIGSTOP
        self.step()
        return True

    def cut(self, rules: str) -> None:
        self.step()
        self.tables.add(rules)
        self.step()

    def mend(self, table: str) -> None:
        self.step()
        self.tables.discard(table)
        self.step()

    def fill(self, file: str) -> None:
        self.step()
        self.files.add(file)
        self.step()

    def empty(self, file: str) -> None:
        self.step()
        self.files.discard(file)
        self.step()

    def throttle(self, group: str, bound: str) -> None:
        self.step()
        self.bound = bound
        self.step()

    def start(self, name: str, command: tuple[str, ...]) -> None:
        self.step()
        if self.process is None:
            self.process = TargetProcess(8, 2, "boot")
        self.step()

    def rest(self, length_s: float) -> None:
        pass

    @property
    def is_whole(self) -> bool:
        return self.process is not None and self.bound == "before" and not (self.stopped or self.tables or self.files)


class Steps(UndoRecord):
    """Undo record whose changes are steps as well."""

    world: World

    def write(self, undo: module.Undo) -> None:
        self.world.step()
        super().write(undo)
        self.world.step()

    def remove(self) -> None:
        self.world.step()
        super().remove()
        self.world.step()


FAULTS: dict[str, Fault] = {
    "stop": Stop("/r1/wal"),
    "kill": Kill("/r1/wal", "r1"),
    "cut": Cut("table", "table"),
    "fill": Fill("/r1/fill", "/r1/wal", "r1"),
    "throttle": Throttle("/r1", "bound", "before"),
}


def perform(directory: Path, world: World, fault: Fault) -> None:
    """Run the process that causes a fault, up to its end or its death."""
    record = Steps(directory)
    record.world = world
    try:
        record.begin(of_target(3, "r1", fault, world), world)
        record.settle(world)
    finally:
        record.close()


@pytest.mark.parametrize("kind", FAULTS)
def test_a_crash_at_any_step_of_a_fault_leaves_an_undo_record(kind: str, tmp_path: Path) -> None:
    whole = World()
    perform(tmp_path / "whole", whole, FAULTS[kind])
    assert whole.is_whole and whole.steps >= 5, "the law is about several steps"
    for dies_at in range(1, whole.steps + 1):
        world, directory = World(), tmp_path / str(dies_at)
        world.dies_at = dies_at
        with pytest.raises(Died):
            perform(directory, world, FAULTS[kind])
        world.dies_at = NEVER
        record = UndoRecord(directory)
        record.settle(world)
        assert world.is_whole, f"died at step {dies_at}"
        assert record.read() is None and record.settle(world) is None
        record.close()


@given(st.sampled_from(sorted(FAULTS)), st.lists(st.integers(1, 12), max_size=4))
@settings(max_examples=60, deadline=None)
def test_undoing_a_fault_survives_repeated_crashes(kind: str, deaths: list[int]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        world = World()
        for number, dies_at in enumerate((*deaths, NEVER)):
            world.steps, world.dies_at = 0, dies_at
            record = Steps(Path(place))
            record.world = world
            try:
                if number == 0:
                    record.begin(of_target(3, "r1", FAULTS[kind], world), world)
                record.settle(world)
            except Died:
                pass
            finally:
                record.close()
        assert world.is_whole


def test_a_failed_fault_is_undone_at_once(tmp_path: Path) -> None:
    class Failing(World):
        def cut(self, rules: str) -> None:
            super().cut(rules)
            raise HelperRefused("nft rejected the rules", "see its output")

    world, record = Failing(), UndoRecord(tmp_path)
    with pytest.raises(HelperRefused, match="rejected the rules"):
        record.begin(of_target(3, "r1", FAULTS["cut"], world), world)
    assert world.is_whole and record.read() is None


def test_a_stopped_target_gets_no_fault_and_no_record(tmp_path: Path) -> None:
    world, record = World(), UndoRecord(tmp_path)
    world.process = None
    with pytest.raises(HelperRefused, match="r1 is not running"):
        record.begin(of_target(3, "r1", FAULTS["stop"], world), world)
    assert record.read() is None


def test_the_undo_record_is_exclusive_and_kept_if_unreadable(tmp_path: Path) -> None:
    record = UndoRecord(tmp_path)
    with pytest.raises(Busy):
        UndoRecord(tmp_path)
    (tmp_path / "undo.json").write_text('{"drill": "x"}')
    with pytest.raises(ValueError, match="undo the fault that it describes, and remove it"):
        record.settle(World())
    assert (tmp_path / "undo.json").exists()
    record.close()
    UndoRecord(tmp_path).close()


def test_the_undo_record_is_synced_before_its_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record, calls = UndoRecord(tmp_path), list[tuple[str, int]]()
    sync, rename = os.fsync, os.rename

    def synced(descriptor: int) -> None:
        calls.append(("sync", os.fstat(descriptor).st_ino))
        sync(descriptor)

    def renamed(*names: Any, **directories: Any) -> None:
        rename(*names, **directories)
        calls.append(("rename", (tmp_path / "undo.json").stat().st_ino))

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    record.write(Undo(3, "r1", FAULTS["stop"]))
    file = (tmp_path / "undo.json").stat().st_ino
    assert calls == [("sync", file), ("rename", file), ("sync", tmp_path.stat().st_ino)]


# ---- on the real machine


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    with holding(tmp_path / "wal") as process:
        yield tmp_path / "wal", process


def test_the_target_is_the_lock_holder_not_any_process_with_the_directory_open(
    held: tuple[Path, subprocess.Popen[str]],
) -> None:
    directory, process = held
    with open(directory / "other", "w") as other:
        import fcntl

        fcntl.flock(other, fcntl.LOCK_EX)
        found = ThisMachine().holder(str(directory))
    assert found is not None and (found.pid, found.start) == (process.pid, start_time(process.pid))
    process.kill()
    process.wait()
    assert ThisMachine().holder(str(directory)) is None


def test_a_reused_pid_is_not_signalled(
    held: tuple[Path, subprocess.Popen[str]],
) -> None:
    directory, process = held
    machine = ThisMachine()
    found = machine.holder(str(directory))
    assert found is not None
    for other in (
        TargetProcess(found.pid, found.start + 1, found.boot),
        TargetProcess(found.pid, found.start, "another boot"),
    ):
        assert not machine.signal(other, signal.SIGSTOP)
    undo = of_target(1, "r1", Stop(str(directory)), machine)
    do(undo, machine)
    while state_of(process.pid) != "T":
        pass
    undo_fault(undo, machine)
    undo_fault(undo, machine)
    while state_of(process.pid) == "T":
        pass


def test_a_fill_file_takes_the_free_space_and_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FILL_BYTES_MAX", 1024 * 1024 + 5 * 4096)
    machine, file = ThisMachine(), str(tmp_path / "fill")
    machine.fill(file)
    assert os.stat(file).st_size == module.FILL_BYTES_MAX
    machine.empty(file)
    machine.empty(file)
    assert os.listdir(tmp_path) == []


FORKS: Final = """
import fcntl, os, sys, threading
directory = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(directory, fcntl.LOCK_EX)
child = os.fork()
if child:
    print(child, flush=True)
threading.Event().wait()
"""


def test_a_child_with_an_inherited_lock_is_not_the_holder(tmp_path: Path) -> None:
    """The kernel also shows the parent's lock among the child's descriptors."""
    (tmp_path / "file").touch()
    command = [sys.executable, "-c", FORKS, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            of_directory, of_file = (os.stat(path) for path in (tmp_path, tmp_path / "file"))
            assert _locks(parent.pid, (of_directory.st_dev, of_directory.st_ino))
            assert not _locks(child, (of_directory.st_dev, of_directory.st_ino))
            assert not _locks(parent.pid, (of_file.st_dev, of_file.st_ino))
        finally:
            os.kill(child, signal.SIGKILL)
            parent.kill()
