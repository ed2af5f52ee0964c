"""Buffers on a real btrfs: each a subvolume whose size the file system keeps, whatever subvolumes its job makes."""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.cluster.agent.adapters import subvolumes
from forebay.cluster.agent.adapters.btrfs import NAMES_BYTES
from forebay.cluster.agent.files.removal import remove_removable, remove_tree
from forebay.cluster.agent.processes import acting_as
from forebay.cluster.agent.worker.buffer_usage import UsageQuery, blocks_of, measure
from forebay.cluster.system import closing, names_in, open_directory
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.agent.conftest import Site

MIB = 1024**2

IMAGE_BYTES: Final = 512 * MIB

SOMEBODY: Final = 65_534
"""User and group id of a job's user, where the tests run as root."""

SNAPSHOT: Final = 0x50009417
"""BTRFS_IOC_SNAP_CREATE_V2"""


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A directory on a btrfs without quotas."""
    image, place = tmp_path / "image", tmp_path / "btrfs"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        made = subprocess.run(["mkfs.btrfs", "-q", str(image)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mkfs.btrfs here")
    if made.returncode:
        pytest.skip(f"no btrfs can be made: {made.stderr.strip()}")
    mounted = subprocess.run(
        ["mount", "-t", "btrfs", "-o", "loop", str(image), str(place)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no btrfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def test_a_directory_is_listed_as_it_is_and_not_as_it_was_when_it_was_opened(btrfs: Path) -> None:
    with closing(open_directory(btrfs)) as directory:
        for number in range(5):
            (btrfs / str(number)).mkdir()
            assert len(names_in(directory)) == number + 1


def test_a_tree_goes_at_once_however_deep(btrfs: Path) -> None:
    (btrfs / "7" / "a" / "b" / "c" / "d").mkdir(parents=True)
    (btrfs / "7" / "a" / "b" / "c" / "d" / "file").touch()
    with closing(open_directory(btrfs)) as parent:
        remove_tree(parent, "7", shown="the buffer")
        assert not names_in(parent)


def test_the_calls_are_those_of_the_kernels_header() -> None:
    """A call's number says its size and direction; the bytes of each are those of <linux/btrfs.h>."""
    for call, number, size, is_written in (
        (subvolumes._CREATE, 14, subvolumes._NAMED.size, True),
        (SNAPSHOT, 23, 4096, True),
        (subvolumes._CHANGE_GROUP, 42, subvolumes._CHANGED_GROUP.size, True),
        (subvolumes._LIMIT, 43, subvolumes._LIMITS.size, False),
        (subvolumes._LOOK_UP, 18, subvolumes._LOOKED_UP.size, True),
        (subvolumes._GET_FLAGS, 25, subvolumes._FLAGS.size, False),
        (subvolumes._SET_FLAGS, 26, subvolumes._FLAGS.size, True),
    ):
        assert (call >> 16 & 0x3FFF, call >> 8 & 0xFF, call & 0xFF) == (size, 0x94, number)
        assert bool(call >> 30 & 1) is is_written


@pytest.fixture
def quotas(site: Site, btrfs: Path) -> Path:
    """The agent's directory on a btrfs that keeps quotas."""
    enabled = subprocess.run(["btrfs", "quota", "enable", str(btrfs)], capture_output=True, text=True)
    if enabled.returncode:
        pytest.skip(f"this btrfs keeps no quotas: {enabled.stderr.strip()}")
    site.home = btrfs / "n1"
    site.home.mkdir()
    site.configure(directory=str(site.home))
    return site.home


def referenced(buffer: Path) -> int:
    """Return how many bytes the file system counts for a subvolume."""
    subprocess.run(["btrfs", "filesystem", "sync", str(buffer)], check=True, capture_output=True)
    shown = subprocess.run(
        ["btrfs", "qgroup", "show", "--raw", "-f", str(buffer)], check=True, capture_output=True, text=True
    )
    return int(shown.stdout.splitlines()[-1].split()[1])


WRITES: Final = "dd if=/dev/zero of=big bs=1M count=300 2>&1 | grep -q 'No space\\|quota'\nexit $?\n"


def test_what_a_script_writes_beyond_its_capacity_is_refused_by_the_file_system(site: Site, quotas: Path) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            assert controller.registrations[0].capacity_control == "subvolume_quota"
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)
            buffer = quotas / "buffers" / "7"
            assert stat.S_IMODE(buffer.stat().st_mode) == 0o700
            script = f'#!/bin/sh\ncd "$DW_JOB_STRIPED" || exit 9\n{WRITES}'
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=MIB))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert MIB <= referenced(buffer) <= blocks_of(MIB) + NAMES_BYTES
            out = Transfer(TransferKind.FILE, str(site.destinations / "out"), "$DW_JOB_STRIPED/big")
            await controller.order(site.order(7, 3, "stage_out", transfers=(out,), capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 3), OperationDone)
            assert (site.destinations / "out").stat().st_size > MIB
            await controller.order(site.order(7, 4, "teardown", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 4), OperationDone)
            assert not buffer.exists()

    asyncio.run(story())


