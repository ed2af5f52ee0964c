"""A site's own burst_buffer.lua beside Forebay's: each job is handled by the script of its directive."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from forebay.cluster.slurm import SITE_SCRIPT
from tests.cluster.harness import story
from tests.cluster.slurm.host import Host
from tests.cluster.slurm.leader import GRAIN
from tests.cluster.slurm.releases import RELEASES
from tests.fuzzing.external_jobs import interpreters

pytestmark = pytest.mark.skipif(not interpreters(), reason="no Lua is installed: scripts/install-backends --slurm")

THEIRS = "#!/bin/sh\n\n#BB_SCRATCH pool=scratch capacity=1GiB from=%s\ntrue\n"
"""Job of the site's script."""

SECOND = """-- directive: BB_SCRATCH
-- A script as a site has it: a pool of its own, a directory for each job, and a copy in and out.
local HERE = "@HERE@"
local calls = 0
local function from_of(path)
  local file = assert(io.open(path))
  local text = file:read("*a")
  file:close()
  return text:match("#BB_SCRATCH.-from=(%S+)")
end
local function copy(from, to)
  local source = io.open(from, "rb")
  if not source then return slurm.ERROR, from .. ": no such file" end
  local into = assert(io.open(to, "wb"))
  into:write(source:read("*a"))
  into:close()
  source:close()
  return slurm.SUCCESS
end
function slurm_bb_job_process(path)
  if not from_of(path) then return slurm.ERROR, "from= is missing" end
  return slurm.SUCCESS
end
function slurm_bb_pools()
  return slurm.SUCCESS, '{"pools": [ {"id":"scratch","quantity":9,"granularity":1} ] }'
end
function slurm_bb_setup(job) return copy("/dev/null", HERE .. "/scratch." .. job) end
function slurm_bb_data_in(job, path) return copy(from_of(path), HERE .. "/scratch." .. job) end
function slurm_bb_test_data_in() calls = calls + 1; return slurm.SUCCESS end
function slurm_bb_real_size(job) return slurm.SUCCESS, "1024" end
function slurm_bb_paths(job, path, file)
  local into = assert(io.open(file, "w"))
  into:write("SCRATCH=" .. HERE .. "/scratch." .. job .. "\\n")
  into:close()
  return slurm.SUCCESS
end
function slurm_bb_pre_run() return slurm.SUCCESS end
function slurm_bb_post_run() return slurm.SUCCESS end
function slurm_bb_data_out(job, path) return copy(HERE .. "/scratch." .. job, HERE .. "/out." .. job) end
function slurm_bb_job_teardown(job) os.remove(HERE .. "/scratch." .. job) return slurm.SUCCESS end
function slurm_bb_get_status(...) return slurm.SUCCESS, "scratch: " .. table.concat({ ... }, " ") end
"""


@pytest.fixture(params=enumerate(RELEASES.values()), ids=RELEASES)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    """Host of each release with both scripts; the installed Lua interpreters alternate."""
    number, release = request.param
    put(tmp_path, SECOND)
    return Host(tmp_path, release, interpreters()[number % len(interpreters())])


def put(directory: Path, text: str) -> None:
    (directory / SITE_SCRIPT).write_text(text.replace("@HERE@", str(directory)))


async def life(host: Host, job: str, script: Path, file: Path) -> list[tuple[int, str]]:
    """Call every function in a job's life that the release has; return the results."""
    order = [
        "job_process", "setup", "data_in", "test_data_in", "real_size", "paths", "pre_run", "post_run", "data_out",
        "test_data_out", "job_teardown",
    ]  # fmt: skip
    return [
        await host.perform(function, job, script=str(script), file=str(file), hurry="false")
        for function in order
        if function in host.release.functions
    ]


