"""Full, read-only, dead or missing disks, and missing or changing sources.

A transfer fails with a clear error, keeps the buffer, and succeeds later.
"""

import asyncio
import contextlib
import ctypes
import os
import pwd
import random
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.agent.processes.environment import Mode
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from tests.faults.disks import PACKAGES, Disk
from tests.faults.kernel import Unable, require_tools, tool
from tests.faults.transfers.harness import Broken, Harness, Inconclusive, Story, judge, poll, said
from tests.faults.transfers.kills import plant
from tests.faults.transfers.refusals import check_words

USER = "nobody"

CANCEL_S = 1.0
"""Seconds in which a cancelled transfer has to be over, whatever it hangs in."""

CANCEL_SLACK_S = 0.5
"""What a busy machine may add to it, seconds."""

ANSWER_S = 20.0
"""Seconds that something may take which nothing hinders: a bound against hanging, not a measure of speed."""

CHANGES = 200
"""Transfers at most of a source that changes, count."""

VERSION_BYTES, BLOCK_BYTES = 8 << 20, 1 << 16
"""Size of the file that changes, and how much of it is written at once in place, bytes."""


class LeftOut(Exception):
    """A case that this kernel cannot do."""


class Size(NamedTuple):
    """How much is done."""

    kinds: tuple[str, ...]
    rounds: int
    """Of those cases in which something races."""
    every: int = 1
    """Of CASES, every so manyth."""


SMALL = Size(kinds=("ext4",), rounds=1)
TINY = Size(kinds=("ext4",), rounds=1, every=5)
FULL = Size(kinds=("ext4", "xfs"), rounds=20)


class Bench:
    """A buffer that is to be staged out to a small disk."""

    def __init__(self, directory: Path, disk: Disk | None, *, reference: bool, accounts: Mode = "own") -> None:
        self.disk = disk
        self.harness = Harness(
            directory,
            reference=reference,
            accounts=accounts,
            user=USER if accounts == "switch" else "root",
            destination=None if disk is None else disk.mount_point / "out",
        )
        self.harness.destination.mkdir(exist_ok=True)
        source, destination = self.harness.places("stage_out")
        plant(source, 1)
        # A small disk is full soon.
        (source / "large").write_bytes((source / "large").read_bytes()[: 3 << 20])
        (destination / "below").mkdir()
        (destination / "large").write_bytes(b"older")
        self.own(self.harness.buffer.parent, destination)
        self.story = Story("stage_out", poll(source), poll(destination))

    def own(self, *paths: Path) -> None:
        """Give files to the user that the worker becomes."""
        if self.harness.accounts != "switch":
            return
        user = pwd.getpwnam(USER)
        for path in paths:
            for below in (path, *path.rglob("*")):
                os.chown(below, user.pw_uid, user.pw_gid)

    def fails(self, words: tuple[str, ...], *, final: bool | None = None) -> None:
        """Stage out, which must fail and say one of the words, and leave the buffer and what is outside whole."""
        outcome = self.harness.operate("stage_out")
        judge(self.story, *self.harness.places("stage_out"), complete=False)
        if not isinstance(outcome, OperationFailed):
            raise Broken(f"it {said(outcome)}")
        check_words(outcome)
        if not any(word in outcome.message for word in words):
            raise Broken(f"it does not say {words[0]!r}: {outcome.message}")
        if final is not None and outcome.final != final:
            raise Broken(f"it is {'' if outcome.final else 'not '}final: {outcome.message}")

    def ends_right(self) -> None:
        """Stage out, which must succeed now."""
        outcome = self.harness.operate("stage_out")
        if not isinstance(outcome, OperationDone):
            raise Broken(f"the attempt after it {said(outcome)}")
        judge(self.story, *self.harness.places("stage_out"), complete=True)

    def close(self) -> None:
        """Give everything back."""
        self.harness.close()
        if self.disk is not None:
            self.disk.discard()