def test_a_persistent_buffer_is_held_to_its_capacity_too(site: Site, quotas: Path) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            await controller.order(site.order(7, 1, "stage_in", creates=(CreatePersistent("lake", MIB),)))
            assert isinstance(await controller.result(7, 1), OperationDone)
            await controller.order(site.order(8, 1, "stage_in", uses=("lake",)))
            assert isinstance(await controller.result(8, 1), OperationDone)
            script = f'#!/bin/sh\ncd "${{DW_PERSISTENT_STRIPED_lake:?}}" || exit 9\n{WRITES}'
            await controller.order(site.order(8, 2, "run", script=script, uses=("lake",)))
            assert await controller.result(8, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            # Another job makes a buffer of that name when the first was forgotten: it begins with nothing.
            await controller.order(site.order(9, 1, "stage_in", creates=(CreatePersistent("lake", MIB),)))
            assert isinstance(await controller.result(9, 1), OperationDone)
            assert not os.listdir(quotas / "persistent" / "lake")
            await controller.order(site.order(10, 1, "stage_in", destroys=(DestroyPersistent("lake"),)))
            assert isinstance(await controller.result(10, 1), OperationDone)
            assert os.listdir(quotas / "persistent") == [".made"]

    asyncio.run(story())


def test_what_a_job_writes_into_a_subvolume_of_its_own_is_seen_by_the_watch(site: Site, quotas: Path) -> None:
    """Quotas of btrfs do not reach into subvolumes that anybody may make."""

    async def story() -> None:
        async with site.running() as (controller, _):
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)
            writes = "btrfs subvolume create out && dd if=/dev/zero of=out/big bs=1M count=100 && sync"
            script = f'#!/bin/sh\ncd "$DW_JOB_STRIPED" || exit 9\n{writes} && while :; do sleep 1; done\nexit 1\n'
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=MIB, time_limit_s=600))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded)
            assert ended.result is JobState.FAILED and "request more capacity" in ended.message
            await controller.order(site.order(7, 3, "teardown", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 3), OperationDone)
            assert not os.listdir(quotas / "buffers")

    asyncio.run(story())


def test_a_btrfs_without_quotas_is_watched_and_the_log_says_why(site: Site, btrfs: Path) -> None:
    site.home = btrfs / "n1"
    site.configure(directory=str(site.home))

    async def story() -> None:
        async with site.running() as (controller, _):
            assert controller.registrations[0].capacity_control == "watch"
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)

    asyncio.run(story())
    assert "see `btrfs quota enable`" in (site.directory / "agent.log").read_text()


def snapshot(source: Path, parent: Path, name: str) -> None:
    """Make a snapshot that cannot be written to, as anybody may of what he owns."""
    with closing(open_directory(source)) as subvolume, closing(open_directory(parent)) as directory:
        arguments = bytearray(struct.pack("=qQQ32s4040s", subvolume, 0, 1 << 1, b"", name.encode()))
        fcntl.ioctl(directory, SNAPSHOT, arguments)


def make_subvolumes(buffer: Path) -> None:
    """Make subvolumes in each other with directories in them, and a snapshot that cannot be written to."""
    place = buffer
    for _ in range(4):
        with closing(open_directory(place)) as parent:
            subvolumes.create(parent, "sub")
        place = place / "sub"
        (place / "a" / "b" / "c").mkdir(parents=True)
        (place / "a" / "b" / "c" / "file").write_bytes(b"x" * 1000)
        place = place / "a" / "b"
    snapshot(buffer / "sub", buffer / "sub" / "a", "frozen")


@pytest.mark.parametrize("as_owner", [True, False])
def test_a_buffer_goes_whatever_subvolumes_its_job_made_in_it(
    btrfs: Path, monkeypatch: pytest.MonkeyPatch, as_owner: bool
) -> None:
    buffer = btrfs / "7"
    buffer.mkdir()
    os.chown(buffer, SOMEBODY, SOMEBODY)
    # Its user may not pass through the directories of the tests.
    monkeypatch.chdir(buffer)
    with closing(open_directory(btrfs)) as parent, closing(open_directory(buffer)) as directory:
        with acting_as(SOMEBODY, SOMEBODY):
            make_subvolumes(Path())
            if as_owner:
                assert remove_removable(directory, shown="the buffer") == []
                assert not names_in(directory)
        remove_tree(parent, "7", shown="the buffer")
    assert not buffer.exists()


def test_what_others_hold_in_a_subvolume_is_kept_and_named(btrfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = btrfs / "7"
    buffer.mkdir()
    os.chown(buffer, SOMEBODY, SOMEBODY)
    # Its user may not pass through the directories of the tests.
    monkeypatch.chdir(buffer)
    with closing(open_directory(buffer)) as directory:
        with acting_as(SOMEBODY, SOMEBODY):
            make_subvolumes(Path())
        theirs = buffer / "sub" / "a" / "theirs"
        theirs.mkdir(mode=0o700)
        (theirs / "file").write_bytes(b"x")
        with acting_as(SOMEBODY, SOMEBODY):
            kept = remove_removable(directory, shown="the buffer")
        assert any("of user 0" in line for line in kept), (kept, sorted(buffer.rglob("*")))
        assert [path.read_bytes() for path in buffer.rglob("theirs/file")] == [b"x"]


def test_the_watch_counts_what_lies_in_subvolumes_of_the_job(btrfs: Path) -> None:
    buffer = btrfs / "7"
    buffer.mkdir()
    with closing(open_directory(buffer)) as directory:
        subvolumes.create(directory, "out")
    (buffer / "out" / "big").write_bytes(os.urandom(3 * MIB))
    os.sync()
    assert measure(UsageQuery(path=str(buffer), most_bytes=MIB, most_inodes=100)).excess == "bytes"
    assert measure(UsageQuery(path=str(buffer), most_bytes=8 * MIB, most_inodes=1)).excess == "inodes"