@story
async def test_each_job_is_handled_by_the_script_of_its_directive(host: Host, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("data")
    script = tmp_path / "theirs"
    script.write_text(THEIRS % (tmp_path / "in"))
    async with host.bridge():
        theirs = await life(host, "7", script, tmp_path / "variables.7")
        assert theirs == [(0, "1024") if said else (0, "") for _, said in theirs]
        assert [said for _, said in theirs].count("1024") == 1
        assert (tmp_path / "out.7").read_text() == "data" and not (tmp_path / "scratch.7").exists()
        assert (tmp_path / "variables.7").read_text() == f"SCRATCH={tmp_path}/scratch.7\n"
        assert host.leader.asked == [("register_scheduler", "")] and host.leader.external_jobs == {}
        ours = await life(host, "42", host.script, tmp_path / "variables.42")
        assert ours == [(0, "")] * len(theirs)
        assert "DW_JOB_STRIPED=" in (tmp_path / "variables.42").read_text()
        assert host.leader.external_jobs["42"]["phase"] == "over"
        assert [path.name for path in tmp_path.glob("*.42")] == ["variables.42"]


@story
async def test_an_array_task_without_a_script_is_identified_by_its_array(tmp_path: Path) -> None:
    put(tmp_path, SECOND.replace('HERE .. "/scratch." .. job', '"/dev/null"'))
    host = Host(tmp_path, RELEASES["24.11"])
    (tmp_path / "hash.0" / "job.40").mkdir(parents=True)
    (tmp_path / "hash.0" / "job.40" / "script").write_text(THEIRS % "/dev/null")
    split = tmp_path / "hash.3" / "job.43" / "script"
    async with host.bridge():
        called = await host.perform("setup", "43", script=str(split), table={"job_id": 43, "array_job_id": 40})
        assert called == (0, "") and host.leader.external_jobs == {}


@story
async def test_slurm_gets_the_pools_of_both_scripts(host: Host, tmp_path: Path) -> None:
    async with host.bridge():
        code, text = await host.call("pools")
        assert code == 0 and [pool["id"] for pool in json.loads(text)["pools"]] == ["fast", "scratch"]
        host.leader.total = 0
        for faulty in ("-- directive: BB_SCRATCH\nthis is no Lua", "-- directive: BB_SCRATCH\nerror('away')"):
            put(tmp_path, faulty)
            code, text = await host.call("pools")
            assert code == 0 and [pool["id"] for pool in json.loads(text)["pools"]] == ["fast"]


@story
async def test_a_job_with_both_directives_is_rejected(host: Host, tmp_path: Path) -> None:
    both = tmp_path / "both"
    both.write_text(host.script.read_text().replace("true", "#BB_SCRATCH from=/in"))
    unread = tmp_path / "unread"
    unread.write_text("#!/bin/sh\n#BB_SCRATCH pool=scratch\ntrue\n#BB_LUA pool=fast\n")
    async with host.bridge():
        code, said = await host.perform("job_process", script=str(both))
        assert code == -1
        assert said == "the job has directives of two burst buffers, #BB_LUA and #BB_SCRATCH; use one of them"
        # Lines after the first command are no directives.
        assert await host.perform("job_process", script=str(unread)) == (-1, "from= is missing")
        put(tmp_path, "-- directive: BB_SCRATCH\nthis is no Lua")
        code, said = await host.perform("job_process", script=str(unread))
        assert code == -1 and SITE_SCRIPT in said
        assert await host.perform("job_process") == (0, "")


@story
async def test_a_job_without_its_script_is_torn_down_by_both_scripts(host: Host, tmp_path: Path) -> None:
    (tmp_path / "scratch.42").touch()
    async with host.bridge():
        assert await host.set_up() == (0, "")
        assert await host.perform("job_teardown", script=str(tmp_path / "gone")) == (0, "")
        assert host.leader.external_jobs["42"]["phase"] == "lingering" and not (tmp_path / "scratch.42").exists()


@story
async def test_a_site_script_without_a_directive_is_not_called(host: Host, tmp_path: Path) -> None:
    put(tmp_path, SECOND.replace("-- directive: BB_SCRATCH\n", ""))
    async with host.bridge():
        assert (await host.call("pools"))[1].count("id") == 1
        assert await host.set_up() == (0, "")
        assert host.leader.external_jobs["42"]["size"] == 8 * GRAIN


@story
async def test_each_script_answers_its_own_status_query(host: Host) -> None:
    asker = [] if host.release.name == "22.05" else ["1000", "1001"]
    async with host.bridge():
        asked = await host.call("get_status", *asker, "lua", "site", "a", "b")
        assert asked == (0, " ".join(["scratch:", *asker, "lua", "a", "b"]))
        assert (await host.call("get_status", *asker, "lua", "42"))[1].startswith("job 42: ")


@story
async def test_the_site_script_works_without_a_bridge(host: Host, tmp_path: Path) -> None:
    script = tmp_path / "theirs"
    script.write_text(THEIRS % "/dev/null")
    found = await life(host, "7", script, tmp_path / "variables")
    assert {code for code, _ in found} == {0}