@contextlib.contextmanager
def bench(
    directory: Path,
    kind: str,
    *,
    reference: bool,
    make: tuple[str, ...] = (),
    options: str = "",
    accounts: Mode = "own",
) -> Iterator[Bench]:
    """Give a bench whose destination is a disk of its own, made and mounted with more options."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    disk = Disk(directory / "disk.img", directory / "disk", kind)
    disk.format()
    if make:
        tool("mkfs.ext4", "-q", "-F", *make, str(disk.image))
    disk.mount()
    if options:
        tool("mount", "-o", f"remount,{options}", str(disk.mount_point))
    made = Bench(directory, disk, reference=reference, accounts=accounts)
    try:
        yield made
    finally:
        made.close()


def no_space(directory: Path, kind: str, *, reference: bool) -> None:
    """Not a block is left; then some are, which is not enough; then there is room."""
    with bench(directory, kind, reference=reference) as on:
        assert on.disk is not None
        ballast = on.disk.fill()
        on.fails(("No space left",), final=False)
        os.truncate(ballast, ballast.stat().st_size - (1 << 20))
        on.fails(("No space left",), final=False)
        ballast.unlink()
        on.ends_right()


def no_inodes(directory: Path, kind: str, *, reference: bool) -> None:
    """There is room, but no inode for another file."""
    if kind != "ext4":
        return
    with bench(directory, kind, reference=reference, make=("-N", "128")) as on:
        assert on.disk is not None
        made = []
        with contextlib.suppress(OSError):
            for number in range(1000):
                made.append(on.disk.mount_point / f"taken-{number}")
                made[-1].touch()
        on.fails(("No space left",), final=False)
        for path in made:
            path.unlink(missing_ok=True)
        on.ends_right()


def over_quota(directory: Path, kind: str, *, reference: bool) -> None:
    """The user may not have so much, or the directory, where the kernel has quotas for those only."""
    if kind != "ext4" or reference:
        return
    with contextlib.ExitStack() as stack:
        try:
            on = stack.enter_context(
                bench(directory, kind, reference=reference, make=("-O", "quota"), options="usrquota", accounts="switch")
            )
            assert on.disk is not None
            set_quota(on.disk, 512)
        except OSError:
            stack.close()
            over_directory_quota(directory)
            return
        on.fails(("quota",), final=False)
        set_quota(on.disk, 0)
        on.ends_right()


def over_directory_quota(directory: Path) -> None:
    """Not so much may be in the directory: a subvolume of btrfs."""
    try:
        require_tools(PACKAGES["btrfs"])
    except Unable as unable:
        raise LeftOut(f"the kernel has no quotas of users, and {unable}") from unable
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    disk = Disk(directory / "disk.img", directory / "disk", "btrfs")
    disk.format()
    disk.mount()
    with contextlib.ExitStack() as stack:
        stack.callback(disk.discard)
        out = disk.mount_point / "out"
        tool("btrfs", "quota", "enable", str(disk.mount_point))
        tool("btrfs", "subvolume", "create", str(out))
        tool("btrfs", "qgroup", "limit", "512K", str(out))
        on = Bench(directory, disk, reference=False)
        stack.callback(on.close)
        on.fails(("quota",), final=False)
        tool("btrfs", "qgroup", "limit", "none", str(out))
        on.ends_right()


def read_only(directory: Path, kind: str, *, reference: bool) -> None:
    """Nothing can be written, and no repetition changes that."""
    with bench(directory, kind, reference=reference) as on:
        assert on.disk is not None
        tool("mount", "-o", "remount,ro", str(on.disk.mount_point))
        on.fails(("Read-only file system",), final=True)
        tool("mount", "-o", "remount,rw", str(on.disk.mount_point))
        on.ends_right()


def goes_away(directory: Path, kind: str, *, reference: bool) -> None:
    """The disk fails while it is written to: every call is an input/output error from then on."""
    with bench(directory, kind, reference=reference) as on:
        assert on.disk is not None
        disk, harness = on.disk, on.harness
        tool("sync", "--file-system", str(disk.mount_point))
        (harness.places("stage_out")[0] / "longer").write_bytes(random.Random(3).randbytes(24 << 20))
        on.own(harness.buffer.parent)
        on.story = on.story._replace(source=poll(harness.places("stage_out")[0]))
        large = threading.Event()

        def cut() -> None:
            until = time.monotonic() + ANSWER_S
            while time.monotonic() < until and not large.is_set():
                if used_bytes(disk.mount_point) > 6 << 20:
                    break
                time.sleep(0.001)
            disk.cut()

        cutting = threading.Thread(target=cut)
        cutting.start()
        outcome = harness.operate("stage_out")
        large.set()
        cutting.join()
        if not reference:
            if isinstance(outcome, OperationDone):
                raise Inconclusive("the disk went away too late")
            check_words(outcome)
        disk.unmount()
        disk.mount()
        judge(on.story, *harness.places("stage_out"), complete=isinstance(outcome, OperationDone))
        on.ends_right()


def dead_mount(directory: Path, kind: str, *, reference: bool) -> None:
    """Every call hangs, and not even SIGKILL ends it: cancelling is answered all the same, and others go on."""
    if reference:
        return
    with bench(directory, kind, reference=reference) as on:
        asyncio.run(_dead_mount(on))
        on.ends_right()


async def _dead_mount(on: Bench) -> None:
    assert on.disk is not None
    other = Harness(on.harness.directory / "other")
    plant(other.source, 4)
    tool("fsfreeze", "--freeze", str(on.disk.mount_point))
    try:
        began = time.monotonic()
        hanging = asyncio.ensure_future(on.harness.run_transfer(on.harness.order("stage_out"), end_after_s=1.0))
        await asyncio.sleep(0.2)
        outcome = await asyncio.wait_for(other.run_transfer(other.order("stage_in")), ANSWER_S)
        if not isinstance(outcome, OperationDone):
            raise Broken(f"another transfer of the agent {said(outcome)} while one hangs")
        done, _ = await asyncio.wait({hanging}, timeout=max(0.0, began + 1.0 - time.monotonic()) + ANSWER_S)
        took = time.monotonic() - began - 1.0
        if not done:
            raise Broken(f"cancelled, a transfer that hangs is not over after {took:.1f} s")
        if took > CANCEL_S + CANCEL_SLACK_S:
            raise Broken(f"cancelled, a transfer that hangs was over after {took:.1f} s only")
    finally:
        tool("fsfreeze", "--unfreeze", str(on.disk.mount_point))
        other.close()


def own_disk_full(directory: Path, kind: str, *, reference: bool) -> None:
    """The agent's own disk is full, so that it can keep no records: it stages out all the same, is cancelled, and tears
    down, and leaves nothing."""
    if reference:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    disk = Disk(directory / "disk.img", directory / "disk", kind)
    disk.format()
    disk.mount()
    out = directory / "out"
    out.mkdir()
    harness = Harness(disk.mount_point / "harness", destination=out)
    try:
        source, destination = harness.places("stage_out")
        plant(source, 6)
        story = Story("stage_out", poll(source), {})
        ballast = disk.fill()
        for after_s in (0.1, 0.3, 0.5):
            asyncio.run(harness.run_transfer(harness.order("stage_out"), end_after_s=after_s))
            judge(story, source, destination, complete=False)
        outcome = harness.operate("stage_out")
        if not isinstance(outcome, OperationDone):
            raise Broken(f"on a full disk it {said(outcome)}")
        # Nothing was recorded, so what an earlier attempt made, or finished, it takes for others' directories.
        judge(story, source, destination, complete=True, alone=False)
        outcome = harness.operate("teardown", [])
        if not isinstance(outcome, OperationDone) or harness.buffer.exists():
            raise Broken(f"on a full disk the teardown {said(outcome)}")
        if left := [str(path) for path in out.rglob(".forebay-*")]:
            raise Broken(f"it left {left[:3]}")
        ballast.unlink()
    finally:
        harness.close()
        disk.discard()


def unreadable(directory: Path, kind: str, *, reference: bool) -> None:
    """A file, or a directory, of the source that the job's user may not read."""
    if reference:
        return
    with bench(directory, kind, reference=reference, accounts="switch") as on:
        source, _ = on.harness.places("stage_out")
        for name in ("below/a", "below"):
            os.chown(source / name, 0, 0)
            mode = (source / name).stat().st_mode
            (source / name).chmod(0)
            on.story = on.story._replace(source=poll(source))
            on.fails(("Permission denied",), final=True)
            (source / name).chmod(mode & 0o7777)
            on.own(source)
        for name in ("below/a",):
            # Changing the owner has taken the set-id bit.
            (source / name).chmod(0o751)
        on.story = on.story._replace(source=poll(source))
        on.ends_right()


