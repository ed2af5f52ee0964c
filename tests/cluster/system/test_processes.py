"""Process information from /proc."""

import subprocess
import sys
from pathlib import Path

import pytest

from forebay.cluster.system import cgroup_of, processes
from tests.repo.tree import ROOT


def mount(root: str = "/", directory: str = "/sys/fs/cgroup", kind: str = "cgroup2") -> str:
    """Return a line of /proc/self/mountinfo."""
    return f"30 1 0:26 {root} {directory} rw shared:4 - {kind} none rw\n"


def show(monkeypatch: pytest.MonkeyPatch, own: str, mounts: str) -> None:
    """Simulate process 7 in a cgroup, with these mounts."""
    texts = {"/proc/7/cgroup": own, "/proc/self/mountinfo": mounts}

    class Shown:
        def __init__(self, path: str) -> None:
            self._path = path

        def read_text(self) -> str:
            return texts[self._path]

    monkeypatch.setattr(processes, "Path", Shown)


@pytest.mark.parametrize(
    ("own", "mounts", "directory"),
    [
        ("0::/", mount(), "/sys/fs/cgroup"),
        ("0::/system.slice/a.service", mount(), "/sys/fs/cgroup/system.slice/a.service"),
        ("1:cpu:/old\n0::/a..b/c", mount(kind="tmpfs") + mount(), "/sys/fs/cgroup/a..b/c"),
        ("0::/pod/a", mount("/pod"), "/sys/fs/cgroup/a"),
        ("0::/pod", mount("/pod"), "/sys/fs/cgroup"),
        ("0::/pods/a", mount("/pod") + mount(directory="/two"), "/two/pods/a"),
        ("0::/a", mount(directory="/c\\040d"), "/c d/a"),
    ],
)
def test_cgroup_is_found_below_the_mount_that_contains_it(
    own: str, mounts: str, directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, own, mounts)
    assert cgroup_of(7) == directory


@pytest.mark.parametrize(
    ("own", "mounts", "why"),
    [
        ("", mount(), "does not use cgroup v2"),
        ("1:cpu:/a", mount(), "does not use cgroup v2"),
        ("0::/../other", mount(), "does not use cgroup v2"),
        ("0::/..", mount(), "does not use cgroup v2"),
        ("0::/a", mount(kind="tmpfs"), "is mounted"),
        ("0::/pods/a", mount("/pod"), "is mounted"),
    ],
)
def test_cgroup_outside_all_mounts_is_rejected_with_the_cause(
    own: str, mounts: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    show(monkeypatch, own, mounts)
    with pytest.raises(LookupError, match=why):
        cgroup_of(7)


def test_process_is_listed_in_its_cgroup() -> None:
    try:
        directory = Path(cgroup_of(1))
    except LookupError:
        pytest.skip("does not use cgroup v2")
    assert "1" in (directory / "cgroup.procs").read_text().split()


def test_termination_ignored_by_python_ends_the_loop() -> None:
    program = (
        "import asyncio, signal\n"
        "from forebay.cluster.system.eventloop import stop_on_signals\n"
        "from forebay.cluster.system.processes import leave_when_terminated\n"
        "class Collected:\n"
        "    def __del__(self):\n"
        "        signal.raise_signal(signal.SIGTERM)  # the exit is raised here, and ignored\n"
        "async def main():\n"
        "    stop = asyncio.Event()\n"
        "    stop_on_signals(stop)\n"
        "    await asyncio.wait_for(stop.wait(), 30)\n"
        "leave_when_terminated()\n"
        "Collected()\n"
        "asyncio.run(main())\n"
        "print('stopped')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr
    assert "Exception ignored" in done.stderr
