"""dw_wlm_cli and dwstat, called as by burst_buffer/datawarp, in each shell that may be /bin/sh."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from forebay.cluster.slurm import RUN, programs
from forebay.cluster.slurm.fifos import SLOTS
from forebay.cluster.slurm.files import BELIEVED_S, uptime_s
from forebay.replica.values import parse_size
from tests.cluster.harness import story, until
from tests.cluster.slurm.host import UID, Host
from tests.cluster.slurm.leader import GRAIN, PYTHON, put_programs
from tests.cluster.slurm.test_bridge import VALIDATE_TIMEOUT_S
from tests.fuzzing.external_jobs import interpreters

SHELLS = [found for name in ("dash", "bash", "ksh", "zsh") if (found := shutil.which(name, path="/usr/bin:/bin"))]

pytestmark = pytest.mark.skipif(not interpreters(), reason="no Lua is installed: scripts/install-backends --slurm")


class Datawarp:
    """The programs of one host, in one shell."""

    def __init__(self, host: Host, directory: Path, shell: str) -> None:
        self.host = host
        self._directory = directory
        put_programs(directory, host.run, shell)

    async def start(self, name: str, *words: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            str(self._directory / name), *words, stdout=subprocess.PIPE, start_new_session=True
        )

    async def asked(self, name: str, *words: str) -> tuple[int | None, str]:
        return await self.end_of(await self.start(name, *words))

    async def end_of(self, process: asyncio.subprocess.Process) -> tuple[int | None, str]:
        said, _ = await process.communicate()
        return process.returncode, said.decode()

    async def call(self, function: str, *words: str) -> tuple[int | None, str]:
        return await self.asked("dw_wlm_cli", "--function", function, *words)

    async def begin(self, function: str, job: str) -> asyncio.subprocess.Process:
        return await self.start("dw_wlm_cli", *self.words(function, job))

    def words(self, function: str, job: str) -> list[str]:
        return ["--function", function, "--token", job, "--job", str(self.host.script)]

    async def set_up(self, job: str = "42", capacity: str = "fast:8MiB") -> tuple[int | None, str]:
        words = ("--caller", "SLURM", "--user", UID, "--groupid", UID, "--capacity", capacity)
        return await self.asked("dw_wlm_cli", *self.words("setup", job), *words)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture(params=SHELLS)
def datawarp(request: pytest.FixtureRequest, host: Host, tmp_path: Path) -> Datawarp:
    directory = tmp_path / "programs"
    directory.mkdir()
    return Datawarp(host, directory, request.param)


@story
async def test_dw_wlm_cli_and_dwstat_output_matches_slurms_parser(
    host: Host, datawarp: Datawarp, tmp_path: Path
) -> None:
    asked, function = datawarp.asked, datawarp.call
    job = ("--token", "42", "--job", str(host.script))
    async with host.bridge():
        code, text = await function("pools")
        assert (code, json.loads(text)["pools"][0]["free"]) == (0, 64)
        assert await function("show_sessions") == (0, '{"sessions": []}\n')
        assert await function("job_process", "--job", str(host.script)) == (0, "job_file_valid True\n")
        assert await datawarp.set_up() == (0, "")
        assert await function("data_in", *job) == (0, "")
        assert await function("real_size", "--token", "42") == (0, "")
        assert await function("paths", *job, "--pathfile", str(tmp_path / "env")) == (0, "")
        assert "DW_JOB_STRIPED=" in (tmp_path / "env").read_text()
        # The file of pools is renewed periodically.
        await until(lambda: json.loads((host.run / "pools.json").read_text())["pools"][0]["free"] == 56)
        for words in ((), ("pools",)):
            table = [line.split() for line in (await asked("dwstat", *words))[1].splitlines()]
            assert table == [["pool", "units", "quantity", "free", "gran"], ["fast", "bytes", "64MiB", "56MiB", "1MiB"]]
        table = [line.split() for line in (await asked("dwstat", "sessions"))[1].splitlines()]
        assert table[0] == ["sess", "state", "token", "creator", "owner", "created", "expiration", "nodes"]
        assert table[1][1:5] == ["CA---", "42", "SLURM", UID] and table[1][6:] == ["never", "0"]
        number = table[1][0]
        table = [line.split() for line in (await asked("dwstat", "instances"))[1].splitlines()]
        assert table[1] == [number, "CA---", number, "8MiB", "1", "42"]
        table = [line.split() for line in (await asked("dwstat", "configurations"))[1].splitlines()]
        assert table[1] == [number, "CA---", number, "scratch", "stripe", "0"]
        assert (await asked("dwstat", "42"))[1].startswith("job 42: staged-in")
        for name in ("pre_run", "post_run", "data_out"):
            assert await function(name, *job) == (0, ""), name
        assert await function("teardown", *job, "--hurry") == (0, "")
        assert await function("paths", *job, "--pathfile", str(tmp_path / "env")) == (1, "No matching session\n")
        assert (await asked("dwstat", "42"))[1].startswith("job 42: over")


@pytest.mark.campaign(2)
@story
async def test_more_calls_than_slots_get_their_own_replies(host: Host, datawarp: Datawarp) -> None:
    host.leader.hold.add("staging-in")
    jobs = [str(job) for job in range(100, 104 + SLOTS)]
    async with host.bridge():
        for job in jobs:
            await host.set_up(job)
        calls = [await datawarp.begin("data_in", job) for job in jobs]
        await until(lambda: {("stage_in_external_job", job) for job in jobs} <= set(host.leader.asked))
        for number, job in enumerate(jobs):
            host.leader.end(job, "stage-in-failed" if number % 2 else "staged-in")
        for number, call in enumerate(calls):
            code, said = await datawarp.end_of(call)
            assert (code, bool(said)) == ((1, True) if number % 2 else (0, False))


@story
async def test_a_program_call_survives_a_restart_of_its_bridge(host: Host, datawarp: Datawarp) -> None:
    host.leader.hold.add("staging-in")
    async with host.bridge():
        await host.set_up()
        call = await datawarp.begin("data_in", "42")
        await until(lambda: len(host.waiting()) == 1)
    host.leader.end("42", "staged-in")
    async with host.bridge():
        assert await datawarp.end_of(call) == (0, "")


@story
async def test_sizes_in_slurms_notation_are_parsed(host: Host, datawarp: Datawarp) -> None:
    text = "#!/bin/sh\n#BB_LUA pool=fast capacity=16MB\n"
    host.script.write_bytes(text.encode() + b"\0")  # like a script in which Slurm has replaced symbols
    async with host.bridge():
        code, said = await datawarp.set_up(capacity="fast:8MiB")
        assert code == 1 and "Slurm counts 8388608 bytes of pool fast, but the directives request 16777216" in said
        assert await datawarp.set_up(capacity="fast:16MiB") == (0, "")
        assert await datawarp.set_up(capacity=f"fast:{16 * GRAIN}") == (0, "")
        for size in ("", "8EiB", "8MiB,", "-1"):
            assert await datawarp.set_up("43", size) == (
                1,
                "forebay: setup needs job, uid, gid, pool, size and script\n",
            )


@story
async def test_an_invalid_call_is_rejected_without_leftovers(host: Host, datawarp: Datawarp) -> None:
    async with host.bridge():
        for token in ("", "lake", "../1", "0", "042", "1x", "12345678901"):
            assert await datawarp.call("data_in", "--token", token) == (1, "token not found\n"), token
            assert await datawarp.call("paths", "--token", token, "--pathfile", "/dev/null") == (1, "token not found\n")
        assert await datawarp.call("setup", "--token", "7", "-C", "fast:1MiB\n2") == (
            1, "a word of the call has a line break\n",
        )  # fmt: skip
        code, said = await datawarp.call("setup", "--token", "7", "-C", "x" * 5000)
        assert code == 1 and said.startswith("the call has more than ")
        for function in ("setup", "data_in", "job_process"):
            code, said = await datawarp.call(function, "--token", "7", "--job", "/no/script")
            assert (code, said) == (1, "the job's script /no/script cannot be read\n")
        assert await datawarp.call("no_such", "--token", "7") == (1, "dw_wlm_cli: unknown function 'no_such'\n")
        assert host.waiting() == []


@story
async def test_unread_fifos_do_not_block_a_submission(host: Host, datawarp: Datawarp) -> None:
    async with host.bridge():
        pass
    # The files of a killed or stopped bridge, which are still valid.
    os.mkfifo(host.run / "requests")
    for slot in range(1, SLOTS + 1):
        os.mkfifo(host.run / "slots" / str(slot))
    known = json.loads((host.run / "pools.json").read_text())
    (host.run / "pools.json").write_text(json.dumps({**known, "until": uptime_s() + BELIEVED_S}, separators=(",", ":")))
    began_s = uptime_s()
    code, text = await datawarp.call("job_process", "--job", str(host.script))
    assert code == 1 and text.startswith("the buffer is not available on head1 (bridge not running since ")
    assert uptime_s() < began_s + VALIDATE_TIMEOUT_S
    assert len(os.listdir(host.run / "slots")) == SLOTS - 1


@story
async def test_dw_wlm_cli_accepts_jobs_without_a_bridge_if_configured(host: Host, tmp_path: Path) -> None:
    async with host.bridge(away="accept"):
        pass
    words = ("--function", "job_process", "--job", str(host.script))
    for name in ("pools.json", "site.json"):
        known = json.loads((host.run / name).read_text())
        (host.run / name).write_text(json.dumps({**known, "until": uptime_s() - 0.01}))
    command = [str(put_programs(tmp_path, host.run)), *words]
    done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "job_file_valid True\n")


@story
async def test_without_a_bridge_dw_wlm_cli_replies_at_once_with_no_free_space(host: Host, tmp_path: Path) -> None:
    def asked(name: str, *words: str) -> tuple[int, str]:
        command = [str(tmp_path / name), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        return done.returncode, done.stdout

    put_programs(tmp_path, host.run)
    words = ("--function", "job_process", "--job", str(host.script))
    code, text = asked("dw_wlm_cli", *words)
    assert (code, text.split(" (")[0]) == (1, "the buffer is not available on this host")
    async with host.bridge():
        pass
    # A stopped bridge has a socket, but does not answer.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(host.run / "socket"))
    listener.listen()
    known = json.loads((host.run / "pools.json").read_text())
    for until_s in (uptime_s() + BELIEVED_S, uptime_s() - 0.01):
        (host.run / "pools.json").write_text(json.dumps({**known, "until": until_s}))
        began_s = uptime_s()
        code, text = asked("dw_wlm_cli", *words)
        assert code == 1 and text.startswith("the buffer is not available on head1 (bridge not running since ")
        assert uptime_s() < began_s + VALIDATE_TIMEOUT_S
    code, text = asked("dw_wlm_cli", "--function", "pools")
    assert code == 0
    assert json.loads(text)["pools"] == [
        {"id": "fast", "quantity": 64, "granularity": GRAIN, "free": 0, "units": "bytes"}
    ]
    assert asked("dwstat", "42")[0] == 1
    listener.close()


def test_forebay_bb_is_one_file_for_python_3_6_and_later() -> None:
    text = programs(RUN)["forebay-bb"]
    ast.parse(text, feature_version=(3, 6))
    assert text.startswith(f"{PYTHON} -IS\n")
    assert shutil.which("python3")


@story
async def test_a_task_without_files_gets_the_script_of_its_array(
    host: Host, datawarp: Datawarp, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    array, task = (state / f"hash.{number % 10}" / f"job.{number}" for number in (40, 42))
    array.mkdir(parents=True)
    (array / "script").write_text(host.script.read_text() + "\0")
    host.script = task / "script"
    async with host.bridge(state=state):
        code, text = await datawarp.set_up()
        assert code == 1 and "slurmctld does not list the job" in text
        host.arrays["42"] = "40"
        assert await datawarp.set_up() == (0, "")
        assert (task / "script").samefile(array / "script")
        assert task.stat().st_mode & 0o777 == 0o700
        for function in ("data_in", "pre_run", "post_run", "data_out"):
            assert await datawarp.call(function, *datawarp.words(function, "42")[2:]) == (0, ""), function


@pytest.mark.parametrize("pool", ["fast", "slow"])
@pytest.mark.parametrize("size", ["2MB", "8MiB"])
@story
async def test_a_job_without_a_pool_uses_the_pool_charged_by_slurm(
    host: Host, tmp_path: Path, pool: str, size: str
) -> None:
    directory = tmp_path / "programs"
    directory.mkdir()
    datawarp = Datawarp(host, directory, SHELLS[0])
    host.script.write_text(f"#!/bin/sh\n#DW jobdw capacity={size} access_mode=striped type=scratch\ntrue\n")
    # Slurm rounds up to the granularity of its pool.
    charged = {"2MB": "2MiB", "8MiB": "8MiB"}[size]
    async with host.bridge():
        assert await datawarp.call("job_process", "--job", str(host.script)) == (0, "job_file_valid True\n")
        assert await datawarp.set_up(capacity=f"{pool}:{charged}") == (0, "")
        asked = host.leader.setups["42"]
        assert (asked.pool, asked.size) == (pool, parse_size(charged))
        code, text = await datawarp.set_up("43", capacity=f"{pool}:64MiB")
        assert (code, "Slurm counts 67108864 bytes" in text) == ((1, True) if pool == "fast" else (0, False))
