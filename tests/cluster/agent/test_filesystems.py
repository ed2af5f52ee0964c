"""Shared filesystems on real agents: two movers of one directory, one of them late; what is not mounted is never
written to.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import shutil
import signal
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import IO

import msgspec
import pytest

from forebay.cluster.agent.files.filesystems import MARK, FilesystemRefused, identity_at, mark, open_records
from forebay.cluster.schemas.jobs import FilesystemView
from forebay.cluster.system.descriptors import closing
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import Order, OrderFilesystem, SpecialTransfers
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from forebay.replica.model.transfers import TransferChoice, TransferRules
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import ControllerDouble
from tests.cluster.harness import until

FILE_BYTES = 10_000_000
FILES = 5
GRANTED = SpecialTransfers(granted=(("lake", 10**9),))


def in_a_loop(story: Callable[[Site, Path], Coroutine[None, None, None]]) -> Callable[[Site, Path], None]:
    """Return a test of what a story tells."""

    @functools.wraps(story)
    def test(site: Site, tmp_path: Path) -> None:
        asyncio.run(story(site, tmp_path))

    return test


def placed(directory: Path, name: str = "7.1") -> OrderFilesystem:
    directory.mkdir(exist_ok=True)
    return OrderFilesystem("bb", str(directory), mark(str(directory)), f"test/{name}")


def filled(site: Site) -> dict[str, bytes]:
    tree = site.sources / "tree"
    tree.mkdir()
    data = {f"f{number}": os.urandom(FILE_BYTES) for number in range(FILES)}
    for name, written in data.items():
        (tree / name).write_bytes(written)
    return data


def found(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def family(pid: int) -> list[int]:
    """Return a process and all that it has started."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]


