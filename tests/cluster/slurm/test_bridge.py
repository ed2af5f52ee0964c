"""Bridge as seen from Slurm: burst_buffer.lua in a real Lua, forebay-bb, and a double of the leader."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any, cast

import pytest

from forebay.cluster.agent.files.paths import VARIABLES as INSIDE
from forebay.cluster.client import Client
from forebay.cluster.schemas import TransferView
from forebay.cluster.schemas.external_jobs import ExternalJobView
from forebay.cluster.slurm import bridge as bridge_module
from forebay.cluster.slurm import calls as calls_module
from forebay.cluster.slurm import fifos
from forebay.cluster.slurm.bridge import Bridge, BridgeRefused, cluster_token, keep_token, report_served
from forebay.cluster.slurm.fifos import SLOTS
from forebay.cluster.slurm.files import VARIABLES, DirectoryRefused, SlurmFiles, uptime_s
from forebay.cluster.slurm.slurmctld import SlurmView
from forebay.cluster.system import SystemClock
from tests.cluster.harness import story, until
from tests.cluster.slurm.host import SCRIPT, UID, Host
from tests.cluster.slurm.leader import GRAIN, put_programs
from tests.cluster.slurm.releases import RELEASES
from tests.fuzzing.external_jobs import interpreters

VALIDATE_TIMEOUT_S = 5
"""Seconds after which Slurm ends a check at submission, without a sentence (burst_buffer.conf(5))."""

pytestmark = pytest.mark.skipif(not interpreters(), reason="no Lua is installed: scripts/install-backends --slurm")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@story
async def test_a_job_completes_its_life_cycle(host: Host, tmp_path: Path) -> None:
    async with host.bridge():
        assert await host.call("job_process", str(host.script)) == (0, "")
        assert await host.set_up() == (0, "")
        assert await host.call("data_in", "42", str(host.script)) == (0, "")
        variables = tmp_path / "path_file"
        assert await host.call("paths", "42", str(host.script), str(variables)) == (0, "")
        assert "DW_JOB_STRIPED=/bb/fast/slurm/42.1/striped\n" in variables.read_text()
        for function in ("pre_run", "post_run", "data_out"):
            assert await host.call(function, "42", str(host.script)) == (0, ""), function
        assert await host.call("job_teardown", "42", str(host.script), "false") == (0, "")
        assert (await host.call("paths", "42", str(host.script), str(variables)))[0] == -1
        assert [name for name, job in host.leader.asked if job == "42"] == [
            "set_up_external_job",
            "stage_in_external_job",
            "begin_external_job_run",
            "end_external_job_run",
            "stage_out_external_job",
            "tear_down_external_job",
        ]


@story
async def test_a_run_forgotten_by_slurm_restarts_until_results_are_exported(host: Host) -> None:
    host.leader.hold.add("staging-out")
    async with host.bridge():
        assert await host.set_up() == (0, "")
        for function in ("data_in", "pre_run", "post_run", "pre_run", "post_run"):
            assert await host.call(function, "42", str(host.script)) == (0, ""), function
        process = await host.start("data_out", "42", str(host.script))
        await until(lambda: host.leader.external_jobs["42"]["phase"] == "staging-out")
        assert await host.call("pre_run", "42", str(host.script)) == (-1, "the buffer is staging-out")
        await host.end_of(process)


@story
async def test_waiting_calls_need_no_process_besides_slurms(host: Host) -> None:
    host.leader.hold.add("staging-in")
    async with host.bridge():
        await host.set_up()
        process = await host.start("data_in", "42", str(host.script))
        await until(lambda: len(host.waiting()) == 1)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        assert children.read_text().strip() == ""
        host.leader.end("42", "staged-in")
        assert await host.end_of(process) == (0, "")
        await until(lambda: host.waiting() == [])


@story
async def test_a_call_survives_a_restart_of_its_bridge(host: Host) -> None:
    host.leader.hold.add("staging-in")
    async with host.bridge():
        await host.set_up()
        process = await host.start("data_in", "42", str(host.script))
        await until(lambda: len(host.waiting()) == 1)
    assert host.waiting() == [] and not (host.run / "socket").exists()
    host.leader.end("42", "staged-in")
    async with host.bridge():
        assert await host.end_of(process) == (0, "")


@story
async def test_a_call_during_the_end_of_a_bridge_reaches_the_next_bridge(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    end, late = bridge_module._ended, list[asyncio.subprocess.Process]()

    async def end_slowly(tasks: set[asyncio.Task[Any]]) -> None:
        await end(tasks)
        if not late:
            late.append(await host.start("data_in", "42", str(host.script)))
            await asyncio.sleep(1)

    monkeypatch.setattr(bridge_module, "_ended", end_slowly)
    host.leader.hold.add("staging-in")
    async with host.bridge():
        await host.set_up()
    host.leader.end("42", "staged-in")
    async with host.bridge():
        assert await host.end_of(late[0]) == (0, "")


@story
async def test_a_call_to_a_bridge_that_ends_early_is_repeated(host: Host, tmp_path: Path) -> None:
    host.leader.hold.add("staging-in")
    async with host.bridge():
        await host.set_up()
        program = put_programs(tmp_path, host.run)
        process = await asyncio.create_subprocess_exec(
            str(program), "--function", "data_in", "--token", "42", stdout=subprocess.PIPE
        )
        # A quarter of a second is left until the reply moves to a FIFO.
        await until(lambda: ("stage_in_external_job", "42") in host.leader.asked)
    host.leader.end("42", "staged-in")
    async with host.bridge():
        said, _ = await process.communicate()
        assert (process.returncode, said) == (0, b"")


@story
async def test_more_callers_than_slots_get_their_own_replies(host: Host) -> None:
    host.leader.hold.add("staging-in")
    waiting = [str(job) for job in range(100, 110 + SLOTS)]
    async with host.bridge():
        for job in waiting:
            await host.set_up(job)
        processes = [await host.start("data_in", job, str(host.script)) for job in waiting]
        await until(lambda: {("stage_in_external_job", job) for job in waiting} <= set(host.leader.asked))
        asked = [await host.start("get_status", str(job)) for job in range(10)]
        for job, process in enumerate(asked):
            assert await host.end_of(process) == (0, f"job {job}: Forebay has no buffer of this job\n")
        for job in waiting[::2]:
            host.leader.end(job, "staged-in")
        for process in processes[::2]:
            assert await host.end_of(process) == (0, "")
        assert len(host.waiting()) == len(waiting) / 2
        for job in waiting[1::2]:
            host.leader.end(job, "stage-in-failed")
        for process in processes[1::2]:
            assert (await host.end_of(process))[0] == -1


@story
async def test_an_invalid_request_is_dropped_and_the_next_answered(host: Host) -> None:
    outside = host.run.parent / "outside"
    outside.write_text("as before")
    async with host.bridge():
        calls = host.run / "calls"
        (calls / "1.teardown.7").symlink_to(outside)
        (calls / "2.teardown.7").write_text("no FIFO")
        (calls / "3.setup.7.script").symlink_to(outside)
        lines = [
            b"", b"\0", b"\xff\xfe\0setup", b"../../outside\0get_status", b"1.teardown.7\0teardown\x007\0true",
            b"2.teardown.7\0teardown\x007", b"3.setup.7\0setup\x007", b"4.setup.7", b"65.setup.7\0setup", b"x" * 9000,
        ]  # fmt: skip
        for line in lines:
            requests = os.open(host.run / "requests", os.O_RDWR)
            os.write(requests, line + b"\n")
            os.close(requests)
        assert await host.call("get_status", "7") == (0, "job 7: Forebay has no buffer of this job\n")
    assert outside.read_text() == "as before"


@story
async def test_the_slot_of_a_killed_caller_is_recreated(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr(fifos, "uptime_s", lambda: now_s)
    host.run.mkdir()
    taken: list[fifos.FifoRequest] = []
    mine = fifos.Fifos(host.run, taken.append)
    mine.start()
    for slot in range(1, SLOTS + 1):
        os.rename(host.run / "slots" / str(slot), host.run / "calls" / f"{slot}.data_in.{slot}")
    (host.run / "calls" / "5.setup.5.script").write_text("half a scri")
    answered = mine.open_reply("9.data_in.9")
    assert answered is not None
    mine.sweep()
    assert len(os.listdir(host.run / "slots")) == SLOTS, "whoever calls next finds one at once"
    now_s += fifos.ABANDONED_S + 1
    mine.sweep()
    assert os.listdir(host.run / "calls") == ["9.data_in.9"], "what is being answered stays"
    mine.finish_reply("9.data_in.9", answered)
    mine.stop()
    assert os.listdir(host.run / "calls") == os.listdir(host.run / "slots") == [] and taken == []


@story
async def test_callers_that_open_a_fifo_of_a_dead_bridge_are_woken(host: Host) -> None:
    (host.run / "calls").mkdir(parents=True)
    left = host.run / "calls" / "7.abc"
    os.mkfifo(left)
    process = await asyncio.create_subprocess_exec("cat", str(left), stdout=asyncio.subprocess.PIPE)
    about = Path(f"/proc/{process.pid}")
    # The caller sleeps, and can only be waiting for the FIFO.
    await until(lambda: (about / "stat").read_text().split()[1:3] == ["(cat)", "S"])
    async with host.bridge():
        assert (await process.communicate())[0] == b""


@story
async def test_a_later_call_of_a_job_ends_the_wait_of_an_earlier_call(host: Host) -> None:
    host.leader.hold.add("staging-out")
    async with host.bridge():
        await host.set_up()
        for function in ("data_in", "pre_run", "post_run"):
            assert await host.call(function, "42", str(host.script)) == (0, "")
        process = await host.start("data_out", "42", str(host.script))
        await until(lambda: len(host.waiting()) == 1)
        assert await host.call("job_teardown", "42", str(host.script), "true") == (0, "")
        assert (await host.end_of(process))[0] == -1


@story
async def test_a_call_with_a_killed_helper_does_not_succeed(host: Host) -> None:
    host.leader.away = True
    async with host.bridge():
        process = await host.start("data_in", "42", str(host.script))
        await until(lambda: len(host.waiting()) == 1)
    # Without a bridge, the caller sleeps between two requests, and Slurm's timeout ends the whole group.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")

    def sleeping() -> list[int]:
        found = [int(child) for child in children.read_text().split()]
        return [child for child in found if b"sleep" in Path(f"/proc/{child}/cmdline").read_bytes()]

    await until(lambda: sleeping() != [])
    for child in sleeping():
        os.kill(child, signal.SIGTERM)
    code, text = await host.end_of(process)
    assert code == -1 and "was ended" in text


@story
async def test_a_polling_slurm_repeats_calls_instead_of_waiting(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "HOLD_S", 1)
    host.release = RELEASES["24.05"]
    host.leader.hold.add("staging-in")
    async with host.bridge():
        await host.set_up()
        assert await host.perform("data_in") == (0, "")
        assert await host.perform("test_data_in") == (0, "BUSY")
        # Slurm sleeps after each reply, so the bridge waits for the end during the query.
        asked = await host.begin("test_data_in")
        await until(lambda: len(host.waiting()) == 1)
        host.leader.end("42", "stage-in-failed", "/in/a: no such file")
        assert await host.end_of(asked) == (-1, "/in/a: no such file")


@story
async def test_a_request_that_slurm_counts_differently_fails_in_setup(host: Host) -> None:
    async with host.bridge():
        code, text = await host.call("setup", "42", UID, UID, "fast", str(GRAIN), str(host.script))
        assert code == -1 and text.startswith("script line 2, column 19: Slurm counts 1048576 bytes of pool fast")
        assert host.leader.external_jobs == {}


@story
async def test_a_script_may_end_with_slurms_zero_byte(host: Host) -> None:
    host.script.write_text(SCRIPT + "\0")
    async with host.bridge():
        assert await host.call("job_process", str(host.script)) == (0, "")
        assert await host.set_up() == (0, "")


@story
async def test_a_script_that_is_not_text_fails_with_a_message(host: Host) -> None:
    host.script.write_bytes(SCRIPT.encode() + b"# caf\xe9\n")
    async with host.bridge():
        code, text = await host.set_up()
        assert code == -1 and "not UTF-8" in text


@story
async def test_outdated_files_mean_no_free_space_and_rejected_buffer_jobs(host: Host) -> None:
    async with host.bridge():
        assert json.loads((await host.call("pools"))[1])["pools"] == [
            {"id": "fast", "quantity": 64, "granularity": GRAIN, "free": 64}
        ]
    for name in ("pools.json", "site.json"):
        found = json.loads((host.run / name).read_text())
        (host.run / name).write_text(json.dumps({**found, "until": uptime_s() - 0.01}))
    assert json.loads((await host.call("pools"))[1])["pools"][0]["free"] == 0
    code, text = await host.call("job_process", str(host.script))
    assert code == -1
    assert text.startswith("the buffer is not available on head1 (bridge not running since ")
    assert text.endswith("); try again, or submit without it")
    # A time of an earlier boot is too far ahead.
    found = json.loads((host.run / "pools.json").read_text())
    (host.run / "pools.json").write_text(json.dumps({**found, "until": uptime_s() + 1000}))
    assert json.loads((await host.call("pools"))[1])["pools"][0]["free"] == 0


@story
async def test_a_site_may_accept_jobs_while_no_bridge_runs(host: Host) -> None:
    async with host.bridge(away="accept"):
        pass
    found = json.loads((host.run / "site.json").read_text())
    (host.run / "site.json").write_text(json.dumps({**found, "until": 0}))
    assert await host.call("job_process", str(host.script)) == (0, "")
    host.script.write_text(SCRIPT.replace("fast", "fsat"))
    assert "pool 'fsat' does not exist" in (await host.call("job_process", str(host.script)))[1]


@story
async def test_calls_without_a_leader_wait_and_succeed(host: Host) -> None:
    async with host.bridge():
        host.leader.away = True
        words = ("42", UID, UID, "fast", str(8 * GRAIN), str(host.script))
        process = await host.start("setup", *words)
        await until(lambda: len(host.waiting()) == 1)
        host.leader.away = False
        assert await host.end_of(process) == (0, "")


@story
async def test_a_call_without_a_bridge_waits_for_one(host: Host) -> None:
    waiting = await host.start("setup", "42", UID, UID, "fast", str(8 * GRAIN), str(host.script))
    await asyncio.sleep(0.3)
    assert waiting.returncode is None
    async with host.bridge():
        assert await host.end_of(waiting) == (0, "")


@story
async def test_only_one_bridge_runs_in_a_directory(host: Host) -> None:
    async with host.bridge():
        with pytest.raises(BridgeRefused, match="another bridge runs in"):
            files = SlurmFiles(host.run, "head1")
            await Bridge(cast(Client, host.leader), files, "token", "head1", SystemClock()).run(asyncio.Event())


@story
async def test_the_bridge_is_ready_once_slurmctld_can_read_pools(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host.leader.away = True
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        async with host.bridge(on_served=report_served):
            with pytest.raises(BlockingIOError):
                manager.recv(100)
            host.leader.away = False
            heard = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(manager, 100), 30)
            assert heard == b"READY=1" and json.loads((host.run / "pools.json").read_text())["pools"]


@story
async def test_only_slurms_account_can_access_files_and_socket(host: Host) -> None:
    async with host.bridge():
        assert (host.run.stat().st_mode & 0o777) == 0o700
        assert ((host.run / "socket").stat().st_mode & 0o777) == 0o600
        assert {path.stat().st_mode & 0o077 for path in host.run.iterdir() if path.name.endswith(".json")} == {0}


@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_bridge_directory_changeable_by_others_is_rejected(tmp_path: Path, how: str) -> None:
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    if how == "mode":
        run.chmod(0o722)
    elif os.getuid() == 0:
        os.chown(run, 65534, 65534)
    else:
        run = Path("/")
    with pytest.raises(DirectoryRefused, match="accounts other than SlurmUser could change it"):
        SlurmFiles(run, "head1")
    assert how == "owner" or not list(run.iterdir())


def test_all_hosts_of_a_slurm_share_a_token(tmp_path: Path) -> None:
    first = cluster_token(tmp_path)
    assert len(first) == 32 and cluster_token(tmp_path) == first
    assert os.listdir(tmp_path) == ["forebay.cluster"]


@story
async def test_a_running_bridge_restores_a_removed_token(host: Host, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    async with host.bridge(state=state):
        await until(lambda: (state / "forebay.cluster").exists())
    assert cluster_token(state) == "token" and os.listdir(state) == ["forebay.cluster"]


def test_an_existing_token_or_a_missing_state_directory_is_left_alone(tmp_path: Path) -> None:
    own = cluster_token(tmp_path)
    keep_token(tmp_path, "token")
    assert cluster_token(tmp_path) == own
    keep_token(tmp_path / "none", "token")
    assert os.listdir(tmp_path) == ["forebay.cluster"]


@story
async def test_dw_wlm_cli_rejects_requests_that_no_setup_accepts(host: Host) -> None:
    async with host.bridge() as bridge:
        for line, sentence in (
            ("#DW jobdw pool=fast capacity=8MiB access_mode=striped type=scratch", ""),
            (
                "#DW jobdw pool=fsat capacity=8MiB access_mode=striped type=scratch",
                "pool 'fsat' does not exist; use one of",
            ),
            (
                "#DW jobdw pool=fast capacity=99TiB access_mode=striped type=scratch",
                "99TiB exceeds the capacity of pool fast, 64MiB",
            ),
            ("#DW jobdw pool=fast capacity=8MiB access_mode=stripped type=scratch", "stripped"),
            ("#DW jobdw capacity=8MiB", ""),
            ("#DW jobdw capacity=99TiB", "no pool has 99TiB: fast, the largest, has 64MiB; request less"),
            ("#DW jobdw capacity=1.5MiB access_mode=striped type=scratch", "Slurm reads '1.5MiB' as the integer"),
            (
                "#DW jobdw pool=fast capacity=8MiB access_mode=private type=scratch",
                "access_mode=private is not possible",
            ),
            ("#DW jobdw capacity=8MiB access_mode=striped,private(MFS=1MiB)", "access_mode=private is not possible"),
            ("#DW jobdw pool=fast capacity=2N", "the nodes of the job are not known yet"),
            ("#DW swap 1GiB", "the job requests no space of its own"),
            ("#BB create_persistent name=lake capacity=1.5GiB access=striped type=scratch", "Slurm reads '1.5GiB'"),
            ("#BB create_persistent name=lake capacity=1GiB access=striped type=scratch", ""),
            ("#DW persistentdw name=lake", ""),
        ):
            word, text = await bridge._calls.perform("job_process", [], f"#!/bin/sh\n{line}\ntrue\n")
            assert (word == "fail") is bool(sentence) and sentence in text, text
            assert not sentence or "line 2, column" in text
        space = "#DW jobdw pool=fast capacity=8MiB access_mode=striped type=scratch"
        one, other = (
            f"#DW stage_out type=file source=$DW_JOB_STRIPED/{name} destination=/out/r" for name in ("a", "b")
        )
        symbol = "#DW stage_out type=file source=$DW_JOB_STRIPED/%j destination=/out/r"
        for lines, place, sentence in (
            ((space, one, one), "", ""),
            # Only `setup` knows the value of %j.
            ((space, one, symbol), "", ""),
            ((space, one, other), "line 4, column 50", "the destination '/out/r' overlaps '/out/r'"),
            ((one,), "line 2, column 25", "the job has no buffer for $DW_JOB_STRIPED"),
        ):
            script = "\n".join(("#!/bin/sh", *lines, "true\n"))
            word, text = await bridge._calls.perform("job_process", [], script)
            assert (word == "fail") is bool(sentence) and sentence in text and place in text, text
        host.leader.total = 0
        await until(lambda: bridge._calls.site is not None and not bridge._calls.site.pools[0].quantity)
        for pool, sentence in ((" pool=fast", "pool fast is out of service"), ("", "all pools are out of service")):
            line = f"#DW jobdw{pool} capacity=8MiB access_mode=striped type=scratch"
            word, text = await bridge._calls.perform("job_process", [], f"#!/bin/sh\n{line}\ntrue\n")
            assert word == "fail" and "line 2, column" in text and sentence in text


@story
async def test_bbstat_shows_transfer_progress_without_paths_or_users(host: Host) -> None:
    host.release = RELEASES["24.05"]
    host.leader.hold.add("staging-in")
    host.leader.transfer = TransferView(
        job_id=7, attempt=2, node="m1", stage="stage_in", files_done=3, files_total=9, bytes_done=2**20,
        bytes_total=2**22, rate_bytes_s=2**19, time_left_s=6, user="alice", file="/in/secret", message="/in/a: gone",
    )  # fmt: skip
    async with host.bridge():
        assert (await host.call("get_status", "42")) == (0, "job 42: Forebay has no buffer of this job\n")
        await host.set_up()
        await host.perform("data_in")
        code, text = await host.call("get_status", "42")
        assert code == 0
        assert text.splitlines() == [
            "job 42: staging-in (epoch 1, 8MiB of pool fast)",
            "why: the buffer is being staged in",
            "stage_in, attempt 2 on m1, moving: 3 of 9 files, 1.0 MiB of 4.0 MiB, 0.5 MiB/s, 6 s left",
            "staged in: 0 files, 0.0 MiB",
            "staged out: 0 files, 0.0 MiB",
        ]
        host.leader.sentence = "staging in failed: /in/a is gone"
        text = (await host.call("get_status", "1000", "1000", "42"))[1]
        assert "/in" not in text and "alice" not in text


@story
async def test_bbstat_shows_that_slurm_will_never_start_a_job(host: Host) -> None:
    lost = SlurmView(frozenset({"42"}), {}, staging_in=frozenset({"42"}), pending=frozenset({"42"}))
    async with host.bridge() as bridge:
        host.slurm = lost
        for _ in range(2):
            assert "will never start" not in (await host.call("get_status", "42"))[1]
            await bridge._reconciler.look()
        assert (await host.call("get_status", "42"))[1].endswith("will never start it; run: scancel 42\n")
        assert "will never start" not in (await host.call("get_status", "43"))[1]


def test_jobs_staged_during_a_listing_keep_their_variables(tmp_path: Path) -> None:
    files = SlurmFiles(tmp_path, "head1")
    staged = ExternalJobView(scheduler="slurm", job="42", epoch=1, phase="staged-in", path="/bb/c/7.1")
    files.ask()
    files.write_variables(staged)
    files.reconcile(())  # the answer of before
    assert (tmp_path / "paths" / "42").read_text().startswith("DW_JOB_STRIPED=/bb/c/7.1/striped\n")
    files.ask()
    files.reconcile((), whole=False)
    assert (tmp_path / "paths" / "42").exists()
    files.reconcile(())
    assert not (tmp_path / "paths" / "42").exists()


@story
async def test_a_delayed_call_has_no_effect_on_a_later_epoch(host: Host) -> None:
    async with host.bridge():
        await host.set_up()
        host.leader.away = True
        process = await host.start("job_teardown", "42", str(host.script), "true")
        await until(lambda: "42" in host.leader.unanswered)
        # Meanwhile the backup slurmctld has torn the job down and set it up again, and the job runs.
        host.leader.external_jobs["42"] |= {"phase": "running", "epoch": 2}
        host.leader.away = False
        await host.end_of(process)
        assert host.leader.external_jobs["42"]["phase"] == "running"


def test_job_variables_match_the_agents_directories() -> None:
    assert {name: below.strip("/") for name, below in VARIABLES.items()} == {
        name: "/".join(INSIDE[name]) for name in VARIABLES
    }


@story
async def test_an_outdated_list_does_not_replace_a_newer_epoch(host: Host) -> None:
    async with host.bridge() as bridge:
        calls, asked_s = bridge._calls, uptime_s()
        host.leader.external_jobs["42"] = {"phase": "over", "epoch": 1}
        listed = ExternalJobView(scheduler="slurm", job="42", epoch=1, phase="staged-in")
        assert await host.set_up() == (0, "")
        calls.remember(listed, asked_s)
        assert await host.call("data_in", "42", str(host.script)) == (0, "")
        assert host.leader.external_jobs["42"]["phase"] == "staged-in"
        calls.remember(listed, uptime_s() + 0.01)
        assert await host.call("pre_run", "42", str(host.script)) == (-1, "the buffer is staged-in"), (
            "it is another one"
        )


@story
async def test_a_recently_learned_epoch_is_not_queried(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    shown, asked = host.leader._shown, list[str]()

    async def show(job: str, parameters: dict[str, Any]) -> Any:
        asked.append(job)
        return await shown(job, parameters)

    async with host.bridge():
        assert await host.set_up() == (0, "")
        monkeypatch.setattr(host.leader, "_shown", show)
        assert await host.call("data_in", "42", str(host.script)) == (0, "")
        assert asked == ["42"], "the command alone, which waits"
        monkeypatch.setattr(calls_module, "WARM_S", 0.0)
        await asyncio.sleep(0.02)
        assert await host.call("pre_run", "42", str(host.script)) == (0, "")
        assert asked == ["42"] * 3


@story
async def test_the_noted_epoch_is_used_in_the_next_command(host: Host) -> None:
    async with host.bridge() as bridge:
        assert await host.set_up() == (0, "")
        host.leader.external_jobs["42"] |= {"phase": "staged-in", "epoch": 7}
        known = ExternalJobView(scheduler="slurm", job="42", epoch=7, phase="staged-in")
        bridge._calls.note_external_job(known)
        assert await host.call("pre_run", "42", str(host.script)) == (0, "")
        assert host.leader.external_jobs["42"]["epoch"] == 7