def missing(directory: Path, kind: str, *, reference: bool) -> None:
    """The source is not there, or is no directory, or is a link, a pipe, a device."""
    if reference:
        return
    with bench(directory, kind, reference=reference) as on:
        harness = on.harness
        data = harness.places("stage_out")[0]
        os.mkfifo(data.parent / "pipe")
        os.mknod(data.parent / "device", 0o600 | 0o020000, os.makedev(1, 3))
        (data.parent / "link").symlink_to("/etc")
        (data.parent / "plain").write_bytes(b"x")
        for name, word in (
            ("nothing", "does not exist"), ("pipe", "named pipe"), ("device", "character device"),
            ("link", "symbolic link"), ("plain", "directory"),
        ):  # fmt: skip
            for transfer_kind in TransferKind:
                if name == "plain" and transfer_kind is TransferKind.FILE:
                    continue
                transfer = Transfer(transfer_kind, f"{harness.destination}/{name}", f"$DW_JOB_STRIPED/{name}")
                outcome = harness.operate("stage_out", [transfer])
                if not isinstance(outcome, OperationFailed) or not outcome.final:
                    raise Broken(f"{name} as {transfer_kind.name}: it {said(outcome)}, and is not final")
                if word not in outcome.message and "directory" not in outcome.message:
                    raise Broken(f"{name} as {transfer_kind.name}: it does not say {word!r}: {outcome.message}")
        judge(on.story, *harness.places("stage_out"), complete=False)
        on.ends_right()


