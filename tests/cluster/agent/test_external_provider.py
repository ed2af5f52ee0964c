"""An agent whose cluster has a site's own provider: which operations make up a stage, and what survives whose death."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import signal
from pathlib import Path

import pytest

from forebay.cluster.system.processes import all_pids, environment_variables, start_time
from forebay.replica.messages.commands import (
    OperationDone,
    OperationFailed,
    PersistentChanged,
    ScriptEnded,
    ScriptStarted,
)
from forebay.replica.model.buffers import Access
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import Order
from forebay.replica.model.provider import Provision
from forebay.replica.model.requests import CreatePersistent, DestroyPersistent
from tests.account import KNOWN, UNKNOWN
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import script_of, shown
from tests.cluster.agent.test_agent import until
from tests.cluster.providers.conftest import Programs, pairs

OPERATIONS = (
    ("stage_in", "setup"),
    ("stage_in", "data_in"),
    ("stage_in", "paths"),
    ("run", "pre_run"),
    ("post_run", "post_run"),
    ("stage_out", "data_out"),
    ("teardown", "teardown"),
)


class ProvidedSite:
    """A node and a site's programs on it."""

    def __init__(self, site: Site, directory: Path) -> None:
        directory.mkdir()
        self.site = site
        self.programs = Programs(directory)

    def configure(self) -> None:
        """Write [provider] as it has become."""
        rows = ", ".join(f'{name} = "{value}"' for name, value in self.programs.variables.items())
        named = [str(self.programs.script), str(self.programs.command)]
        self.site.configure(more=f"[provider]\nallowed_programs = {named}\nenvironment = {{ {rows} }}")

    def order(self, attempt: int, stage: str, *actions: str, provider: str = "lua", **fields: object) -> Order:
        """Return an order for job 7 whose directives carry the actions."""
        words = " ".join(f"do={action}" for action in actions)
        lines = (f"#BB_LUA pool=fast capacity=2K {words}", f"#DW jobdw capacity=2K {words}")
        provision = Provision(
            provider=provider,
            lua_script=str(self.programs.script),
            get_sys_state=str(self.programs.command),
            poll_interval_s=1,
            other_timeout_s=60,
        )
        standard: dict[str, object] = {
            "script": script_of(*lines, 'echo "$BB_PLACE $DW_JOB_STRIPED $FOREBAY_JOB_DIR"'),
            "provision": provision,
            "pool": "fast",
            "capacity_bytes": 2048,
        }
        return self.site.order(7, attempt, stage, **(standard | fields))

    def operations(self) -> list[str]:
        """Return the names of what was called."""
        return [call.split()[0] for call in self.programs.calls()]

    def left(self) -> list[int]:
        """Return the living processes of calls and workers."""
        found = []
        for pid in all_pids():
            variables = environment_variables(pid)
            mine = any(variable.startswith(b"FOREBAY_OPERATION=") for variable in variables)
            if mine and self._storage() in b" ".join(variables) and start_time(pid) is not None:
                found.append(pid)
        return found

    def _storage(self) -> bytes:
        return (self.site.home / "storage-id").read_bytes().strip()


@pytest.fixture
def external_provider(site: Site, tmp_path: Path) -> ProvidedSite:
    """A node with a site's programs."""
    place = ProvidedSite(site, tmp_path / "programs")
    place.configure()
    return place


def test_a_job_has_its_operations_in_order_and_its_script_the_variables_of_paths(
    external_provider: ProvidedSite,
) -> None:
    external_provider.programs.variables["SITE_SIZE"] = "4KiB"
    external_provider.configure()

    async def story() -> None:
        async with external_provider.site.running() as (controller, _):
            await controller.order(external_provider.order(1, "stage_in"))
            assert await controller.result(7, 1) == OperationDone(size_bytes=4096)
            await controller.order(external_provider.order(2, "run"))
            await controller.result(7, 2, ScriptStarted)
            assert await controller.result(7, 2) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert shown(external_provider.site.destinations / "forebay-7.out") == "/bb/7 /bb/striped \n"
            for attempt, stage in ((3, "post_run"), (4, "stage_out"), (5, "teardown")):
                await controller.order(external_provider.order(attempt, stage, hurry=stage == "teardown"))
                assert await controller.result(7, attempt) == OperationDone()
            assert external_provider.operations() == [
                "setup",
                "data_in",
                "real_size",
                "paths",
                "pre_run",
                "post_run",
                "data_out",
                "teardown",
            ]
            assert external_provider.programs.calls()[-1].split()[3] == "true", "hurry"
            for place in ("calls", "operations", "steps"):
                assert os.listdir(external_provider.site.home / place) == [], place

    asyncio.run(story())


