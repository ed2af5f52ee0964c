"""The agent as a process, against a controller over mutual TLS: what the contract promises, whatever is killed."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.service import EXIT_REPLACED
from forebay.cluster.schemas.jobs import ErrorView
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import create_authority, issue
from forebay.cluster.system.clock import SystemClock
from forebay.replica.messages.commands import OperationDone, OperationFailed, ScriptEnded, ScriptStarted
from forebay.replica.model.buffers import Transfer, TransferKind
from forebay.replica.model.job_states import JobState
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import ControllerDouble, script_of, shown, stands_still


def test_a_job_is_staged_in_run_staged_out_and_torn_down(site: Site) -> None:
    (site.sources / "data").write_text("3\n4\n")
    tree = site.sources / "tree" / "deep"
    tree.mkdir(parents=True)
    (tree / "more").write_text("5\n")

    async def story() -> None:
        async with site.serving() as controller:
            inwards = (
                Transfer(TransferKind.FILE, str(site.sources / "data"), "$DW_JOB_STRIPED/data"),
                Transfer(TransferKind.DIRECTORY, str(site.sources / "tree"), "${DW_JOB_STRIPED}/tree"),
            )
            await controller.order(site.order(7, 1, "stage_in", transfers=inwards, capacity_bytes=1024))
            done = await controller.result(7, 1)
            assert isinstance(done, OperationDone) and (done.files, done.size_bytes) == (2, 6), done
            script = script_of(
                'cat "$DW_JOB_STRIPED/data" "$DW_JOB_STRIPED/tree/deep/more" > "$FOREBAY_JOB_DIR/striped/all"',
                'echo "$FOREBAY_JOB_ID $FOREBAY_ATTEMPT $FOREBAY_NODE $SLURM_JOB_NAME $MINE $(pwd)"',
            )
            mine = (("MINE", "yes"),)
            await controller.order(site.order(7, 2, "run", script=script, environment=mine, capacity_bytes=1024))
            assert isinstance(await controller.result(7, 2, ScriptStarted), ScriptStarted)
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert shown(site.destinations / "forebay-7.out") == f"7 2 n1 job7 yes {site.destinations}\n"
            await controller.order(site.order(7, 3, "post_run"))
            assert isinstance(await controller.result(7, 3), OperationDone)
            outwards = (Transfer(TransferKind.FILE, str(site.destinations / "new" / "all"), "$DW_JOB_STRIPED/all"),)
            await controller.order(site.order(7, 4, "stage_out", transfers=outwards))
            done = await controller.result(7, 4)
            assert isinstance(done, OperationDone) and (done.files, done.size_bytes) == (1, 6), done
            assert shown(site.destinations / "new" / "all") == "3\n4\n5\n"
            await controller.order(site.order(7, 5, "teardown"))
            assert isinstance(await controller.result(7, 5), OperationDone)
            for place in ("buffers", "steps", "operations"):
                assert os.listdir(site.home / place) == [], place

    asyncio.run(story())


def count_lines(path: Path) -> int:
    """Return how many lines a file has, 0 if there is none."""
    return len(path.read_text().splitlines()) if path.exists() else 0


async def until(what: object) -> None:
    """Wait until the callable `what` holds: for what only the file system tells."""
    assert callable(what)
    async with asyncio.timeout(20):
        while not what():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether a process lives and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


GATED = script_of("echo begun >> begun", "until [ -e gate ]; do sleep 0.02; done", "echo over >> over")
"""A script that says that it began, waits for a file, and says that it is over."""


def test_an_agent_killed_while_the_script_runs_comes_back_to_it_and_reports_one_end(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=GATED))
            await controller.result(7, 2, ScriptStarted)
            await site.kill_agent(agent)
            site.start_agent()
            await controller.wait(lambda: len(controller.registrations) == 2)
            first, second = controller.registrations
            assert first.instance != second.instance and first.storage_id == second.storage_id
            (site.destinations / "gate").touch()
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert [type(report.result) for report in controller.accepted] == [ScriptStarted, ScriptEnded]
            assert count_lines(site.destinations / "begun") == count_lines(site.destinations / "over") == 1

    asyncio.run(story())


def test_a_script_that_ends_while_no_agent_lives_is_reported_by_the_next_one(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=GATED))
            await until((site.destinations / "begun").exists)
            await site.kill_agent(agent)
            (site.destinations / "gate").touch()
            await until((site.home / "steps" / "7" / "status.json").exists)
            site.start_agent()
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert count_lines(site.destinations / "begun") == 1

    asyncio.run(story())


def test_a_supervisor_that_is_killed_means_node_fail_and_nothing_of_the_script_is_left(site: Site) -> None:
    script = script_of("echo $$ > pids", "setsid sleep 600 & echo $! >> pids", "echo begun > begun", "sleep 600")

    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script))
            await controller.result(7, 2, ScriptStarted)
            await until((site.destinations / "begun").exists)
            pids = [int(line) for line in (site.destinations / "pids").read_text().split()]
            assert len(pids) == 2 and all(map(alive, pids))
            (supervisor,) = site.supervisors()
            os.kill(supervisor, signal.SIGKILL)
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded) and ended.result is JobState.NODE_FAIL
            assert "supervisor was killed by signal 9 (SIGKILL); its outcome is unknown" in ended.message
            assert not any(map(alive, pids))

    asyncio.run(story())


def test_a_script_over_its_time_limit_is_ended_even_if_it_ignores_sigterm(site: Site) -> None:
    script = script_of("trap 'echo asked > asked' TERM", "echo begun > begun", "while :; do sleep 0.1; done")

    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script, time_limit_s=1))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded)
            assert (ended.result, ended.signal) == (JobState.TIMEOUT, signal.SIGKILL)
            assert "1 s" in ended.message
            assert shown(site.destinations / "asked") == "asked\n"

    asyncio.run(story())


def test_a_cancelled_script_is_asked_to_end_and_reported_as_cancelled(site: Site) -> None:
    script = script_of("trap 'echo asked > asked; exit 3' TERM", "echo begun > begun", "while :; do sleep 0.1; done")

    async def story() -> None:
        async with site.serving() as controller:
            order = site.order(7, 2, "run", script=script)
            await controller.order(order)
            await until((site.destinations / "begun").exists)
            await controller.order(site.order(7, 2, "run", script=script, started=True, cancel=True))
            assert await controller.result(7, 2) == ScriptEnded(JobState.CANCELLED, 3, 0)
            assert shown(site.destinations / "asked") == "asked\n"

    asyncio.run(story())


def test_a_script_that_was_cancelled_before_it_began_never_begins(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=GATED, cancel=True))
            assert await controller.result(7, 2) == ScriptEnded(JobState.CANCELLED)
            assert not (site.destinations / "begun").exists()

    asyncio.run(story())


def test_a_script_that_was_started_but_is_not_recorded_here_is_node_fail_and_never_launched(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=GATED, started=True))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded) and ended.result is JobState.NODE_FAIL
            assert not (site.destinations / "begun").exists()

    asyncio.run(story())


def test_a_script_whose_order_is_withdrawn_is_ended_before_the_teardown(site: Site) -> None:
    script = script_of(
        "echo $$ > pid", "trap 'echo late > late' EXIT TERM", "echo begun > begun", "while :; do sleep 0.1; done"
    )

    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script))
            await controller.result(7, 2, ScriptStarted)
            await until((site.destinations / "begun").exists)
            pid = int((site.destinations / "pid").read_text())
            await controller.order(site.order(7, 3, "teardown"))
            assert isinstance(await controller.result(7, 3), OperationDone)
            assert not alive(pid)
            assert [report.attempt for report in controller.received if isinstance(report.result, ScriptEnded)] == []

    asyncio.run(story())


def test_a_script_whose_order_is_withdrawn_while_no_agent_lives_is_ended_by_the_next_one(site: Site) -> None:
    script = script_of("echo $$ > pid", "echo begun > begun", "sleep 600")

    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=script))
            await until((site.destinations / "begun").exists)
            pid = int((site.destinations / "pid").read_text())
            await site.kill_agent(agent)
            await controller.order(site.order(7, 3, "teardown"))
            site.start_agent()
            assert isinstance(await controller.result(7, 3), OperationDone)
            assert not alive(pid)

    asyncio.run(story())


def test_what_is_done_while_nobody_answers_is_reported_when_somebody_does(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=GATED))
            await controller.result(7, 2, ScriptStarted)
            controller.silent = True
            (site.destinations / "gate").touch()
            await until(lambda: any((site.home / "outbox").iterdir()))
            # Not even its own death loses the result.
            await site.kill_agent(agent)
            site.start_agent()
            controller.heard.clear()
            controller.silent, controller.silent_to_reports = False, True
            await controller.wait(lambda: controller.heard.count("unheard reports") >= 4)
            controller.silent_to_reports = False
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            # Before the new agent registers: afterwards the result of the one before would be stale.
            await controller.wait(lambda: "register" in controller.heard)
            assert controller.heard.index("reports") < controller.heard.index("register")
            await until(lambda: not any((site.home / "outbox").iterdir()))

    asyncio.run(story())


def test_a_power_cut_that_takes_the_report_of_a_scripts_end_takes_no_result(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=GATED))
            await controller.result(7, 2, ScriptStarted)
            controller.silent = True
            (site.destinations / "gate").touch()
            await until(lambda: any(site.unsynced()))
            await site.kill_agent(agent)
            for report in site.unsynced():
                report.write_bytes(b"")
            controller.silent = False
            site.start_agent()
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert count_lines(site.destinations / "begun") == count_lines(site.destinations / "over") == 1
            await until(lambda: not any((site.home / "outbox").iterdir()))

    asyncio.run(story())


def test_a_report_whose_answer_is_lost_is_sent_again_with_the_same_id_and_counts_once(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            controller.deaf = True
            await controller.order(site.order(7, 2, "run", script=GATED))
            await controller.wait(lambda: len(controller.received) >= 2)
            assert len({report.command_id for report in controller.received}) == 1
            controller.deaf = False
            (site.destinations / "gate").touch()
            await controller.result(7, 2)
            await until(lambda: not any((site.home / "outbox").iterdir()))
            assert [type(report.result) for report in controller.accepted] == [ScriptStarted, ScriptEnded]

    asyncio.run(story())


def test_sigterm_ends_the_agent_with_0_and_its_workers_but_not_the_scripts(site: Site) -> None:
    site.configure(more='copy_rate = "64KiB"')
    (site.sources / "big").write_bytes(os.urandom(1024 * 1024))

    async def story() -> None:
        async with site.running() as (controller, agent):
            transfer = Transfer(TransferKind.FILE, str(site.sources / "big"), "$DW_JOB_STRIPED/big")
            await controller.order(
                site.order(7, 2, "run", script=GATED), site.order(8, 1, "stage_in", transfers=(transfer,))
            )
            await controller.result(7, 2, ScriptStarted)
            await controller.wait(lambda: any(row.bytes_done for poll in controller.polls for row in poll.progress))
            agent.terminate()
            assert await site.ended(agent) == 0
            assert len(site.supervisors()) == 1
            assert os.listdir(site.home / "buffers" / "8" / "striped") == []
            site.start_agent()
            (site.destinations / "gate").touch()
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)

    asyncio.run(story())


def test_progress_is_on_the_polls_while_data_moves(site: Site) -> None:
    site.configure(more='copy_rate = "1MiB"')
    (site.sources / "big").write_bytes(os.urandom(1536 * 1024))

    async def story() -> None:
        async with site.serving() as controller:
            transfer = Transfer(TransferKind.FILE, str(site.sources / "big"), "$DW_JOB_STRIPED/big")
            await controller.order(site.order(8, 1, "stage_in", transfers=(transfer,)))
            assert isinstance(await controller.result(8, 1), OperationDone)
            rows = [row for poll in controller.polls for row in poll.progress if row.rate_bytes_s]
            assert rows and all(
                (row.job, row.attempt, row.stage, row.files_total) == (8, 1, "stage_in", 1) for row in rows
            )
            assert all(0 < row.bytes_done <= row.bytes_total == 1536 * 1024 for row in rows)

    asyncio.run(story())


def test_an_attempt_that_is_superseded_is_ended_before_the_next_begins(site: Site) -> None:
    site.configure(more='copy_rate = "64KiB"')
    (site.sources / "big").write_bytes(os.urandom(1024 * 1024))
    (site.sources / "small").write_bytes(b"small")

    async def story() -> None:
        async with site.serving() as controller:
            for attempt, name in ((1, "big"), (2, "small")):
                transfer = Transfer(TransferKind.FILE, str(site.sources / name), f"$DW_JOB_STRIPED/{name}")
                await controller.order(site.order(8, attempt, "stage_in", transfers=(transfer,)))
                if attempt == 1:
                    await controller.wait(
                        lambda: any(row.bytes_done for poll in controller.polls for row in poll.progress)
                    )
            assert isinstance(await controller.result(8, 2), OperationDone)
            assert [report.attempt for report in controller.received] == [2]
            assert os.listdir(site.home / "buffers" / "8" / "striped") == ["small"]

    asyncio.run(story())


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_staging_that_an_agents_end_interrupted_is_done_again_when_it_is_ordered_again(
    site: Site, end: signal.Signals
) -> None:
    site.configure(more='copy_rate = "64KiB"')
    (site.sources / "big").write_bytes(os.urandom(256 * 1024))

    async def story() -> None:
        async with site.running() as (controller, agent):
            transfer = Transfer(TransferKind.FILE, str(site.sources / "big"), "$DW_JOB_STRIPED/big")
            await controller.order(site.order(8, 1, "stage_in", transfers=(transfer,)))
            await controller.wait(lambda: any(row.bytes_done for poll in controller.polls for row in poll.progress))
            agent.send_signal(end)
            await site.ended(agent)
            site.configure()
            await controller.order(site.order(8, 2, "stage_in", transfers=(transfer,)))
            site.start_agent()
            assert isinstance(await controller.result(8, 2), OperationDone)
            assert (site.home / "buffers" / "8" / "striped" / "big").read_bytes() == (site.sources / "big").read_bytes()

    asyncio.run(story())


def test_an_operation_over_its_time_is_ended_and_reported_as_failed(site: Site) -> None:
    site.configure(more='copy_rate = "64KiB"')
    (site.sources / "big").write_bytes(os.urandom(1024 * 1024))

    async def story() -> None:
        async with site.serving() as controller:
            transfer = Transfer(TransferKind.FILE, str(site.sources / "big"), "$DW_JOB_STRIPED/big")
            # A busy machine may not even have begun within a second; the file itself takes sixteen.
            for timeout_s in (1, 2, 4, 8):
                order = site.order(8, timeout_s, "stage_in", transfers=(transfer,), timeout_s=timeout_s)
                await controller.order(order)
                failed = await controller.result(8, timeout_s)
                assert isinstance(failed, OperationFailed) and not failed.final
                assert failed.message.startswith(f"stage_in took longer than {timeout_s} s and was ended")
                if ": 0 of 1 file, " in failed.message:
                    break
            else:
                pytest.fail(failed.message)

    asyncio.run(story())


def test_a_second_agent_in_the_same_directory_is_refused_by_name(site: Site) -> None:
    async def story() -> None:
        async with site.running():
            assert await site.ended(site.start_agent()) == 1
            assert "another agent uses this directory" in shown(site.directory / "agent.log")

    asyncio.run(story())


def test_what_a_script_leaves_behind_is_gone_when_its_end_is_reported(site: Site) -> None:
    script = script_of(
        "setsid sh -c 'echo $$ > pid; exec sleep 600' < /dev/null > /dev/null 2>&1 &",
        "until [ -e pid ]; do sleep 0.02; done",
    )

    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert not alive(int((site.destinations / "pid").read_text()))

    asyncio.run(story())


def test_wherever_the_agent_is_killed_each_script_runs_once_and_is_reported_once(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            for job, moment_s in enumerate((0.0, 0.02, 0.05, 0.09, 0.14, 0.2), start=1):
                script = script_of(f"echo begun >> begun-{job}", "sleep 0.1", f"echo over >> over-{job}")
                await controller.order(site.order(job, 2, "run", script=script))
                # Before the record, before the supervisor, before the script, during it: which does not matter.
                await asyncio.sleep(moment_s)
                await site.kill_agent(agent)
                agent = site.start_agent()
                assert await controller.result(job, 2) == ScriptEnded(JobState.COMPLETED)
                assert shown(site.destinations / f"begun-{job}") == "begun\n"
                assert shown(site.destinations / f"over-{job}") == "over\n"
            ends = [report.job for report in controller.accepted if isinstance(report.result, ScriptEnded)]
            assert ends == [1, 2, 3, 4, 5, 6]

    asyncio.run(story())


def test_an_agent_that_was_replaced_ends_by_name_and_leaves_its_scripts(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=GATED))
            await controller.result(7, 2, ScriptStarted)
            controller.polling_refused = ErrorView(code="stale_instance", sentence="another agent has registered since")
            await controller.order()
            assert await site.ended(agent) == EXIT_REPLACED, "who is started again would take the name back"
            assert "this agent was replaced: another agent has registered since" in shown(site.directory / "agent.log")
            assert len(site.supervisors()) == 1

    asyncio.run(story())


def test_an_agent_that_the_controller_does_not_know_registers_again_and_goes_on(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=GATED))
            await controller.result(7, 2, ScriptStarted)
            # A cluster that was set up anew, or from an old snapshot.
            controller.polling_refused = ErrorView(code="unknown_node", sentence="node n1 has not registered")
            await controller.order()
            await controller.wait(lambda: len(controller.registrations) >= 2)
            controller.polling_refused = None
            assert len({request.instance for request in controller.registrations}) == 1
            (site.destinations / "gate").touch()
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)

    asyncio.run(story())


def test_an_agent_whose_clock_is_off_waits_until_it_is_set(site: Site) -> None:
    async def story() -> None:
        controller = ControllerDouble(site.config)
        controller.registering_refused = ErrorView(code="command_too_old", sentence="the id was made 900 s from now")
        await controller.start()
        try:
            site.start_agent()
            await controller.wait(lambda: controller.heard.count("register") >= 2)
            assert "could not register: the id was made 900 s from now" in shown(site.directory / "agent.log")
            controller.registering_refused = None
            await controller.wait(lambda: bool(controller.polls))
        finally:
            await controller.stop()

    asyncio.run(story())


def test_an_agent_with_somebody_elses_certificate_ends_by_name(site: Site) -> None:
    async def story() -> None:
        controller = ControllerDouble(site.config)
        controller.registering_refused = ErrorView(code="forbidden", sentence="agent n2 may not act for node n1")
        await controller.start()
        try:
            assert await site.ended(site.start_agent()) == 1
            said = shown(site.directory / "agent.log")
            assert "the controller rejected agent n1: agent n2 may not act for node n1" in said
        finally:
            await controller.stop()

    asyncio.run(story())


def test_an_agent_of_another_authority_says_so_and_goes_on_asking(site: Site, tmp_path: Path) -> None:
    now = SystemClock().now()
    authority = create_authority(tmp_path / "other", cluster_name="other", cluster_id="f" * 32, at=now)
    issue(authority, tmp_path / "other", role=Role.AGENT, name="n1", at=now)

    async def story() -> None:
        controller = ControllerDouble(site.config)
        await controller.start()
        try:
            site.file.write_text(
                site.file.read_text().replace(
                    str(site.config.tls_files("n1").certificate.parent), str(tmp_path / "other")
                )
            )
            agent = site.start_agent()
            await until(lambda: "is not signed by the expected authority" in shown(site.directory / "agent.log"))
            assert controller.heard == []
            agent.terminate()
            assert await site.ended(agent) == 0
        finally:
            await controller.stop()

    asyncio.run(story())


def test_the_log_is_sentences_with_a_job_in_front(site: Site) -> None:
    (site.sources / "a").write_bytes(bytes(3 * 1024 * 1024))

    async def story() -> None:
        async with site.running() as (controller, _):
            transfer = Transfer(TransferKind.FILE, str(site.sources / "a"), "$DW_JOB_STRIPED/a")
            missing = Transfer(TransferKind.FILE, str(site.sources / "b"), "$DW_JOB_STRIPED/b")
            await controller.order(
                site.order(7, 3, "stage_in", transfers=(transfer,)),
                site.order(8, 1, "stage_in", transfers=(missing,)),
                site.order(9, 2, "run", script=script_of("exit 5")),
            )
            for job, attempt in ((7, 3), (8, 1), (9, 2)):
                await controller.result(job, attempt)
            said = shown(site.directory / "agent.log")
            assert " INFO forebay.cluster.agent.activities: job 7: stage_in attempt 3 begins\n" in said
            assert " INFO forebay.cluster.agent.activities: job 7: stage_in attempt 3 done: 1 file, 3 MiB\n" in said
            assert "job 8: stage_in attempt 1 failed: stage_in source=" in said
            assert "does not exist; it is not retried automatically\n" in said
            assert "job 9: run attempt 2 ended: FAILED, exit code 5\n" in said
            assert not re.search(r"\w+\(\w+=|<[A-Z]", said), said

    asyncio.run(story())


def test_a_suspended_script_stands_still_with_its_time_limit_and_goes_on_where_it_was(site: Site) -> None:
    script = script_of("echo $$ > pid", "until [ -e gate ]; do echo x >> beats; sleep 0.02; done", "echo over > over")

    async def story() -> None:
        async with site.running() as (controller, agent):
            order = site.order(7, 2, "run", script=script, time_limit_s=600)
            await controller.order(order)
            await controller.result(7, 2, ScriptStarted)
            await until((site.destinations / "beats").exists)
            pid = int((site.destinations / "pid").read_text())
            await controller.order(msgspec.structs.replace(order, started=True, suspend=True))
            await until(lambda: stands_still(pid))
            # A suspended script outlives its agent, and the next agent knows that it is to stand still.
            await site.kill_agent(agent)
            site.start_agent()
            await controller.wait(lambda: len(controller.registrations) == 2)
            (site.destinations / "gate").touch()
            assert stands_still(pid) and not (site.destinations / "over").exists()
            await controller.order(msgspec.structs.replace(order, started=True))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert (site.destinations / "over").exists()

    asyncio.run(story())


def test_a_suspended_script_is_ended_when_its_job_is_cancelled(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            order = site.order(7, 2, "run", script=GATED)
            await controller.order(order)
            await controller.result(7, 2, ScriptStarted)
            await controller.order(msgspec.structs.replace(order, started=True, suspend=True))
            await controller.order(msgspec.structs.replace(order, started=True, suspend=True, cancel=True))
            ended = await controller.result(7, 2)
            assert isinstance(ended, ScriptEnded) and ended.result is JobState.CANCELLED

    asyncio.run(story())


def test_a_persistent_buffer_outlives_the_job_that_made_it_and_is_destroyed_by_another(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            create = (CreatePersistent("lake", 1024),)
            await controller.order(site.order(7, 1, "stage_in", creates=create))
            assert isinstance(await controller.result(7, 1), OperationDone)
            await controller.order(site.order(7, 2, "teardown"))
            assert isinstance(await controller.result(7, 2), OperationDone)
            script = script_of('echo kept > "$DW_PERSISTENT_STRIPED_lake/word"')
            await controller.order(site.order(8, 1, "stage_in", uses=("lake",)))
            assert isinstance(await controller.result(8, 1), OperationDone)
            await controller.order(site.order(8, 2, "run", script=script, uses=("lake",)))
            assert await controller.result(8, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            await controller.order(site.order(8, 3, "teardown"))
            assert isinstance(await controller.result(8, 3), OperationDone)
            assert (site.home / "persistent" / "lake" / "word").read_text() == "kept\n"
            for _ in range(2):  # what is not there is as good as destroyed
                attempt = 1 + len([report for report in controller.accepted if report.job == 9])
                destroy = (DestroyPersistent("lake"),)
                await controller.order(site.order(9, attempt, "stage_in", destroys=destroy))
                assert isinstance(await controller.result(9, attempt), OperationDone)
                assert os.listdir(site.home / "persistent") == [".made"]
                assert os.listdir(site.home / "persistent" / ".made") == []

    asyncio.run(story())


def test_a_persistent_buffer_that_was_forgotten_leaves_nothing_to_the_next_one_of_its_name(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            create = (CreatePersistent("lake", 1024),)
            await controller.order(site.order(7, 1, "stage_in", creates=create))
            assert isinstance(await controller.result(7, 1), OperationDone)
            lake = site.home / "persistent" / "lake"
            (lake / "secret").write_text("of job 7")
            # What is ordered again by the same job is the same buffer.
            await controller.order(site.order(7, 2, "stage_in", creates=create))
            assert isinstance(await controller.result(7, 2), OperationDone)
            assert (lake / "secret").exists()
            # An operator cleared it; the agent is not told, and another user makes one of that name.
            await controller.order(site.order(8, 1, "stage_in", creates=create))
            assert isinstance(await controller.result(8, 1), OperationDone)
            assert os.listdir(lake) == []
            assert sorted(os.listdir(site.home / "persistent")) == [".made", "lake"]

    asyncio.run(story())


def test_a_persistent_buffer_whose_name_leads_elsewhere_is_refused(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 1, "stage_in", creates=(CreatePersistent("../steps", 1),)))
            failed = await controller.result(7, 1)
            assert isinstance(failed, OperationFailed) and failed.operation == "create_persistent" and failed.final

    asyncio.run(story())


def test_the_start_and_the_end_of_a_short_script_ride_in_one_report(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However slow this machine is.
    monkeypatch.setattr("forebay.cluster.agent.runtime.state_directory.START_GATHER_S", 600.0)

    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script_of("exit 0")))
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert [type(report.result) for report in controller.accepted] == [ScriptStarted, ScriptEnded]
            assert controller.heard.count("reports") == 1

    asyncio.run(story())


def test_the_start_of_a_script_that_goes_on_is_reported_by_itself(site: Site) -> None:
    async def story() -> None:
        async with site.serving() as controller:
            await controller.order(site.order(7, 2, "run", script=script_of("sleep 600")))
            await controller.result(7, 2, ScriptStarted)
            await controller.withdraw(7)
            await until(lambda: not site.supervisors())

    asyncio.run(story())


def test_a_poll_is_not_given_up_for_a_transfer_that_is_soon_over(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    # However slow this machine is.
    monkeypatch.setattr("forebay.cluster.agent.service.POLL_WHILE_MOVING_S", 20.0)
    monkeypatch.setattr("forebay.cluster.agent.service.POLL_WAIT_S", 20.0)

    async def story() -> None:
        async with site.serving() as controller:
            for attempt in range(1, 4):
                await controller.order(site.order(7, attempt, "stage_in"))
                await controller.result(7, attempt)
            # A poll that is given up has no answer, and the next one knows what it knew.
            known = [poll.seen_revision for poll in controller.polls]
            assert len(known) == len(set(known))

    asyncio.run(story())