def changing(directory: Path, kind: str, *, reference: bool) -> None:
    """A file of the source is written to in place, replaced and removed while it is copied: what is moved is what the
    source was at one moment, or it fails and names the file."""
    with bench(directory, kind, reference=reference) as on:
        harness = on.harness
        source, destination = harness.places("stage_out")
        shutil.rmtree(source)
        source.mkdir()
        stop = threading.Event()
        (source / "file").write_bytes(version(0))
        changer = threading.Thread(target=change, args=(source, stop))
        changer.start()
        done = failed = 0
        try:
            for _ in range(CHANGES):
                outcome = harness.operate("stage_out")
                if isinstance(outcome, OperationFailed):
                    failed += 1
                    check_words(outcome)
                else:
                    done += 1
                if (destination / "file").exists() and (torn := tear((destination / "file").read_bytes())):
                    raise Broken(
                        f"a file that was changed while it was copied was never so: {torn}; it {said(outcome)}"
                    )
                if done >= 5 and failed >= 5 and not reference:
                    break
        finally:
            stop.set()
            changer.join()
        print(f"disks: a changing source: {done} done, {failed} failed", file=sys.stderr, flush=True)


def version(number: int) -> bytes:
    """Return the content of the file that changes."""
    return number.to_bytes(8, "little") * (VERSION_BYTES // 8)


def change(source: Path, stop: threading.Event) -> None:
    """Change the file until told to stop, one version after the other: at once, or in place from the beginning on."""
    chance = random.Random(5)
    number = 0
    while not stop.is_set():
        number += 1
        content, way = version(number), chance.randrange(4)
        if way == 0:
            (source / "file").unlink()
            time.sleep(0.0005)
        if way < 2:
            (source.parent / "next").write_bytes(content)
            os.rename(source.parent / "next", source / "file")
        else:
            with (source / "file").open("r+b", buffering=0) as file:
                for at in range(0, VERSION_BYTES, BLOCK_BYTES):
                    os.pwrite(file.fileno(), content[at : at + BLOCK_BYTES], at)
        time.sleep(chance.random() * 0.02)


def tear(content: bytes) -> str:
    """Say in which way a file never was like this: at any moment it begins with a version and goes on with the one
    before it."""
    if len(content) != VERSION_BYTES:
        return f"{len(content)} bytes"
    numbers = [int.from_bytes(content[at : at + 8], "little") for at in range(0, VERSION_BYTES, 4096)]
    runs = [number for at, number in enumerate(numbers) if at == 0 or numbers[at - 1] != number]
    return "" if len(runs) == 1 or (len(runs) == 2 and runs[0] == runs[1] + 1) else f"versions {runs[:8]}"


def used_bytes(path: Path) -> int:
    """Return how much of a file system is in use."""
    found = os.statvfs(path)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def set_quota(disk: Disk, blocks: int) -> None:
    """Let the user have so many KiB on a disk; 0: any number. OSError where the kernel has no quotas."""
    # struct dqblk of linux/quota.h: six limits and counts, two times, and which of them are set (QIF_LIMITS).
    limits = (ctypes.c_uint64 * 9)(blocks, blocks, 0, 0, 0, 0, 0, 0, 5)
    device = subprocess.run(
        ["findmnt", "-n", "-o", "SOURCE", str(disk.mount_point)], capture_output=True, text=True, check=True
    ).stdout.strip()
    q_setquota = 0x800008 << 8
    libc = ctypes.CDLL(None, use_errno=True)
    command = ctypes.c_int(ctypes.c_uint32(q_setquota).value | 0)
    if libc.quotactl(command, device.encode(), pwd.getpwnam(USER).pw_uid, ctypes.byref(limits)) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"quotactl: {os.strerror(number)}")