@pytest.mark.parametrize(("user", "uid"), [(UNKNOWN, os.geteuid()), (KNOWN, pwd.getpwnam(KNOWN).pw_uid)])
def test_datawarp_makes_and_removes_persistent_buffers_before_setup_for_the_user_if_he_is_known_here(
    external_provider: ProvidedSite, user: str, uid: int
) -> None:
    creates = (CreatePersistent("alpha", 1048576, "fast", (Access.STRIPED,), "scratch"),)
    destroys = (DestroyPersistent("beta", True),)

    async def story() -> None:
        async with external_provider.site.running() as (controller, _):
            await controller.order(
                external_provider.order(
                    1, "stage_in", provider="datawarp", creates=creates, destroys=destroys, user=user
                )
            )
            assert await controller.result(7, 1) == OperationDone()
            calls = [call.split() for call in external_provider.programs.calls()]
            assert [call[1] for call in calls] == [
                "teardown",
                "create_persistent",
                "setup",
                "data_in",
                "real_size",
                "paths",
            ]
            assert calls[0][3] == "beta" and calls[0][-1] == "--hurry"
            assert calls[1][2:] == [
                *("-c", "CLI", "-t", "alpha", "-u", str(uid)),
                *("-C", "fast:1048576", "-a", "striped", "-T", "scratch"),
            ]

    asyncio.run(story())


def test_each_persistent_buffer_is_reported_once_it_is_there_or_gone_whatever_fails_after_it(
    external_provider: ProvidedSite,
) -> None:
    creates = tuple(CreatePersistent(name, 1024, "fast") for name in ("alpha", "beta"))
    destroys = (DestroyPersistent("gamma"),)
    names = ["gamma", "alpha", "beta"]

    async def story() -> None:
        async with external_provider.site.running() as (controller, _):

            def reported(attempt: int) -> list[str]:
                results = [report.result for report in controller.accepted if report.attempt == attempt]
                return [result.name for result in results if isinstance(result, PersistentChanged)]

            def order(attempt: int, action: str) -> Order:
                more = {"provider": "datawarp", "creates": creates, "destroys": destroys}
                return external_provider.order(attempt, "stage_in", action, **more)

            await controller.order(order(1, "setup:fail:no_space"))
            assert await controller.result(7, 1) == OperationFailed("no_space", False, "setup")
            assert reported(1) == names
            await controller.order(order(2, "data_in:sleep:600"))
            await controller.wait(lambda: reported(2) == names)
            await controller.withdraw(7)

    asyncio.run(story())


def test_a_persistent_buffer_that_cannot_be_made_is_not_reported_and_nothing_follows_it(
    external_provider: ProvidedSite,
) -> None:
    external_provider.programs.variables["SITE_CREATED"] = "no"
    external_provider.configure()
    creates = (CreatePersistent("alpha", 1024, "fast"),)

    async def story() -> None:
        async with external_provider.site.running() as (controller, _):
            await controller.order(external_provider.order(1, "stage_in", provider="datawarp", creates=creates))
            assert await controller.result(7, 1) == OperationFailed("no", False, "create_persistent")
            assert len(controller.accepted) == 1
            assert [call.split()[1] for call in external_provider.programs.calls()] == ["create_persistent"]

    asyncio.run(story())


@pytest.mark.parametrize(("stage", "operation"), OPERATIONS)
def test_what_fails_is_reported_with_its_operation_and_its_message(
    external_provider: ProvidedSite, stage: str, operation: str
) -> None:
    async def story() -> None:
        async with external_provider.site.serving() as controller:
            await controller.order(external_provider.order(1, stage, f"{operation}:fail:no_space"))
            assert await controller.result(7, 1) == OperationFailed("no space", False, operation)
            assert external_provider.operations()[-1] == operation
            # The next attempt is a beginning, whatever the last one left.
            await controller.order(external_provider.order(2, stage))
            result = await controller.result(7, 2)
            assert isinstance(result, OperationDone | ScriptEnded), result

    asyncio.run(story())


@pytest.mark.campaign(3)
@pytest.mark.parametrize(("stage", "operation"), OPERATIONS)
def test_an_agent_that_is_killed_in_an_operation_begins_it_again_and_leaves_nothing_of_the_first(
    external_provider: ProvidedSite, stage: str, operation: str
) -> None:
    async def story() -> None:
        async with external_provider.site.running() as (controller, agent):
            await controller.order(external_provider.order(1, stage, f"{operation}:fork:600"))
            await until(lambda: external_provider.operations()[-1:] == [operation])
            before = external_provider.left()
            assert before
            await external_provider.site.kill_agent(agent)
            await controller.order(external_provider.order(2, stage))
            external_provider.site.start_agent()
            result = await controller.result(7, 2)
            assert isinstance(result, OperationDone | ScriptEnded), result
            assert not set(before) & set(external_provider.left())
            assert external_provider.operations().count(operation) == 2

    asyncio.run(story())


