"""burst_buffer.lua, called as by each release of Slurm, with a real bridge and a double of the leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from forebay.cluster.slurm.files import SlurmFiles, uptime_s
from tests.cluster.harness import story, until
from tests.cluster.slurm.host import Host
from tests.cluster.slurm.releases import RELEASES, Value
from tests.fuzzing.external_jobs import interpreters

pytestmark = pytest.mark.skipif(not interpreters(), reason="no Lua is installed: scripts/install-backends --slurm")


@pytest.fixture(params=enumerate(RELEASES.values()), ids=RELEASES)
def host(request: pytest.FixtureRequest, tmp_path: Path) -> Host:
    """Host of each release; the installed Lua interpreters alternate."""
    number, release = request.param
    return Host(tmp_path, release, interpreters()[number % len(interpreters())])


async def stage(host: Host, direction: str, job: str = "42") -> tuple[int, str]:
    """Stage a job in or out as Slurm does; return the last code and text."""
    found = await host.perform(f"data_{direction}", job)
    if not host.release.polls or found[0] != 0:
        return found
    while (found := await host.perform(f"test_data_{direction}", job)) == (0, "BUSY"):
        pass
    return found


@story
async def test_a_job_completes_its_life_cycle_in_each_release(host: Host, tmp_path: Path) -> None:
    async with host.bridge():
        for function in ("job_process", "setup"):
            assert await host.perform(function) == (0, ""), function
        assert await stage(host, "in") == (0, "")
        assert host.leader.external_jobs["42"]["phase"] == "staged-in"
        for function in ("real_size", "paths", "pre_run", "post_run"):
            assert await host.perform(function, file=str(tmp_path / "file")) == (0, ""), function
        assert "DW_JOB_STRIPED=" in (tmp_path / "file").read_text()
        assert await stage(host, "out") == (0, "")
        assert await host.perform("job_teardown", hurry="false") == (0, "")
        assert host.leader.external_jobs["42"]["phase"] == "over"


@pytest.mark.parametrize("ended", [True, False])
@story
async def test_results_of_a_run_that_slurm_has_forgotten_are_exported(host: Host, tmp_path: Path, ended: bool) -> None:
    async with host.bridge():
        assert await host.perform("setup") == (0, "")
        assert await stage(host, "in") == (0, "")
        assert await host.perform("pre_run", file=str(tmp_path / "file")) == (0, "")
        host.leader.asked.clear()
        host.leader.hold.add("staging-out")
        if ended:
            host.ended.add("42")
        teardown = asyncio.create_task(host.perform("job_teardown", hurry="true"))
        if ended:
            await until(lambda: host.leader.external_jobs["42"]["phase"] == "staging-out")
            host.leader.end("42", "over")
        assert await teardown == (0, "")
        assert (("stage_out_external_job", "42") in host.leader.asked) == ended
        assert host.leader.hurries == [not ended]


@story
async def test_slurm_receives_the_result_of_a_stage_only_at_its_end(host: Host) -> None:
    host.leader.hold |= {"staging-in", "staging-out"}
    async with host.bridge():
        assert await host.perform("setup") == (0, "")
        for direction, success in (("in", "staged-in"), ("out", "over")):
            phase = f"staging-{direction}"
            for ends_as, expected in ((f"stage-{direction}-failed", (-1, "/a: no such file")), (success, (0, ""))):
                staging = asyncio.create_task(stage(host, direction))
                await until(lambda phase=phase: host.leader.external_jobs["42"]["phase"] == phase)
                host.leader.end("42", ends_as, expected[1])
                assert await staging == expected
            if direction == "in":
                for function in ("pre_run", "post_run"):
                    assert await host.perform(function) == (0, "")


def test_a_forbidden_user_is_rejected_at_submission_if_slurm_passes_users(host: Host) -> None:
    files = SlurmFiles(host.run, "head1")
    files.publish()
    files.renew(host.leader._site(), uptime_s(), "10:03", {"allow": [1001]})
    rejected = (0, "") if host.release.name == "22.05" else (-1, "User not found in AllowUsers")

    @story
    async def submit() -> None:
        assert await host.perform("job_process", uid="1001") == (0, "")
        assert await host.perform("job_process", uid="1002") == rejected

    submit()


@pytest.mark.parametrize("symbols", [False, True], ids=["plain", "symbols"])
@story
async def test_a_task_split_from_an_array_is_set_up(host: Host, tmp_path: Path, symbols: bool) -> None:
    state = tmp_path / "state"
    array, task = (state / f"hash.{number % 10}" / f"job.{number}" for number in (40, 42))
    array.mkdir(parents=True)
    (array / "script").write_text(host.script.read_text())
    if host.release.makes_task_files:
        task.mkdir(parents=True)
        (task / "script").hardlink_to(array / "script")
    # If a directive has symbols, Slurm passes a file with the symbols replaced.
    words: dict[str, Value] = {
        "script": str(host.script if symbols else task / "script"), "table": {"job_id": 42, "array_job_id": 40},
    }  # fmt: skip
    async with host.bridge(state=state):
        assert await host.perform("setup", **words) == (0, "")
        assert await stage(host, "in") == (0, "")
        assert await host.perform("paths", file=str(task / "path_file"), **words) == (0, "")
    assert "DW_JOB_STRIPED=" in (task / "path_file").read_text()
    assert task.stat().st_mode & 0o077 == 0 or host.release.makes_task_files
