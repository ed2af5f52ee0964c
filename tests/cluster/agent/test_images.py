"""Buffers that are images: file systems of their own, mounted for real, found again and gone without a trace."""

from __future__ import annotations

import asyncio
import fcntl
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from forebay.cluster.agent.files import capacity, images
from forebay.cluster.agent.files.removal import RemovalFailed
from forebay.cluster.agent.runtime.state_directory import AgentFailed, StateDirectory
from forebay.cluster.agent.worker.buffer_usage import blocks_of
from forebay.cluster.system import closing, names_in, open_directory
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.agent.conftest import Site

MIB = 1024**2


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    """An open directory in which images can be mounted."""
    place = tmp_path / "buffers"
    place.mkdir()
    with closing(open_directory(place)) as directory:
        try:
            images.probe(directory)
        except images.ImageFailed as error:
            pytest.skip(f"no images here: {error}")
        try:
            yield directory
        finally:
            unmount_all(tmp_path)


@pytest.fixture
def imaging(site: Site, parent: int) -> Iterator[Path]:
    """The directory of an agent whose buffers are images."""
    site.configure(more='buffer_image = "ext4"')
    yield site.home
    site.clean_up()


def mounted(below: Path) -> list[str]:
    """Return what is mounted below a directory, with its options."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line for line in lines if line.split()[1].startswith(f"{below}/")]


def unmount_all(below: Path) -> None:
    for line in mounted(below):
        subprocess.run(["umount", "--lazy", line.split()[1]], check=True)


def attached(below: Path) -> list[str]:
    """Return the files of images below a directory that have a loop device; removed ones are said to be deleted."""
    found = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            name = file.read_text().strip()
        except OSError:
            # It was let go just now.
            continue
        if name.startswith(str(below)):
            found.append(name)
    return found


async def nothing_attached(below: Path) -> None:
    """Wait until the kernel has let go of the devices of what was unmounted, which it does by itself."""
    while attached(below):
        await asyncio.sleep(0.01)


def test_a_buffer_is_a_file_system_of_its_size_and_goes_without_a_trace(site: Site, imaging: Path) -> None:
    (site.sources / "data").write_bytes(b"x" * MIB)
    (site.sources / "tree" / "deep").mkdir(parents=True)
    (site.sources / "tree" / "deep" / "file").write_text("deep")
    inwards = (
        Transfer(TransferKind.FILE, str(site.sources / "data"), "$DW_JOB_STRIPED/data"),
        Transfer(TransferKind.DIRECTORY, str(site.sources / "tree"), "$DW_JOB_STRIPED/tree"),
    )
    outwards = (
        Transfer(TransferKind.FILE, str(site.destinations / "data"), "$DW_JOB_STRIPED/data"),
        Transfer(TransferKind.DIRECTORY, str(site.destinations / "tree"), "$DW_JOB_STRIPED/tree"),
    )
    most = {"capacity_bytes": 8 * MIB}

    async def story() -> None:
        async with site.running() as (controller, _):
            assert controller.registrations[0].capacity_control == "image"
            await controller.order(site.order(7, 1, "stage_in", transfers=inwards, **most))
            assert isinstance(await controller.result(7, 1), OperationDone)
            (line,) = mounted(imaging)
            assert line.split()[1] == str(imaging / "buffers" / "7")
            assert {"nosuid", "nodev", "rw"} <= set(line.split()[3].split(","))
            file = next((imaging / "buffers" / images.IMAGES).iterdir()).stat()
            assert file.st_blocks * 512 >= file.st_size == images.image_bytes(blocks_of(8 * MIB))
            # Else the kernel gives the blocks of empty tables back some seconds later.
            assert "noinit_itable" in line
            writes = "dd if=/dev/zero of=big bs=1M count=300 2>&1 | grep -q 'No space' && rm big"
            script = '#!/bin/sh\ncd "$DW_JOB_STRIPED" || exit 9\n[ ! -e ../lost+found ] || exit 8\n'
            await controller.order(site.order(7, 2, "run", script=f"{script}{writes}\n", **most))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            await controller.order(site.order(7, 3, "stage_out", transfers=outwards, **most))
            assert isinstance(await controller.result(7, 3), OperationDone)
            assert (site.destinations / "data").stat().st_size == MIB
            assert (site.destinations / "tree" / "deep" / "file").read_text() == "deep"
            await controller.order(site.order(7, 4, "teardown", **most))
            assert isinstance(await controller.result(7, 4), OperationDone)
            assert os.listdir(imaging / "buffers") == [images.IMAGES] and not mounted(imaging)
            assert not os.listdir(imaging / "buffers" / images.IMAGES)
            await nothing_attached(imaging)

    asyncio.run(asyncio.wait_for(story(), 120))


def test_what_a_buffer_holds_is_found_again_after_the_machine_went_down(site: Site, imaging: Path) -> None:
    (site.sources / "data").write_bytes(b"x" * MIB)
    inwards = (Transfer(TransferKind.FILE, str(site.sources / "data"), "$DW_JOB_STRIPED/data"),)
    lake = (CreatePersistent("lake", 8 * MIB),)

    async def story() -> None:
        async with site.running() as (controller, agent):
            order = site.order(7, 1, "stage_in", transfers=inwards, capacity_bytes=8 * MIB, creates=lake)
            await controller.order(order)
            assert isinstance(await controller.result(7, 1), OperationDone)
            assert len(mounted(imaging)) == 2
            await site.kill_agent(agent)
            unmount_all(imaging)
            assert not (imaging / "buffers" / "7" / "striped").exists()
            site.start_agent()
            script = '#!/bin/sh\n[ -s "$DW_JOB_STRIPED/data" ] && date > "$DW_PERSISTENT_STRIPED_lake/date"\n'
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=8 * MIB, uses=("lake",)))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            # An agent that lives while somebody unmounts it looks again, too.
            unmount_all(imaging)
            await controller.order(site.order(7, 3, "teardown", capacity_bytes=8 * MIB))
            assert isinstance(await controller.result(7, 3), OperationDone)
            # The name's next life has nothing of the one before.
            await controller.order(site.order(8, 1, "stage_in", creates=lake, capacity_bytes=0))
            assert isinstance(await controller.result(8, 1), OperationDone)
            assert len(mounted(imaging)) == 1 and not os.listdir(imaging / "persistent" / "lake")
            await controller.order(
                site.order(9, 1, "stage_in", destroys=(DestroyPersistent("lake"),), capacity_bytes=0)
            )
            assert isinstance(await controller.result(9, 1), OperationDone)
            assert not mounted(imaging) and not os.listdir(imaging / "persistent" / images.IMAGES)
            await nothing_attached(imaging)

    asyncio.run(asyncio.wait_for(story(), 120))


STEPS: Final = ((os, "mkdir"), (os, "rename"), (os, "unlink"), (os, "rmdir"), (fcntl, "ioctl"), (images, "_check"))
"""What changes anything: of these one is the last that a killed process does."""

KILLED: Final = 9


def killed_after(last: int, act: Callable[[], object]) -> bool:
    """Do something in a process that dies after so many steps; whether it came so far."""
    child = os.fork()
    if child:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, KILLED)
        return code == KILLED
    done = 0

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def step(*words: Any, **named: Any) -> Any:
            nonlocal done
            result = real(*words, **named)
            done += 1
            if done > last:
                os._exit(KILLED)
            return result

        return step

    try:
        for module, name in STEPS:
            setattr(module, name, counting(getattr(module, name)))
        act()
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.parametrize("act", ["make", "move", "remove"])
def test_whoever_is_killed_at_any_step_leaves_nothing_that_the_next_one_does_not_find(
    parent: int, tmp_path: Path, act: str
) -> None:
    for last in range(100):
        if act != "make":
            capacity.make(parent, "7", capacity.IMAGE, MIB)
            (tmp_path / "buffers" / "7" / "file").touch()
        acts: dict[str, Callable[[], object]] = {
            "make": lambda: capacity.make(parent, "7", capacity.IMAGE, MIB),
            "move": lambda: capacity.move(parent, "7", "8"),
            "remove": lambda: capacity.remove(parent, "7", shown="7"),
        }
        came_so_far = killed_after(last, acts[act])
        assert not list(capacity.see_all_mounted(parent))
        if act == "make":
            try:
                capacity.make(parent, "7", capacity.IMAGE, MIB)
            except FileExistsError:
                pass
            with closing(capacity.open_buffer(parent, "7")) as buffer:
                assert os.fstat(buffer).st_dev != os.fstat(parent).st_dev and not names_in(buffer)
        for name in ("7", "8"):
            # Who takes away looks for what has a name.
            capacity.remove(parent, name, shown=name)
        assert names_in(parent) == [images.IMAGES] and not os.listdir(tmp_path / "buffers" / images.IMAGES)
        assert not mounted(tmp_path)
        if not came_so_far:
            break
    else:
        pytest.fail("it has no end")
    asyncio.run(asyncio.wait_for(nothing_attached(tmp_path), 60))


def test_an_image_in_which_something_is_left_is_not_removed_as_an_empty_one(parent: int, tmp_path: Path) -> None:
    capacity.make(parent, "7", capacity.IMAGE, MIB)
    buffer = tmp_path / "buffers" / "7"
    (buffer / "late").write_text("x")
    with pytest.raises(RemovalFailed, match="the buffer cannot be removed: Directory not empty"):
        capacity.remove_empty(parent, "7", shown="the buffer")
    assert (buffer / "late").read_text() == "x"
    (buffer / "late").unlink()
    capacity.remove_empty(parent, "7", shown="the buffer")
    capacity.remove_empty(parent, "7", shown="the buffer")
    assert [name for name in names_in(parent) if name != images.IMAGES] == [] and not images.is_there(parent, "7")


def test_an_image_that_is_mounted_elsewhere_is_mounted_from_the_same_device(parent: int, tmp_path: Path) -> None:
    """Two devices of one file would not know of each other, and spoil it."""
    capacity.make(parent, "7", capacity.IMAGE, MIB)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    subprocess.run(["mount", "--bind", str(tmp_path / "buffers" / "7"), str(elsewhere)], check=True)
    subprocess.run(["umount", str(tmp_path / "buffers" / "7")], check=True)
    (elsewhere / "file").write_text("x")
    capacity.see_mounted(parent, "7")
    assert (tmp_path / "buffers" / "7" / "file").read_text() == "x"
    assert len(attached(tmp_path)) == 1
    subprocess.run(["umount", str(elsewhere)], check=True)
    capacity.remove(parent, "7", shown="7")


@pytest.mark.parametrize("fault", ["not root", "no mkfs", "no mount"])
def test_an_agent_that_cannot_have_images_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "not root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 0)
    if fault == "no mkfs":
        monkeypatch.setattr(images, "_PROGRAMS", str(tmp_path))
    if fault == "no mount":

        def refused(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(images, "_mount", refused)
    with pytest.raises(AgentFailed, match='buffer_image = "ext4": .*(root|mkfs.ext4|cannot be mounted|no image)'):
        StateDirectory(tmp_path / "n1", "own", images=True)


def test_the_structures_are_those_of_the_kernels_header() -> None:
    """<linux/loop.h>: the sizes that its programs are compiled with."""
    assert (images._LOOP_INFORMATION.size, images._LOOP_CONFIGURATION.size) == (232, 304)
