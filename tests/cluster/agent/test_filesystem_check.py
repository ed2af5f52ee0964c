"""The check of a filesystem, on every kind of filesystem that this machine can mount."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
import pytest

from forebay.cluster.agent.adapters import Tools, cephfs
from forebay.cluster.agent.files import FilesystemRefused, filesystems
from forebay.cluster.agent.filesystem_check import (
    CheckTarget,
    FilesystemReport,
    ProbeStatus,
    capacity_probes,
    check_filesystem,
    probes,
    runner,
)
from forebay.cluster.agent.filesystem_check.probe import FilesystemProbe, ProbeFailed
from forebay.cluster.system import SystemClock, start_time
from forebay.replica.model import NO_LAYOUT, QUOTA_AUTO, FilesystemLayout
from tests.cluster.agent.adapters.fakes import LFS, FakePrograms

MIB: Final = 1024**2
IMAGE_BYTES: Final = 512 * MIB

KINDS: Final = {
    "ext4": (("mkfs.ext4", "-q"), ("-t", "ext4", "-o", "loop")),
    "ext4-prjquota": (
        ("mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"),
        ("-t", "ext4", "-o", "loop,prjquota"),
    ),
    "xfs": (("mkfs.xfs", "-q"), ("-t", "xfs", "-o", "loop")),
    "xfs-prjquota": (("mkfs.xfs", "-q"), ("-t", "xfs", "-o", "loop,prjquota")),
    "btrfs": (("mkfs.btrfs", "-q"), ("-t", "btrfs", "-o", "loop")),
    "btrfs-quota": (("mkfs.btrfs", "-q"), ("-t", "btrfs", "-o", "loop")),
    "tmpfs": ((), ("-t", "tmpfs", "-o", "mode=0700")),
}

LIMITED: Final = ("ext4-prjquota", "xfs-prjquota", "btrfs-quota")


@contextlib.contextmanager
def mounted(directory: Path, kind: str) -> Iterator[Path]:
    """Mount a new filesystem."""
    make, options = KINDS[kind]
    image, place = directory / "image", directory / "fs"
    place.mkdir()
    source = "none"
    if make:
        if shutil.which(make[0]) is None:
            pytest.skip(f"there is no {make[0]} here")
        with image.open("wb") as file:
            file.truncate(IMAGE_BYTES)
        made = subprocess.run([*make, str(image)], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"no {kind} can be made: {made.stderr.strip()}")
        source = str(image)
    done = subprocess.run(["mount", *options, source, str(place)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no {kind} can be mounted here: {done.stderr.strip()}")
    try:
        if kind == "btrfs-quota":
            enabled = subprocess.run(["btrfs", "quota", "enable", str(place)], capture_output=True, text=True)
            if enabled.returncode:
                pytest.skip(f"this btrfs keeps no quotas: {enabled.stderr.strip()}")
        place.chmod(0o711)
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def look(path: Path, quota: str = QUOTA_AUTO, tools: Tools | None = None, **changes: object) -> FilesystemReport:
    target = CheckTarget(str(path), "", quota, NO_LAYOUT)._replace(**changes)  # type: ignore[arg-type]
    report = check_filesystem(target, tools or Tools(), SystemClock())
    assert not [name for name in os.listdir(path) if name.startswith(".forebay-check")]
    return report


def status_of(report: FilesystemReport, name: str) -> ProbeStatus:
    return next(one.status for one in report.checks if one.name == name)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give probes time on a busy machine."""
    monkeypatch.setattr(probes, "PROBE_S", 120.0)
    monkeypatch.setattr(runner, "CHECK_S_MAX", 600.0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_that_movers_need_works_on_a_local_filesystem(tmp_path: Path, kind: str) -> None:
    with mounted(tmp_path, kind) as place:
        report = look(place)
        wrong = [one for one in report.checks if one.status is not ProbeStatus.OK and one.name != "quota"]
        # tmpfs has attributes and access lists only if the kernel was built with them.
        assert {one.name for one in wrong} <= ({"acl", "xattr", "O_DIRECT"} if kind == "tmpfs" else set()), wrong
        assert report.usable
        assert status_of(report, "quota") is (ProbeStatus.OK if kind in LIMITED else ProbeStatus.MISSING)


@pytest.mark.parametrize("kind", ["btrfs-quota", "xfs-prjquota", "ext4-prjquota"])
def test_limits_of_a_check_are_removed(tmp_path: Path, kind: str) -> None:
    with mounted(tmp_path, kind) as place:
        quota = "btrfs" if kind == "btrfs-quota" else "project"
        assert look(place, quota).usable
        if quota == "btrfs":
            shown = subprocess.run(
                ["btrfs", "qgroup", "show", str(place)], check=True, capture_output=True, text=True
            ).stdout.splitlines()
            assert len([line for line in shown if line.startswith("0/")]) == 1
        other = "project" if quota == "btrfs" else "btrfs"
        report = look(place, other)
        # A configured adapter that the filesystem has not is a failure, not a missing feature.
        assert not report.usable and status_of(report, "quota") is ProbeStatus.FAILED


def test_a_quota_that_is_set_and_not_enforced_is_found(tmp_path: Path, programs: FakePrograms) -> None:
    """The fake lfs accepts each limit, as a Lustre does whose servers do not enforce them."""
    programs.write("lfs", LFS)
    report = look(tmp_path, "lustre", programs.tools())
    quota = next(one for one in report.checks if one.name == "quota")
    assert quota.status is ProbeStatus.FAILED and quota.needed and not report.usable
    assert "not enforced" in quota.found and quota.consequence
    assert programs.calls()[-1].split()[:3] == ["lfs", "setquota", "-p"] and "-B 0" in programs.calls()[-1]


def test_a_layout_is_tried_with_its_stripes(tmp_path: Path, programs: FakePrograms) -> None:
    programs.write("lfs", LFS)
    report = look(tmp_path, tools=programs.tools(), layout=FilesystemLayout("lustre", 4, MIB))
    assert status_of(report, "layout") is ProbeStatus.OK
    assert any(call.startswith("lfs setstripe -c 4 -S 1048576") for call in programs.calls())
    broken = look(tmp_path, layout=FilesystemLayout("cephfs", 4), tools=programs.tools())
    assert status_of(broken, "layout") is ProbeStatus.FAILED and not broken.usable


def run_probe(directory: Path, name: str) -> ProbeStatus:
    """Run one probe as the check does."""
    chosen = next(probe for probe in probes.basic_probes() if probe.name == name)
    with_directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return runner._try(chosen, with_directory)[0]
    finally:
        os.close(with_directory)


def _error(number: int) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


FAULTS: Final[dict[str, tuple[str, str, Callable[..., object], ProbeStatus]]] = {
    "flock": ("fcntl", "flock", _error(errno.ENOSYS), ProbeStatus.MISSING),
    "flock-held-twice": ("fcntl", "flock", lambda *_: None, ProbeStatus.FAILED),
    "fcntl lock": ("fcntl", "lockf", _error(errno.ENOLCK), ProbeStatus.MISSING),
    "hard links": ("os", "link", _error(errno.EPERM), ProbeStatus.FAILED),
    "acl": ("os", "setxattr", _error(errno.EOPNOTSUPP), ProbeStatus.MISSING),
    "xattr": ("os", "setxattr", _error(errno.EOPNOTSUPP), ProbeStatus.MISSING),
    "fsync": ("os", "fsync", _error(errno.EIO), ProbeStatus.FAILED),
    "fallocate": ("os", "posix_fallocate", _error(errno.EOPNOTSUPP), ProbeStatus.MISSING),
    "large offset": ("os", "pwrite", _error(errno.EFBIG), ProbeStatus.MISSING),
    "ownership": ("os", "chown", _error(errno.EPERM), ProbeStatus.FAILED),
    "permissions": ("os", "fchmod", lambda *_: None, ProbeStatus.FAILED),
    "timestamps": ("os", "utime", lambda *_, **__: None, ProbeStatus.FAILED),
    "symbolic links": ("os", "symlink", _error(errno.EPERM), ProbeStatus.FAILED),
}
"""Functions of a filesystem that are missing or broken, as on NFS with root squash, or Lustre without `-o flock`."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_function_that_is_missing_or_broken_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    module, function, instead, status = FAULTS[fault]
    name = fault.removesuffix("-held-twice")
    if name == "ownership" and os.geteuid():
        pytest.skip("only root gives files away")
    monkeypatch.setattr(getattr(probes, module), function, instead)
    assert run_probe(tmp_path, name) is status


def test_a_rename_that_is_not_atomic_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.rename

    def remove_first(source: str, target: str, *, src_dir_fd: int, dst_dir_fd: int) -> None:
        os.unlink(target, dir_fd=dst_dir_fd)
        really(source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)

    monkeypatch.setattr(probes.os, "rename", remove_first)
    monkeypatch.setattr(probes, "RENAMES", 20_000)
    monkeypatch.setattr(probes, "RENAME_S", 60.0)
    assert run_probe(tmp_path, "rename") is ProbeStatus.FAILED


def test_names_without_case_and_open_files_that_stay_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    really = os.open
    monkeypatch.setattr(probes.os, "open", lambda name, *more, **where: really(_lower(name), *more, **where))
    assert run_probe(tmp_path, "case") is ProbeStatus.FAILED
    monkeypatch.undo()

    def silly(name: str, *, dir_fd: int) -> None:
        os.rename(name, ".nfs000000000000001", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)

    monkeypatch.setattr(probes.os, "unlink", silly)
    assert run_probe(tmp_path, "open removed file") is ProbeStatus.MISSING


def _lower(name: object) -> object:
    return name.lower() if isinstance(name, str) else name


def test_a_probe_that_hangs_ends_with_its_processes_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(_: int) -> None:
        os.fork()
        while True:
            signal.pause()

    def refuse(_: int) -> None:
        raise ProbeFailed("no")

    def crash(_: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def chosen(*_: object) -> Iterator[FilesystemProbe]:
        yield FilesystemProbe("hang", hang, True, "it hangs", 1.0)
        yield FilesystemProbe("crash", crash, True, "it crashes", 60.0)
        yield FilesystemProbe("refuse", refuse, False, "it is refused", 60.0)
        yield FilesystemProbe("work", lambda _: None, True, "", 60.0)

    monkeypatch.setattr(runner, "_probes", chosen)
    report = look(tmp_path)
    assert [one.status for one in report.checks] == ["failed", "failed", "failed", "ok"]
    assert "did not end" in report.checks[0].found and "signal 9" in report.checks[1].found
    assert not report.usable


def test_another_filesystem_than_the_clusters_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o711)
    identity = filesystems.mark(str(tmp_path))
    assert look(tmp_path, identity=identity).usable
    with pytest.raises(FilesystemRefused):
        look(tmp_path, identity="0" * 32)


KILLED: Final = """
import os, signal, sys
from forebay.cluster.agent.adapters import Tools
from forebay.cluster.agent.filesystem_check import CheckTarget, check_filesystem, runner
from forebay.cluster.agent.filesystem_check.probe import FilesystemProbe
from forebay.cluster.system import SystemClock
from forebay.replica.model import NO_LAYOUT
from msgspec.json import decode
really = runner._probes
def probes(target, tools):
    found = list(really(target, tools))
    if sys.argv[3] == "quota":
        # Killed while the buffer exists.
        from forebay.cluster.agent.filesystem_check import capacity_probes
        capacity_probes._write = lambda buffer: os.kill(int(os.environ["CHECK"]), signal.SIGKILL)
    else:
        def kill(directory):
            os.makedirs(f"/proc/self/fd/{directory}/a/b")
            os.kill(int(os.environ["CHECK"]), signal.SIGKILL)
        found = [FilesystemProbe("kill", kill, True, "", 60.0)]
    return found
runner._probes = probes
os.environ["CHECK"] = str(os.getpid())
check_filesystem(CheckTarget(sys.argv[1], "", sys.argv[2], NO_LAYOUT), decode(sys.argv[4], type=Tools), SystemClock())
"""


@pytest.mark.parametrize("at", ["quota", "probe"])
def test_the_next_check_removes_what_a_killed_one_left(tmp_path: Path, programs: FakePrograms, at: str) -> None:
    programs.write("lfs", LFS)
    tools, place = programs.tools(), tmp_path / "fs"
    place.mkdir()
    words = (sys.executable, "-c", KILLED, str(place), "lustre", at, msgspec.json.encode(tools).decode())
    done = subprocess.run(words, timeout=120)
    assert done.returncode == -signal.SIGKILL
    (left,) = os.listdir(place)
    before = len(programs.calls())
    look(place, "none", tools)
    assert not os.listdir(place)
    if at == "quota":
        subprocess.run(words, timeout=120)
        before = len(programs.calls())
        look(place, "lustre", tools)
        # The first calls find the limit that was left, and remove it.
        assert any("-B 0 -i 0 -I 0" in call for call in programs.calls()[before : before + 3])


def test_the_directory_of_a_running_check_or_of_another_machine_is_kept(tmp_path: Path) -> None:
    running = tmp_path / f".forebay-check.{runner._machine()}.{os.getppid()}.{start_time(os.getppid())}"
    other = tmp_path / ".forebay-check.0123456789ab.1.1"
    old = tmp_path / ".forebay-check.0123456789ab.2.2"
    for path in (running, other, old):
        path.mkdir()
    os.utime(old, (1_000_000_000, 1_000_000_000))
    check_filesystem(CheckTarget(str(tmp_path), "", "none", NO_LAYOUT), Tools(), SystemClock())
    assert sorted(os.listdir(tmp_path)) == sorted((running.name, other.name))


def test_a_quota_of_cephfs_that_is_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client of CephFS is stopped some seconds after the limit."""
    values: dict[str, bytes] = {cephfs.USED_BYTES: b"0", cephfs.USED_ENTRIES: b"1"}
    monkeypatch.setattr(cephfs.os, "getxattr", lambda _, name: values[name])
    monkeypatch.setattr(cephfs.os, "setxattr", lambda _, name, value: values.update({name: value}))
    monkeypatch.setattr(capacity_probes, "EXCESS_BYTES", 16 * MIB)
    really, end_s = os.pwrite, SystemClock().monotonic_s() + 2

    def late(file: int, data: bytes, offset: int) -> int:
        if SystemClock().monotonic_s() > end_s:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        return really(file, data, offset)

    monkeypatch.setattr(capacity_probes.os, "pwrite", late)
    monkeypatch.setattr(runner, "basic_probes", lambda: iter(()))
    report = look(tmp_path, "cephfs")
    assert report.usable and report.checks[0].status is ProbeStatus.OK


def test_locks_of_the_check_are_those_of_the_kernel(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        directory = os.open(tmp_path, os.O_RDONLY)
        assert not probes._other_process_locks(directory, fcntl.flock)
        os.close(directory)