def signalled(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def stage_in(site: Site, filesystem: OrderFilesystem, attempt: int) -> Order:
    transfer = Transfer(TransferKind.DIRECTORY, str(site.sources / "tree"), "$DW_JOB_STRIPED/tree")
    return site.order(7, attempt, "stage_in", transfers=(transfer,), filesystem=filesystem, capacity_bytes=10**9)


@in_a_loop
async def test_a_mover_that_was_stopped_changes_nothing_once_another_has_taken_over(site: Site, tmp_path: Path) -> None:
    filesystem = placed(tmp_path / "bb")
    data = filled(site)
    site.configure(more="copy_rate = '8MiB'")
    (tmp_path / "other").mkdir()
    other = Site(tmp_path / "other", site._tls)
    buffer = tmp_path / "bb" / filesystem.directory / "striped" / "tree"
    try:
        async with site.running() as (controller, process), other.running() as (second, _):
            await controller.order(stage_in(site, filesystem, 1))
            await controller.wait(lambda: any(row.bytes_done for poll in controller.polls for row in poll.progress))
            stopped = family(process.pid)
            signalled(stopped, signal.SIGSTOP)
            await second.order(stage_in(site, filesystem, 2))
            result = await second.result(7, 2)
            assert isinstance(result, OperationDone), result
            assert result.files == FILES and found(buffer) == data
            before = {path.name: path.stat().st_mtime_ns for path in buffer.iterdir()}
            inodes = {path.name: path.stat().st_ino for path in buffer.iterdir()}
            signalled(stopped, signal.SIGCONT)
            late = await controller.result(7, 1)
            assert isinstance(late, OperationFailed), late
            assert found(buffer) == data
            assert before == {path.name: path.stat().st_mtime_ns for path in buffer.iterdir()}
            assert inodes == {path.name: path.stat().st_ino for path in buffer.iterdir()}
            teardown = site.order(7, 3, "teardown", filesystem=filesystem)
            await second.order(teardown)
            assert isinstance(await second.result(7, 3), OperationDone)
            assert not buffer.parent.parent.exists()
            assert not list((tmp_path / "bb" / ".forebay-records" / "test").iterdir())
    finally:
        other.clean_up()


@in_a_loop
async def test_what_one_mover_has_moved_another_does_not_move_again(site: Site, tmp_path: Path) -> None:
    filesystem = placed(tmp_path / "bb")
    data = filled(site)
    site.configure(more="copy_rate = '8MiB'")
    (tmp_path / "other").mkdir()
    other = Site(tmp_path / "other", site._tls)
    buffer = tmp_path / "bb" / filesystem.directory / "striped" / "tree"
    try:
        async with site.running() as (controller, process), other.running() as (second, _):
            await controller.order(stage_in(site, filesystem, 1))
            await controller.wait(lambda: buffer.exists() and len(list(buffer.iterdir())) > 1)
            await site.kill_agent(process)
            there = {path.name: path.stat().st_ino for path in buffer.iterdir()}
            await second.order(stage_in(site, filesystem, 2))
            result = await second.result(7, 2)
            assert isinstance(result, OperationDone), result
            assert found(buffer) == data
            assert there and there.items() <= {path.name: path.stat().st_ino for path in buffer.iterdir()}.items()
    finally:
        other.clean_up()


def moved_out(site: Site, filesystem: OrderFilesystem, attempt: int, *, uses: dict[str, object] | None = None) -> Order:
    """Return an order that moves the tree of a buffer, or that of the persistent buffer lake."""
    inside = "$DW_PERSISTENT_STRIPED_lake/tree" if uses else "$DW_JOB_STRIPED/tree"
    transfer = Transfer(TransferKind.DIRECTORY, str(site.destinations / "back"), inside)
    special = msgspec.structs.replace(GRANTED if uses else SpecialTransfers(), choices=(TransferChoice(move=True),))
    fields = {
        "transfers": (transfer,),
        "filesystem": filesystem,
        "rules": TransferRules(),
        **(uses or {}),
        "special": special,
    }
    return site.order(7, attempt, "stage_out", **fields)


@in_a_loop
async def test_what_is_moved_out_of_a_shared_filesystem_is_gone_from_it(site: Site, tmp_path: Path) -> None:
    filesystem, data = placed(tmp_path / "bb"), filled(site)
    lake = OrderFilesystem("bb", filesystem.path, filesystem.identity, "test/lake.5.1")
    trees = [tmp_path / "bb" / one.directory / sub for one, sub in ((filesystem, "striped/tree"), (lake, "tree"))]
    async with site.running() as (controller, _):
        await controller.order(stage_in(site, filesystem, 1))
        assert isinstance(await controller.result(7, 1), OperationDone)
        shutil.copytree(trees[0], trees[1])
        for attempt, uses in enumerate((None, {"uses": ("lake",), "persistent": (("lake", lake),)}), 2):
            await controller.order(moved_out(site, filesystem, attempt, uses=uses))
            result = await controller.result(7, attempt)
            assert isinstance(result, OperationDone) and result.receipt is not None, result
            assert (result.files, result.receipt.removed_files) == (FILES, FILES)
            assert found(site.destinations / "back") == data
            assert found(trees[attempt - 2]) == {}
            shutil.rmtree(site.destinations / "back")


@in_a_loop
async def test_a_mover_that_takes_over_finishes_a_move_and_the_late_one_removes_nothing(
    site: Site, tmp_path: Path
) -> None:
    filesystem, data = placed(tmp_path / "bb"), filled(site)
    site.configure(more="copy_rate = '8MiB'")
    (tmp_path / "other").mkdir()
    other = Site(tmp_path / "other", site._tls)
    tree = tmp_path / "bb" / filesystem.directory / "striped" / "tree"
    shutil.copytree(site.sources / "tree", tree)
    order = msgspec.structs.replace(moved_out(site, filesystem, 1), roots=(str(site.destinations),))
    try:
        async with site.running() as (controller, process), other.running() as (second, _):
            await controller.order(order)
            await controller.wait(lambda: any(row.bytes_done for poll in controller.polls for row in poll.progress))
            stopped = family(process.pid)
            signalled(stopped, signal.SIGSTOP)
            await second.order(msgspec.structs.replace(order, attempt=2))
            result = await second.result(7, 2)
            assert isinstance(result, OperationDone) and result.receipt is not None, result
            assert (result.files, result.receipt.removed_files) == (FILES, FILES)
            assert found(site.destinations / "back") == data and found(tree) == {}
            shutil.copytree(
                site.sources / "tree", tree, dirs_exist_ok=True
            )  # the job's next results, by the same names
            signalled(stopped, signal.SIGCONT)
            late = await controller.result(7, 1)
            assert isinstance(late, OperationFailed), late
            assert found(site.destinations / "back") == data == found(tree)
    finally:
        other.clean_up()


@in_a_loop
async def test_a_script_does_not_start_where_its_place_is_not_mounted_and_says_so(site: Site, tmp_path: Path) -> None:
    filesystem = placed(tmp_path / "bb")
    (tmp_path / "bb" / MARK).unlink()
    async with site.running() as (controller, _):
        script = f"#!/bin/sh\necho ran > {site.destinations}/ran\n"
        await controller.order(
            site.order(7, 2, "run", script=script, filesystem=filesystem, output=f"{site.destinations}/out")
        )
        result = await controller.result(7, 2)
        assert isinstance(result, OperationFailed) and MARK in result.message
        assert not (site.destinations / "ran").exists()


@in_a_loop
async def test_nothing_is_written_where_the_shared_filesystem_is_not_mounted(site: Site, tmp_path: Path) -> None:
    filesystem = placed(tmp_path / "bb")
    (tmp_path / "bb" / MARK).unlink()
    filled(site)
    async with site.running() as (controller, _):
        await controller.order(stage_in(site, filesystem, 1))
        result = await controller.result(7, 1)
        assert isinstance(result, OperationFailed) and MARK in result.message
        assert list((tmp_path / "bb").iterdir()) == []


@in_a_loop
async def test_a_script_finds_its_buffer_in_the_shared_filesystem(site: Site, tmp_path: Path) -> None:
    filesystem = placed(tmp_path / "bb")
    filled(site)
    async with site.running() as (controller, _):
        await controller.order(stage_in(site, filesystem, 1))
        assert isinstance(await controller.result(7, 1), OperationDone)
        out = f"{site.destinations}/out"
        script = '#!/bin/sh\necho "$DW_JOB_STRIPED"\nls "$DW_JOB_STRIPED/tree" | wc -l\n'
        await controller.order(
            site.order(7, 2, "run", script=script, filesystem=filesystem, output=out, capacity_bytes=10**9)
        )
        await controller.result(7, 2)
        assert Path(out).read_text().split() == [f"{filesystem.path}/{filesystem.directory}/striped", str(FILES)]
        assert (tmp_path / "bb" / filesystem.directory).stat().st_mode & 0o777 == 0o700


@in_a_loop
async def test_a_persistent_buffer_is_made_filled_used_and_removed_in_the_shared_filesystem(
    site: Site, tmp_path: Path
) -> None:
    filesystem, data = placed(tmp_path / "bb"), filled(site)
    lake = OrderFilesystem("bb", filesystem.path, filesystem.identity, "test/lake.7.1")
    path = tmp_path / "bb" / "test" / "lake.7.1"
    there: dict[str, object] = {"persistent": (("lake", lake),), "uses": ("lake",), "special": GRANTED}
    create = (CreatePersistent("lake", 10**9),)
    async with site.running() as (controller, _):
        await controller.order(
            site.order(7, 1, "stage_in", filesystem=filesystem, creates=create, persistent=there["persistent"])
        )
        assert isinstance(await controller.result(7, 1), OperationDone)
        assert path.stat().st_mode & 0o777 == 0o770
        assert not (site.home / "persistent" / "lake").exists()

        fill = (Transfer(TransferKind.DIRECTORY, str(site.sources / "tree"), "$DW_PERSISTENT_STRIPED_lake/tree"),)
        other = placed(tmp_path / "bb", "8.1")
        await controller.order(site.order(8, 1, "stage_in", filesystem=other, transfers=fill, **there))
        result = await controller.result(8, 1)
        assert isinstance(result, OperationDone), result
        assert found(path / "tree") == data
        out = f"{site.destinations}/out"
        script = '#!/bin/sh\necho "$DW_PERSISTENT_STRIPED_lake"; echo more > "$DW_PERSISTENT_STRIPED_lake/more"\n'
        await controller.order(site.order(8, 2, "run", filesystem=other, script=script, output=out, **there))
        await controller.result(8, 2)
        assert Path(out).read_text().strip() == str(path)
        back = (Transfer(TransferKind.FILE, f"{site.destinations}/back", "$DW_PERSISTENT_STRIPED_lake/more"),)
        await controller.order(site.order(8, 3, "stage_out", filesystem=other, transfers=back, **there))
        result = await controller.result(8, 3)
        assert isinstance(result, OperationDone), result
        assert (site.destinations / "back").read_text() == "more\n"
        await controller.order(site.order(8, 4, "teardown", filesystem=other, **there))
        assert isinstance(await controller.result(8, 4), OperationDone)
        assert found(path / "tree") == data, "it outlives its jobs"

        gone = site.order(
            9,
            1,
            "stage_in",
            filesystem=placed(tmp_path / "bb", "9.1"),
            destroys=(DestroyPersistent("lake"),),
            persistent=there["persistent"],
        )
        await controller.order(gone)
        assert isinstance(await controller.result(9, 1), OperationDone)
        assert not path.exists()


@in_a_loop
async def test_a_persistent_buffer_that_is_made_twice_stays_what_it_is(site: Site, tmp_path: Path) -> None:
    """As when another mover has taken over from one that was done."""
    filesystem = placed(tmp_path / "bb")
    lake = OrderFilesystem("bb", filesystem.path, filesystem.identity, "test/lake.7.1")
    create = (CreatePersistent("lake", 10**9),)
    async with site.running() as (controller, _):
        for attempt in (1, 2):
            order = site.order(
                7, attempt, "stage_in", filesystem=filesystem, creates=create, persistent=(("lake", lake),)
            )
            await controller.order(order)
            assert isinstance(await controller.result(7, attempt), OperationDone)
            kept = tmp_path / "bb" / "test" / "lake.7.1" / "kept"
            kept.touch()


@in_a_loop
async def test_a_script_does_not_start_where_its_persistent_buffer_is_not_seen(site: Site, tmp_path: Path) -> None:
    filesystem = placed(tmp_path / "bb")
    lake = OrderFilesystem("bb", filesystem.path, filesystem.identity, "test/lake.5.1")
    filled(site)
    async with site.running() as (controller, _):
        await controller.order(stage_in(site, filesystem, 1))
        assert isinstance(await controller.result(7, 1), OperationDone)
        script = f"#!/bin/sh\necho ran > {site.destinations}/ran\n"
        run = site.order(
            7,
            2,
            "run",
            script=script,
            filesystem=filesystem,
            output=f"{site.destinations}/out",
            uses=("lake",),
            persistent=(("lake", lake),),
        )
        await controller.order(run)
        result = await controller.result(7, 2)
        assert (
            isinstance(result, OperationFailed)
            and "does not see test/lake.5.1 in shared filesystem bb" in result.message
        )
        assert not (site.destinations / "ran").exists()


@in_a_loop
async def test_no_persistent_buffer_is_made_where_the_shared_filesystem_is_not_mounted(
    site: Site, tmp_path: Path
) -> None:
    filesystem = placed(tmp_path / "bb")
    lake = OrderFilesystem("bb", filesystem.path, filesystem.identity, "test/lake.7.1")
    (tmp_path / "bb" / MARK).unlink()
    async with site.running() as (controller, _):
        create = (CreatePersistent("lake", 10**9),)
        order = site.order(7, 1, "stage_in", filesystem=filesystem, creates=create, persistent=(("lake", lake),))
        await controller.order(order)
        result = await controller.result(7, 1)
        assert isinstance(result, OperationFailed) and MARK in result.message
        assert result.operation == "create_persistent"
        assert list((tmp_path / "bb").iterdir()) == []


def test_records_that_were_copied_in_part_are_not_what_the_next_attempt_begins_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filesystem = placed(tmp_path / "bb")
    kept = {f"7.stage_out.{kind}.0": kind.encode() for kind in ("control", "manifest", "chunks")}
    with closing(open_records(filesystem, 1)) as records:
        os.mkdir("transfers", dir_fd=records)
    first = tmp_path / "bb" / ".forebay-records" / filesystem.directory / "1" / "transfers"
    for name, data in kept.items():
        (first / name).write_bytes(data)
    copied = iter(range(1))

    def killed(source: IO[bytes], destination: IO[bytes]) -> None:
        next(copied)
        destination.write(source.read())

    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(shutil, "copyfileobj", killed)
        open_records(filesystem, 2)
    for attempt in (2, 3, 4):
        os.close(open_records(filesystem, attempt))
        assert found(first.parent.parent / str(attempt) / "transfers") == kept
    assert sorted(os.listdir(first.parent.parent)) == ["3", "4"]


def test_a_shared_filesystem_is_told_by_its_own_file_and_belongs_to_its_agents(tmp_path: Path) -> None:
    directory = tmp_path / "bb"
    with pytest.raises(FilesystemRefused, match="mount it there"):
        identity_at(str(directory))
    directory.mkdir()
    with pytest.raises(FilesystemRefused, match="forebay pool filesystem mark"):
        identity_at(str(directory))
    made = mark(str(directory))
    assert mark(str(directory)) == identity_at(str(directory)) == made
    directory.chmod(0o777)
    with pytest.raises(FilesystemRefused, match="0711"):
        identity_at(str(directory))
    directory.chmod(0o711)
    (directory / MARK).write_text("x\n")
    with pytest.raises(FilesystemRefused, match="32 hexadecimal"):
        identity_at(str(directory))


@in_a_loop
async def test_a_mover_registers_for_the_shared_filesystems_that_its_machine_has_and_for_no_other(
    site: Site, tmp_path: Path
) -> None:
    here, other = placed(tmp_path / "bb"), placed(tmp_path / "changed")
    controller = ControllerDouble(site.config)

    def filesystem(name: str, path: str, identity: str) -> FilesystemView:
        return FilesystemView(name=name, path=path, identity=identity, revision=1)

    all_places = [
        filesystem("bb", here.path, ""),
        filesystem("changed", other.path, "f" * 32),
        filesystem("missing", str(tmp_path / "missing"), ""),
    ]
    log = tmp_path / "agent.log"
    await controller.start()
    try:
        process = site.start_agent("", "--mover")
        await until(lambda: "no shared filesystem of the cluster is on this machine" in log.read_text())
        assert not controller.registrations  # it waits for one
        controller.filesystems = all_places
        await controller.wait(lambda: bool(controller.registrations))
        said = controller.registrations[0]
        assert (said.cpus, said.filesystems) == (0, {"bb": here.identity})
        new = placed(tmp_path / "new")
        controller.filesystems = [*controller.filesystems, filesystem("new", new.path, "")]
        await controller.wait(lambda: len(controller.registrations) == 2)
        assert controller.registrations[1].filesystems == {"bb": here.identity, "new": new.identity}
        assert controller.registrations[1].instance == said.instance
        (tmp_path / "new" / MARK).unlink()  # as if it were no longer mounted
        await controller.wait(lambda: len(controller.registrations) == 3)
        assert controller.registrations[2].filesystems == {"bb": here.identity}
        (Path(here.path) / MARK).unlink()
        assert await site.ended(process) == 1  # the last one: others take over from who is silent
        assert log.read_text().count("no shared filesystem of the cluster is on this machine") == 2
        assert len(controller.registrations) == 3
    finally:
        await controller.stop()