@pytest.mark.parametrize(("ordered", "action"), pairs(OPERATIONS, ("fork", "spin")))
def test_an_operation_that_nobody_wants_any_more_is_ended_before_the_next_begins(
    external_provider: ProvidedSite, ordered: tuple[str, str], action: str
) -> None:
    stage, operation = ordered

    async def story() -> None:
        async with external_provider.site.serving() as controller:
            await controller.order(external_provider.order(1, stage, f"{operation}:{action}:600"))
            await until(lambda: external_provider.operations()[-1:] == [operation])
            await controller.order(external_provider.order(2, "teardown", hurry=True))
            assert await controller.result(7, 2) == OperationDone()
            assert external_provider.operations()[-1] == "teardown"
            assert external_provider.left() == []
            assert [report for report in controller.accepted if report.attempt == 1] == []

    asyncio.run(story())


def test_a_cancelled_run_whose_pre_run_is_under_way_is_cancelled_without_its_script(
    external_provider: ProvidedSite,
) -> None:
    async def story() -> None:
        async with external_provider.site.serving() as controller:
            await controller.order(external_provider.order(1, "run", "pre_run:deaf:600"))
            await until(lambda: external_provider.operations()[-1:] == ["pre_run"])
            await controller.order(external_provider.order(1, "run", "pre_run:deaf:600", cancel=True))
            assert await controller.result(7, 1) == ScriptEnded(JobState.CANCELLED)
            assert (
                external_provider.left() == [] and not (external_provider.site.destinations / "forebay-7.out").exists()
            )

    asyncio.run(story())


def test_pre_run_is_not_repeated_for_a_script_that_runs(external_provider: ProvidedSite) -> None:
    script = script_of("#BB_LUA pool=fast", "until [ -e gate ]; do sleep 0.05; done")

    async def story() -> None:
        async with external_provider.site.running() as (controller, agent):
            await controller.order(external_provider.order(1, "run", script=script))
            await controller.result(7, 1, ScriptStarted)
            await external_provider.site.kill_agent(agent)
            await controller.order(external_provider.order(1, "run", script=script, started=True))
            external_provider.site.start_agent()
            await controller.wait(lambda: len(controller.registrations) == 2)
            (external_provider.site.destinations / "gate").touch()
            assert await controller.result(7, 1) == ScriptEnded(JobState.COMPLETED, 0, 0)
            assert external_provider.operations() == ["pre_run"]

    asyncio.run(story())


def test_sigterm_to_the_agent_ends_its_operations(external_provider: ProvidedSite) -> None:
    async def story() -> None:
        async with external_provider.site.running() as (controller, agent):
            await controller.order(external_provider.order(1, "stage_in", "setup:fork:600"))
            await until(lambda: external_provider.operations() == ["setup"])
            agent.send_signal(signal.SIGTERM)
            assert await external_provider.site.ended(agent) == 0
            assert external_provider.left() == []

    asyncio.run(story())


def test_what_a_finished_operation_left_running_outlives_the_next_ones(external_provider: ProvidedSite) -> None:
    async def story() -> None:
        async with external_provider.site.serving() as controller:
            await controller.order(external_provider.order(1, "stage_in", "setup:background:600"))
            assert await controller.result(7, 1) == OperationDone()
            left = external_provider.left()
            assert len(left) == 1
            await controller.order(external_provider.order(2, "post_run"))
            assert await controller.result(7, 2) == OperationDone()
            assert external_provider.left() == left
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    asyncio.run(story())


def test_what_a_script_says_is_in_the_agents_log_with_its_job_and_cannot_forge_a_line(
    external_provider: ProvidedSite,
) -> None:
    external_provider.programs.script.write_text(
        "function slurm_bb_setup()\n"
        "  slurm.log_info('hello')\n"
        "  return slurm.ERROR, 'no\\n1970-01-01 INFO forged'\n"
        "end\n"
    )

    async def story() -> None:
        async with external_provider.site.running() as (controller, _):
            await controller.order(external_provider.order(1, "stage_in"))
            assert await controller.result(7, 1) == OperationFailed("no\n1970-01-01 INFO forged", False, "setup")
            said = shown(external_provider.site.directory / "agent.log")
            assert " INFO forebay.cluster.providers.commands: job 7: slurm_bb_setup: info: hello\n" in said
            assert "failed: no\\n1970-01-01 INFO forged\n" in said and "\n1970" not in said

    asyncio.run(story())


def test_a_program_that_others_may_change_is_not_run(external_provider: ProvidedSite) -> None:
    external_provider.programs.script.chmod(0o777)

    async def story() -> None:
        async with external_provider.site.serving() as controller:
            await controller.order(external_provider.order(1, "stage_in"))
            failed = await controller.result(7, 1)
            assert isinstance(failed, OperationFailed) and failed.final and failed.operation == "setup"
            assert "others may write to" in failed.message and "chmod go-w" in failed.message
            assert external_provider.operations() == []

    asyncio.run(story())
