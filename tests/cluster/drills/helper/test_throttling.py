"""A disk slowed down for one replica only: the limited cgroup and device, and rejections."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from forebay.cluster.config import DrillConfig
from forebay.cluster.drills.helper import HelperRefused
from forebay.cluster.drills.helper import throttling as module
from forebay.cluster.drills.helper.allowed import fault_of
from forebay.cluster.drills.helper.faults import IO_MAX, TargetProcess, ThisMachine, Throttle, of_target
from forebay.cluster.drills.helper.record import UndoRecord
from forebay.cluster.drills.helper.throttling import NONE, WRITES_PER_S, throttle_of
from tests.cluster.drills.helper.held import holding
from tests.cluster.drills.helper.test_allowed import three as three

ME = TargetProcess(os.getpid(), 0, "")
PLACES = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
UNIFIED = next((place for place in PLACES if (place / "cgroup.controllers").exists()), None)


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cgroup with only this process, on a simulated machine with the disk 8:0."""
    place = tmp_path / "group"
    place.mkdir()
    (place / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (place / IO_MAX).write_text("")
    monkeypatch.setattr(module, "cgroup_of", lambda pid: str(place))
    monkeypatch.setattr(module, "disk_of", lambda directory: "8:0")
    return place


def test_a_write_limit_on_the_disk_is_set_and_restored(group: Path, tmp_path: Path) -> None:
    bound = f"8:0 wiops={WRITES_PER_S}"
    assert throttle_of(ME, tmp_path) == Throttle(str(group), bound, f"8:0 {NONE}")
    (group / IO_MAX).write_text("8:16 rbps=1 wbps=max riops=max wiops=max\n8:0 rbps=max wbps=7 riops=max wiops=max\n")
    fault = throttle_of(ME, tmp_path)
    assert fault == Throttle(str(group), bound, "8:0 rbps=max wbps=7 riops=max wiops=max")
    record, machine = UndoRecord(tmp_path / "record"), ThisMachine()
    (group / IO_MAX).write_text("")
    record.begin(of_target(3, "r1", fault, machine), machine)
    assert (group / IO_MAX).read_text() == bound
    record.settle(machine)
    assert (group / IO_MAX).read_text() == fault.before and record.settle(machine) is None
    record.close()


def test_a_deleted_cgroup_needs_no_restored_limit(tmp_path: Path) -> None:
    ThisMachine().throttle(str(tmp_path / "gone"), "8:0 wiops=1")
    assert not (tmp_path / "gone").exists()


REFUSALS: dict[str, tuple[Callable[[Path], object], str]] = {
    "somebody else": (
        lambda group: (group / "cgroup.procs").write_text(f"{os.getpid()}\n1\n"),
        "process 1 is in the same cgroup, .*; start each replica as a service of its own",
    ),
    "no such file": (
        lambda group: (group / "cgroup.procs").unlink(),
        "the processes of the cgroup .* cannot be listed: .*; start each replica as a service of its own",
    ),
    "no controller": (
        lambda group: (group / IO_MAX).unlink(),
        "disk limits are not enabled for the cgroup .*; write IOAccounting=yes into the unit",
    ),
}


@pytest.mark.parametrize("why", REFUSALS)
def test_a_disk_that_cannot_be_slowed_for_one_replica_is_rejected(why: str, group: Path, tmp_path: Path) -> None:
    spoil, sentence = REFUSALS[why]
    spoil(group)
    with pytest.raises(HelperRefused, match=sentence):
        throttle_of(ME, tmp_path)


def test_a_process_without_a_cgroup_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(pid: int) -> str:
        raise LookupError("this machine does not use cgroup v2")

    monkeypatch.setattr(module, "cgroup_of", none)
    with pytest.raises(HelperRefused, match="does not use cgroup v2; start each replica"):
        throttle_of(ME, tmp_path)


def test_child_processes_of_a_replica_count_as_its_own(group: Path, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (group / "cgroup.procs").write_text(f"{os.getpid()}\n{child.pid}\n")
        assert throttle_of(ME, tmp_path).group == str(group)
    finally:
        child.communicate()


def test_the_limited_device_is_the_whole_disk(tmp_path: Path) -> None:
    # In a container or in User Mode Linux, one of the two directories may be on no disk.
    numbers = {place: os.stat(place).st_dev for place in (Path("/"), tmp_path)}
    on_disks = [
        place for place, one in numbers.items() if Path(f"/sys/dev/block/{os.major(one)}:{os.minor(one)}").exists()
    ]
    if not on_disks:
        pytest.skip("neither / nor the directory for temporary files is on a disk")
    whole = module.disk_of(on_disks[0])
    assert (Path("/sys/dev/block") / whole).exists() and not (Path("/sys/dev/block") / whole / "partition").exists()
    with pytest.raises(HelperRefused, match="/proc is not on a disk that can be slowed down"):
        module.disk_of(Path("/proc"))


def test_a_stopped_target_is_rejected_before_any_change(
    three: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(three, storage=replace(three.storage, directory=tmp_path), drill=DrillConfig(allow=("disk",)))
    with pytest.raises(HelperRefused, match="r1 is not running"):
        fault_of(config, config.helpers[0], "slow-disk", "r1", 7)
    monkeypatch.setattr(
        "forebay.cluster.drills.helper.allowed.throttle_of", lambda process, home: Throttle(str(home), "b", "a")
    )
    with holding(tmp_path / "r1" / "wal"):
        found = fault_of(config, config.helpers[0], "slow-disk", "r1", 7)
    assert found == Throttle(str(tmp_path / "r1" / "wal"), "b", "a")


@pytest.fixture
def own_group() -> Iterator[Path]:
    """Yield a new cgroup with disk limits."""
    if UNIFIED is None or "io" not in (UNIFIED / "cgroup.controllers").read_text().split() or os.geteuid() != 0:
        pytest.skip("needs root and the controller io of cgroup v2")
    (UNIFIED / "cgroup.subtree_control").write_text("+io")
    place = Path(tempfile.mkdtemp(prefix="forebay-test-", dir=UNIFIED))
    yield place
    place.rmdir()


WRITER = """
import os, sys
with open(sys.argv[1], "wb") as file:
    print("ready", flush=True)
    for line in sys.stdin:
        file.write(b"x" * 4096)
        file.flush()
        os.fdatasync(file.fileno())
        print("written", flush=True)
"""


def test_writes_to_a_throttled_disk_are_slow_until_undone(own_group: Path, tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path / "file")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None and writer.stdout is not None
    assert writer.stdout.readline() == "ready\n"

    def takes_s(writes: int) -> float:
        began_s = time.monotonic()
        for _ in range(writes):
            print(file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "written\n"
        return time.monotonic() - began_s

    try:
        (own_group / "cgroup.procs").write_text(str(writer.pid))
        machine = ThisMachine()
        fault = throttle_of(TargetProcess(writer.pid, 0, ""), tmp_path)
        machine.throttle(fault.group, fault.bound)
        assert takes_s(20) > 10 / WRITES_PER_S
        machine.throttle(fault.group, fault.before)
        assert throttle_of(TargetProcess(writer.pid, 0, ""), tmp_path) == fault, "nothing of it is left"
    finally:
        writer.communicate()
