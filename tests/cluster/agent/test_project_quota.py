"""Buffers on real file systems with project quotas: what a job writes beyond its capacity is refused by the kernel."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.cluster.agent.adapters import QuotaUsage, project_quota
from forebay.cluster.agent.worker.buffer_usage import blocks_of, inodes_of
from forebay.cluster.system import closing, open_directory
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.agent.conftest import Site

MIB = 1024**2

IMAGE_BYTES: Final = 512 * MIB
"""Of a file system: xfs refuses to be made smaller than 300 MiB."""

KINDS: Final = {
    "ext4": ("mkfs.ext4", "-q", "-O", "quota,project", "-E", "quotatype=prjquota"),
    "xfs": ("mkfs.xfs", "-q"),
}


@pytest.fixture(params=KINDS)
def quotas(site: Site, request: pytest.FixtureRequest) -> Iterator[Path]:
    """The agent's directory on a file system that keeps project quotas."""
    program, *_ = KINDS[request.param]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here")
    image = site.directory / "image"
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    made = subprocess.run([*KINDS[request.param], str(image)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no {request.param} can be made: {made.stderr.strip()}")
    site.home.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", request.param, "-o", "loop,prjquota", str(image), str(site.home)],
        capture_output=True,
        text=True,
    )
    if mounted.returncode:
        pytest.skip(f"no {request.param} with prjquota can be mounted here: {mounted.stderr.strip()}")
    try:
        with closing(open_directory(site.home)) as home:
            if not project_quota.is_enforced(home):
                pytest.skip(f"this kernel keeps no project quotas on {request.param}")
        yield site.home
    finally:
        subprocess.run(["umount", "--lazy", str(site.home)], check=True)


def project(directory: Path) -> int:
    with closing(open_directory(directory)) as opened:
        return project_quota.project_of(opened)


def held(home: Path, number: int) -> QuotaUsage:
    with closing(open_directory(home)) as opened:
        return project_quota.read_usage(opened, number)


WRITES: Final = {
    "300MiB": "dd if=/dev/zero of=big bs=1M count=300 2>said && exit 3\ngrep -q 'No space\\|quota' said",
    "20000-files": "i=0; while [ $i -lt 20000 ]; do true > $i || break; i=$((i+1)); done; [ $i -lt 20000 ] || exit 3",
}


@pytest.mark.parametrize("kind", WRITES)
def test_what_a_script_writes_beyond_its_capacity_is_refused_by_the_file_system(
    site: Site, quotas: Path, kind: str
) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            assert controller.registrations[0].capacity_control == "project_quota"
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)
            buffer = quotas / "buffers" / "7"
            number = project(buffer)
            assert number and project(buffer / "striped") == number
            script = f'#!/bin/sh\ncd "$DW_JOB_STRIPED" || exit 9\n{WRITES[kind]}\nexit 0\n'
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=MIB))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            found = held(quotas, number)
            assert found.size_bytes <= blocks_of(MIB) and found.inodes <= inodes_of(MIB) + 10
            await controller.order(site.order(7, 3, "teardown", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 3), OperationDone)
            assert not buffer.exists() and held(quotas, number) == (0, 0)

    asyncio.run(story())


def test_a_persistent_buffer_is_held_to_its_capacity_too(site: Site, quotas: Path) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            create = (CreatePersistent("lake", MIB),)
            await controller.order(site.order(7, 1, "stage_in", creates=create))
            assert isinstance(await controller.result(7, 1), OperationDone)
            await controller.order(site.order(8, 1, "stage_in", uses=("lake",)))
            assert isinstance(await controller.result(8, 1), OperationDone)
            script = f'#!/bin/sh\ncd "${{DW_PERSISTENT_STRIPED_lake:?}}" || exit 9\n{WRITES["300MiB"]}\nexit 0\n'
            await controller.order(site.order(8, 2, "run", script=script, uses=("lake",)))
            assert await controller.result(8, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            number = project(quotas / "persistent" / "lake")
            assert MIB <= held(quotas, number).size_bytes <= blocks_of(MIB)
            await controller.order(site.order(9, 1, "stage_in", destroys=(DestroyPersistent("lake"),)))
            assert isinstance(await controller.result(9, 1), OperationDone)
            assert held(quotas, number) == (0, 0)

    asyncio.run(story())


def test_what_is_taken_out_of_its_project_by_its_owner_is_seen_by_the_watch(site: Site, quotas: Path) -> None:
    """Linux lets the owner of a file choose its project."""

    async def story() -> None:
        async with site.running() as (controller, _):
            await controller.order(site.order(7, 1, "stage_in", capacity_bytes=MIB))
            assert isinstance(await controller.result(7, 1), OperationDone)
            writes = (
                "chattr -p 0 . && chattr -P . && dd if=/dev/zero of=big bs=1M count=300 && while :; do sleep 1; done"
            )
            script = f'#!/bin/sh\nmkdir "$DW_JOB_STRIPED/out" && cd "$DW_JOB_STRIPED/out" || exit 9\n{writes}\n'
            await controller.order(site.order(7, 2, "run", script=script, capacity_bytes=MIB, time_limit_s=600))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded)
            if ended.exit_code == 1:
                pytest.skip("chattr cannot change projects here")
            assert ended.result is JobState.FAILED and "request more capacity" in ended.message

    asyncio.run(story())


def test_two_directories_never_share_a_project(site: Site, quotas: Path) -> None:
    made = []
    with closing(open_directory(quotas)) as home:
        for name in ("a", "b", "c"):
            os.mkdir(name, dir_fd=home)
            with closing(open_directory(name, dir_fd=home)) as directory:
                # One seed: their ids would be the same.
                project_quota.hold(directory, "same", MIB)
                project_quota.hold(directory, "another", 2 * MIB)
                made.append(project_quota.project_of(directory))
                os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=directory))
    assert len(set(made)) == 3


def test_a_directory_without_quotas_has_none(tmp_path: Path) -> None:
    with closing(open_directory("/proc")) as directory:
        assert not project_quota.is_enforced(directory) and project_quota.project_of(directory) == 0
