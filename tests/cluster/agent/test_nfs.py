"""Staging on a real NFS: the kernel's server and client, version 4.2, on one machine.

The first test runs the others in a Linux of its own (`scripts/with-kernel tests/faults/uml/nfs`). There MOUNTED is the
mount of the client, and EXPORTED the same directory on the server.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from forebay.cluster.agent.adapters import Tools
from forebay.cluster.agent.files import FilesystemRefused, RemovalFailed, filesystems, remove_tree
from forebay.cluster.agent.filesystem_check import CheckTarget, ProbeStatus, check_filesystem, probes, runner
from forebay.cluster.agent.worker.worker import is_final
from forebay.cluster.system import SystemClock, closing, open_directory
from forebay.replica.model import NO_LAYOUT

TREE: Final = Path(__file__).parents[3]
KERNEL_S: Final = 1_800.0
"""Seconds for the tests in the other Linux, which is ten times slower than this one."""

CANNOT: Final = 77
"""Exit code of scripts/with-kernel and tests/faults/uml/nfs where they cannot run."""

here = pytest.mark.skipif("MOUNTED" not in os.environ, reason="run by scripts/with-kernel tests/faults/uml/nfs")
squashed = pytest.mark.skipif("SQUASHED" not in os.environ, reason="run with --squash")
unsquashed = pytest.mark.skipif("SQUASHED" in os.environ, reason="run without --squash")


@pytest.mark.campaign(7)
@pytest.mark.skipif("MOUNTED" in os.environ, reason="runs the others")
@pytest.mark.parametrize("option", [(), ("--squash",)], ids=["root", "squashed"])
def test_what_bites_on_nfs_is_found_and_survived(option: tuple[str, ...]) -> None:
    if os.geteuid():
        pytest.skip("scripts/with-kernel needs root")
    tests = (sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", str(Path(__file__)))
    environment = os.environ | ({"SQUASHED": "1"} if option else {})
    done = subprocess.run(
        ["scripts/with-kernel", "tests/faults/uml/nfs", *option, *tests],
        cwd=TREE, env=environment, capture_output=True, text=True, timeout=KERNEL_S,
    )  # fmt: skip
    if done.returncode == CANNOT:
        pytest.skip((done.stderr + done.stdout).strip())
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new directory on the client."""
    monkeypatch.setattr(probes, "PROBE_S", 120.0)
    monkeypatch.setattr(runner, "CHECK_S_MAX", 600.0)
    path = Path(os.environ["MOUNTED"]) / os.urandom(8).hex()
    path.mkdir()
    path.chmod(0o711)
    return path


def exported(path: Path) -> Path:
    """Return the path of a client's file on the server."""
    return Path(os.environ["EXPORTED"]) / path.relative_to(os.environ["MOUNTED"])


@here
@unsquashed
def test_movers_can_use_it_and_the_check_says_what_nfs_lacks(place: Path) -> None:
    report = check_filesystem(CheckTarget(str(place), "", "auto", NO_LAYOUT), Tools(), SystemClock())
    found = {one.name: (one.status, one.found) for one in report.checks if one.status is not ProbeStatus.OK}
    assert report.usable, found
    assert found.keys() == {"quota", "acl", "open removed file"}, found
    assert {status for status, _ in found.values()} == {ProbeStatus.MISSING}
    assert not os.listdir(place)


@here
@unsquashed
def test_a_buffer_with_an_open_file_is_removed_once_it_is_closed(place: Path) -> None:
    """NFS renames a removed file that is open to `.nfs…`, and its directory cannot be removed."""
    (place / "7" / "a").mkdir(parents=True)
    with closing(open_directory(place)) as parent:
        with (place / "7" / "a" / "file").open("w") as file:
            file.write("x")
            file.flush()
            with pytest.raises(RemovalFailed):
                remove_tree(parent, "7", shown="the buffer of job 7")
            assert any(path.name.startswith(".nfs") for path in (place / "7").rglob("*"))
        remove_tree(parent, "7", shown="the buffer of job 7")
    assert not os.listdir(place)


@here
@unsquashed
def test_a_directory_that_another_client_removed_is_stale_and_tried_again(place: Path) -> None:
    (place / "a").mkdir()
    with closing(open_directory(place / "a")) as directory:
        (exported(place) / "a").rmdir()
        with pytest.raises(OSError) as caught:
            os.mkdir("b", dir_fd=directory)
    assert caught.value.errno == errno.ESTALE
    # The stage is retried: the directory may exist again, under another handle.
    assert not is_final(caught.value)


@here
@unsquashed
def test_what_another_client_closed_is_complete_for_the_next_that_opens_it(place: Path) -> None:
    for number in range(50):
        data = b"%d" % number * 3000
        (exported(place) / "file").write_bytes(data)
        os.chmod(exported(place) / "file", 0o644)
        # A name that the client has cached is checked when it is opened (close-to-open).
        with (place / "file").open("rb") as file:
            assert file.read() == data


@here
@unsquashed
def test_a_claim_that_another_client_removed_admits_no_more_files(place: Path) -> None:
    """The fence of transfers, across clients: a late mover has its claim open, and the newer one removed it."""
    (place / "claim").mkdir()
    with closing(open_directory(place / "claim")) as claim:
        (exported(place) / "claim").rmdir()
        with pytest.raises(OSError) as caught:
            os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=claim))
    assert caught.value.errno in (errno.ENOENT, errno.ESTALE)
    assert not os.listdir(place)


@here
@unsquashed
def test_the_marker_of_a_filesystem_is_seen_by_other_clients(place: Path) -> None:
    identity = filesystems.mark(str(place))
    assert filesystems.identity_at(str(exported(place))) == identity


@here
@squashed
def test_a_server_that_squashes_root_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CHECK_S_MAX", 600.0)
    top, target = Path(os.environ["MOUNTED"]), Path(os.environ["EXPORTED"])
    # Root of the client is nobody on the server.
    with pytest.raises(OSError):
        (top / "bb").mkdir()
    target.chmod(0o777)
    (top / "bb").mkdir()
    assert (top / "bb").stat().st_uid == 65_534
    report = check_filesystem(CheckTarget(str(top / "bb"), "", "none", NO_LAYOUT), Tools(), SystemClock())
    ownership = next(one for one in report.checks if one.name == "ownership")
    assert ownership.status is ProbeStatus.FAILED and "squash" in ownership.found and not report.usable
    with pytest.raises(FilesystemRefused):
        filesystems.mark(str(top / "bb"))