CASES: tuple[Callable[..., None], ...] = (
    no_space, no_inodes, over_quota, read_only, goes_away, dead_mount, unreadable, missing, changing,
    own_disk_full,
)  # fmt: skip
RACING = (goes_away, changing)
"""Cases that may go one way or the other."""

REFERENCE_CASES = (no_space, no_inodes, goes_away)
"""What a reference mover does wrong: it leaves half a file where there was none."""


def disks(directory: Path, size: Size, seed: int, *, reference: bool = False) -> dict[str, Any]:
    """Do every case; Broken at the first broken promise."""
    done: dict[str, int] = {}
    left_out: dict[str, str] = {}
    caught: list[str] = []
    for kind in size.kinds:
        for case in CASES[:: size.every]:
            if reference and case not in REFERENCE_CASES:
                continue
            times = size.rounds if case in RACING else 1
            # A source that changes is moved many times in one go.
            for _ in range(min(times, 1) if case is changing else times):
                try:
                    case(directory / f"{case.__name__}-{kind}", kind, reference=reference)
                except Broken as error:
                    if reference:
                        caught.append(case.__name__)
                        continue
                    raise Broken(f"{case.__name__} on {kind}: {error}") from error
                except LeftOut as reason:
                    left_out[case.__name__] = str(reason)[:80]
                    continue
                done[case.__name__] = done.get(case.__name__, 0) + 1
            print(f"disks: {case.__name__} on {kind}: held", file=sys.stderr, flush=True)
    if caught:
        raise Broken(f"caught in {len(caught)} of {len(REFERENCE_CASES)} cases: {', '.join(caught)}")
    return {"cases": sum(done.values()), **done, "left_out": left_out}
