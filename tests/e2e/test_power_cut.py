"""Power cuts of real filesystems under real processes, by scripts/powercut."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.scripts import ROOT, TIMEOUT_S, UNABLE, remove_kept, run_script
from tests.faults.powercut import may_end_so

CUTS = {"ext4": 3, "xfs": 2}
"""Number of power cuts in CI; longer runs use --count."""

ATTEMPTS = 10
"""Number of attempts: a replica may notice the lying disk before any client does."""

LOST = ("are lost", "; acknowledged: ", "exited 66", "is not linearizable")
"""Findings for a lying disk: an acknowledged write is lost, or a replica detects the damage."""

WHOLE = 6
"""Number of loop devices and replicas that show that the run is in progress."""


@pytest.mark.campaign(4)
@pytest.mark.parametrize("kind", CUTS)
def test_a_power_cut_of_all_replicas_loses_no_acknowledged_write(kind: str) -> None:
    done = run_script("powercut", "--count", str(CUTS[kind]), "--fs", kind)
    assert done.code == 0, done.said
    assert (done.summary["cuts"], done.summary["failed"], done.summary["fs"]) == (CUTS[kind], 0, kind)
    assert done.summary["objects_checked"] > 0
    assert done.summary["operations"] > CUTS[kind]


@pytest.mark.parametrize(
    ("code", "words", "may"),
    [
        (-signal.SIGKILL, "", True),
        (70, "forebay: this replica stops itself: StorageFailed: …", True),
        (66, "entry 200 / forebay: /r3 (Input/output error): directory unusable: …", True),
        (66, "forebay: /r3 (Input/output error): … / forebay: /r3/wal/data.mdb (a checksum): damaged: …", False),
        (0, "", False),
        (None, "", False),
    ],
)
def test_a_replica_without_its_disk_ends_with_a_storage_error(code: int | None, words: str, may: bool) -> None:
    """A replica that was only starting rejects its storage."""
    assert may_end_so(code, words) == may


@pytest.mark.campaign(4)
def test_the_power_cuts_expose_a_disk_that_does_not_sync() -> None:
    # This may take several cuts, because a cut may precede the first acknowledgement.
    done = run_script("powercut", "--count", "12", "--lying-disk", "all")
    assert done.code == 1, done.said
    assert done.summary["failed"] == 1
    assert "powercut: FAILED" in done.said
    assert any(words in done.said for words in LOST), done.said
    remove_kept("powercut", done.said)


@pytest.mark.campaign(4)
def test_the_histories_expose_a_disk_that_does_not_sync() -> None:
    said = ""
    for _ in range(ATTEMPTS):
        done = run_script("powercut", "--count", "12", "--lying-disk", "all", "--histories-only")
        assert done.code == 1, done.said
        remove_kept("powercut", done.said)
        said += done.said
        if "is not linearizable" in said:
            break
    assert "is not linearizable" in said, said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.usefixtures("interruptible")
def test_an_ended_run_leaves_no_loop_device_or_process(tmp_path: Path, number: signal.Signals) -> None:
    line = [str(ROOT / "scripts" / "powercut"), "--count", "50", "--images", str(tmp_path)]
    running = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        # Its mounts are in a private namespace, but its loop devices are visible everywhere.
        wait_until(lambda: running.poll() is not None or len(left_behind(tmp_path)) >= WHOLE)
    finally:
        running.send_signal(number)
        said, complaint = running.communicate(timeout=TIMEOUT_S)
    if running.returncode == UNABLE:
        pytest.skip(complaint.strip())
    assert said.startswith("powercut: 50 cuts on ext4"), complaint
    wait_until(lambda: left_behind(tmp_path) == [])
    if number != signal.SIGKILL:
        assert "interrupted" in complaint
        assert list(tmp_path.iterdir()) == []


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait until a condition holds; fail after a time limit."""
    until = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.02)


def left_behind(directory: Path) -> list[str]:
    """Return mounts, loop devices and processes that name the directory."""
    name = os.fsencode(directory)
    found = [f"mount {line!r}" for line in Path("/proc/mounts").read_bytes().splitlines() if name in line]
    for backing in Path("/sys/block").glob("loop*/loop/backing_file"):
        if name in backing.read_bytes():
            found.append(f"loop device {backing}")
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                line = (process / "cmdline").read_bytes()
            except OSError:
                continue
            if name in line and b"cluster.serve" in line:
                found.append(f"process {process.name}")
    return found
