"""Persistent buffers through dw_wlm_cli, as burst_buffer/datawarp calls it."""

from __future__ import annotations

import asyncio
import os
import pwd
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from forebay.cluster.slurm.files import PERSISTENT_ID
from tests.cluster.harness import story
from tests.cluster.slurm.host import UID, Host
from tests.cluster.slurm.leader import GRAIN, put_programs
from tests.cluster.slurm.test_sessions import shown, tokens

Asked = Callable[..., Awaitable[tuple[int, str]]]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def asked(host: Host, tmp_path: Path) -> Asked:
    program = put_programs(tmp_path, host.run)

    async def function(name: str, *words: str) -> tuple[int, str]:
        command = [str(program), "--function", name, *words]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout

    return function


CREATES = ("-c", "CLI", "-t", "lake", "-u", UID, "-C", f"fast:{4 * GRAIN}", "-a", "striped", "-T", "scratch")


def of_job(directory: Path, job: str, text: str) -> str:
    """Return the path of a job's script in slurmctld's directory."""
    path = directory / f"hash.{job[-1]}" / f"job.{job}" / "script"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return str(path)


@story
async def test_a_persistent_buffer_is_created_listed_and_deleted_for_its_user(
    host: Host, asked: Asked, tmp_path: Path
) -> None:
    script = of_job(tmp_path, "7", "#!/bin/sh\n#BB destroy_persistent name=lake\n")
    async with host.bridge():
        assert await asked("create_persistent", *CREATES) == (0, "created\n")
        assert host.leader.persistent["lake"].user == pwd.getpwuid(int(UID)).pw_name
        [session] = shown(host.run, "sessions")
        assert (session["token"], session["owner"]) == ("lake", int(UID))
        assert session["id"] == PERSISTENT_ID + 9, "its number is that of a job, too"
        assert shown(host.run, "instances")[0]["capacity"]["bytes"] == 4 * GRAIN
        host.owners["7"] = int(UID)
        assert await asked("teardown", "--token", "lake", "--job", script, "--hurry") == (0, "")
        assert host.leader.persistent == {} and tokens(host.run) == []
    assert [name for name, _ in host.leader.asked if "persistent" in name] == [
        "make_persistent", "make_persistent", "remove_persistent", "remove_persistent",
    ]  # fmt: skip


@story
async def test_a_persistent_buffer_stays_listed_during_its_deletion(host: Host, asked: Asked) -> None:
    # Slurm's plugin uses its record after the removal, so the buffer must stay listed until then.
    async with host.bridge():
        assert await asked("create_persistent", *CREATES) == (0, "created\n")
        known = host.leader.persistent["lake"]
        host.leader.persistent["lake"] = type(known)(
            **{name: getattr(known, name) for name in known.__struct_fields__} | {"state": "deleting"}
        )
    (host.run / "sessions" / "lake").unlink()
    (host.run / "site.json").unlink()
    async with host.bridge():
        assert tokens(host.run) == ["lake"]


@story
async def test_another_users_persistent_buffer_is_not_deleted(host: Host, asked: Asked, tmp_path: Path) -> None:
    other = next(account.pw_uid for account in pwd.getpwall() if account.pw_uid not in (0, int(UID)))
    script = of_job(tmp_path, "7", "#!/bin/sh\n#BB destroy_persistent name=lake\n")
    async with host.bridge():
        assert await asked("create_persistent", *CREATES) == (0, "created\n")
        host.owners["7"] = other
        assert await asked("teardown", "--token", "lake", "--job", script) == (1, "lake is another user's\n")
        del host.owners["7"]
        assert await asked("teardown", "--token", "lake", "--job", script) == (1, "slurmctld does not know job 7\n")
        code, said = await asked("teardown", "--token", "lake", "--job", "/elsewhere")
        assert code == 1 and "lake cannot be removed: the script's path" in said
        assert tokens(host.run) == ["lake"]


@story
async def test_a_failed_creation_is_abandoned_with_the_reason(host: Host, asked: Asked) -> None:
    host.leader.persistent_fails = "no mover of place bb is up"
    async with host.bridge():
        assert await asked("create_persistent", *CREATES) == (1, "no mover of place bb is up\n")
        assert [name for name, _ in host.leader.asked if "persistent" in name][-1] == "remove_persistent"
        assert tokens(host.run) == []


@pytest.mark.parametrize(
    "option, value, said",
    [
        ("-t", "1lake", "the name of a persistent buffer starts with a digit"),
        ("-t", "../x", "the name of a persistent buffer '../x' has a character"),
        ("-a", "private", "a persistent buffer must be striped scratch, but private scratch was requested"),
        ("-T", "cache", "a persistent buffer must be striped scratch, but striped cache was requested"),
        ("-C", "fast:4N", "forebay: create_persistent needs a name, a user, a pool and a size"),
        ("-u", "4294967294", "this host has no user with the ID 4294967294"),
    ],
)
def test_an_invalid_persistent_buffer_request_is_rejected(
    host: Host, asked: Asked, option: str, value: str, said: str
) -> None:
    words = list(CREATES)
    words[words.index(option) + 1] = value

    @story
    async def run() -> None:
        async with host.bridge():
            code, text = await asked("create_persistent", *words)
            assert code == 1 and text.startswith(said)
            assert os.listdir(host.run / "sessions") == []

    run()


@story
async def test_a_job_that_only_manages_persistent_buffers_is_no_external_job(
    host: Host, asked: Asked, tmp_path: Path
) -> None:
    script = of_job(tmp_path, "8", "#!/bin/sh\n#BB create_persistent name=lake capacity=4MiB pool=fast\n")
    token = ("--token", "8", "--job", script)
    async with host.bridge():
        capacity = ("--caller", "SLURM", "--user", UID, "--groupid", UID, "--capacity", "fast:0")
        assert await asked("setup", *token, *capacity) == (0, "")
        assert await asked("data_in", *token) == (0, "")
        for name in ("post_run", "data_out", "teardown"):
            assert await asked(name, *token) == (0, ""), name
        assert host.leader.external_jobs.get("8", {"phase": "none"})["phase"] == "none"
        assert tokens(host.run) == []


@story
async def test_a_job_finds_its_persistent_buffers_by_variables(host: Host, asked: Asked, tmp_path: Path) -> None:
    script = of_job(tmp_path, "9", "#!/bin/sh\n#DW persistentdw name=lake\n")
    token, file = ("--token", "9", "--job", script), tmp_path / "env"
    capacity = ("--caller", "SLURM", "--user", UID, "--groupid", UID, "--capacity", "fast:0")
    async with host.bridge():
        assert await asked("setup", *token, *capacity) == (0, "")
        host.leader.external_jobs["9"]["persistent"] = {"lake": "/bb/fast/slurm/lake.9.1"}
        assert await asked("data_in", *token) == (0, "")
        assert await asked("paths", *token, "--pathfile", str(file)) == (0, "")
    assert file.read_text() == "DW_PERSISTENT_STRIPED_lake=/bb/fast/slurm/lake.9.1\n"
