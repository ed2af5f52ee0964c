"""Adapters of shared filesystems in a real mover: what limits a buffer before its user can write, and what fails."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from forebay.cluster.agent.files.filesystems import mark
from forebay.replica.messages.commands import OperationDone, OperationFailed
from forebay.replica.model import FilesystemLayout
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.orders import OrderFilesystem
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.agent.adapters.fakes import GPFS, GPFS_PROGRAMS, LFS, FakePrograms
from tests.cluster.agent.adapters.test_adapters import COMMAND
from tests.cluster.agent.conftest import Site

MIB = 1024**2


def prepare(site: Site, programs: FakePrograms, quota: str, body: str = "") -> OrderFilesystem:
    if quota == "lustre":
        programs.write("lfs", body or LFS)
    elif quota == "gpfs":
        for name in GPFS_PROGRAMS:
            programs.write(name, GPFS)
    program = programs.write("site-quota", body or COMMAND)
    site.configure(more=f'tool_directories = ["{programs.directory}"]\nfilesystem_command = "{program}"')
    top = site.directory / "bb"
    top.mkdir(exist_ok=True)
    layout = FilesystemLayout(quota, 4) if quota != "gpfs" else FilesystemLayout()
    return OrderFilesystem("bb", str(top), mark(str(top)), "test/7.1", quota, layout)


@pytest.mark.parametrize("quota", ["lustre", "gpfs", "command"])
def test_a_buffer_is_limited_and_laid_out_before_data_arrives_and_its_limit_goes_with_it(
    site: Site, programs: FakePrograms, quota: str
) -> None:
    place = prepare(site, programs, quota)
    (site.sources / "file").write_bytes(b"x" * MIB)
    transfer = Transfer(TransferKind.FILE, str(site.sources / "file"), "$DW_JOB_STRIPED/file")

    async def story() -> None:
        async with site.running() as (controller, _):
            order = site.order(7, 1, "stage_in", transfers=(transfer,), filesystem=place, capacity_bytes=4 * MIB)
            await controller.order(order)
            done = await controller.result(7, 1)
            assert isinstance(done, OperationDone), done
            kept = json.loads(programs.state.read_text())
            limits = kept["filesets"] if quota == "gpfs" else kept["limits"]
            assert len(limits) == 1
            if quota != "gpfs":
                assert kept.get("stripes") or kept["layout"][0] == 4
            await controller.order(site.order(7, 2, "teardown", filesystem=place, capacity_bytes=4 * MIB))
            done = await controller.result(7, 2)
            assert isinstance(done, OperationDone), done
            assert os.listdir(Path(place.path) / "test") == []
            kept = json.loads(programs.state.read_text())
            left = kept["filesets"] if quota == "gpfs" else kept["limits"]
            assert not [one for one in left.values() if not isinstance(one, dict) or any(one.values())]

    asyncio.run(story())


def test_a_persistent_buffer_has_its_limit_too(site: Site, programs: FakePrograms) -> None:
    place = prepare(site, programs, "command")

    async def story() -> None:
        async with site.running() as (controller, _):
            creates = (CreatePersistent("lake", 4 * MIB),)
            await controller.order(site.order(7, 1, "stage_in", creates=creates, persistent=(("lake", place),)))
            done = await controller.result(7, 1)
            assert isinstance(done, OperationDone), done
            (limit,) = json.loads(programs.state.read_text())["limits"].values()
            assert limit["size_bytes"] > 4 * MIB and limit["inodes"] >= 10_000
            gone = (DestroyPersistent("lake"),)
            await controller.order(site.order(8, 1, "stage_in", destroys=gone, persistent=(("lake", place),)))
            assert isinstance(await controller.result(8, 1), OperationDone)
            assert json.loads(programs.state.read_text())["limits"] == {}

    asyncio.run(story())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("sys.exit('the table is full')", "the table is full"),
        ("print('garbage')", "garbage"),
        (COMMAND.replace('limits[path]["size_bytes"]', "7"), "limit of 7 bytes"),
    ],
)
def test_a_limit_that_cannot_be_set_fails_the_stage_and_nothing_is_staged(
    site: Site, programs: FakePrograms, body: str, said: str
) -> None:
    place = prepare(site, programs, "command", body)
    (site.sources / "file").write_bytes(b"x")
    transfer = Transfer(TransferKind.FILE, str(site.sources / "file"), "$DW_JOB_STRIPED/file")

    async def story() -> None:
        async with site.running() as (controller, _):
            order = site.order(7, 1, "stage_in", transfers=(transfer,), filesystem=place, capacity_bytes=4 * MIB)
            await controller.order(order)
            failed = await controller.result(7, 1)
            # It is retried: an operator may correct the program.
            assert isinstance(failed, OperationFailed) and not failed.final and said in failed.message
            assert not list(Path(place.path).rglob("file"))

    asyncio.run(story())
