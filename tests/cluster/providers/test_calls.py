"""Provider calls of a replica: worker processes, limits, cleanup, and the pool watch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cluster.providers import OperationError, PoolReport
from forebay.cluster.providers.calls import ProviderCalls, TooManyCalls, changes, foreign_bytes
from forebay.cluster.providers.limits import CALLS_IDLE_MAX, CALLS_MAX, CALLS_WAITING_MAX
from forebay.cluster.providers.private_directory import PREFIX, private_directory
from forebay.cluster.providers.worker import LENGTH_BYTES, CallAnswer, CallRequest
from forebay.cluster.system.processes import all_pids, descendants, environment_variables
from forebay.replica.messages.commands import CONTROLLER, ChangePool
from forebay.replica.model.configuration import Site
from forebay.replica.model.pools import Pool, PoolUnit
from forebay.replica.model.provider import Provision
from forebay.replica.state.state import EMPTY, State
from forebay.replica.values.errors import Rejection
from tests.cluster.agent.conftest import ROOT
from tests.cluster.harness import story, until
from tests.cluster.providers.conftest import Programs
from tests.replica.world import World


def request(programs: Programs, *actions: str, operation: str = "process", timeout_s: int = 30) -> CallRequest:
    """Return a request about a job with these actions."""
    provision = Provision(provider="lua", lua_script=str(programs.script))
    values: dict[str, Any] = {"validate_timeout_s": timeout_s, "other_timeout_s": timeout_s}
    return CallRequest(
        operation=msgspec.convert(operation, type=Any),
        provision=msgspec.structs.replace(provision, **values),
        local=programs.local,
        subject=programs.subject(*actions, user="nobody-of-this-name"),
        user="root",
        arguments=("a", "b"),
    )


@story
async def test_validation_pools_and_status_reuse_a_worker(programs: Programs) -> None:

    calls, before = ProviderCalls(), set(descendants(os.getpid()))
    assert (await calls.ask(request(programs), 30)).failed == ""
    worker = set(descendants(os.getpid())) - before
    assert len(worker) == 1
    pools = (await calls.ask(request(programs, operation="pools"), 30)).pools
    assert pools == (PoolReport(name="fast", quantity=5, granularity=1048576),)
    assert (await calls.ask(request(programs, operation="get_status"), 30)).text == "a b\n"
    with pytest.raises(OperationError) as raised:
        await calls.ask(request(programs, "process:fail:not_allowed"), 30)
    assert (raised.value.operation, raised.value.message) == ("process", "not allowed")
    assert set(descendants(os.getpid())) - before == worker
    assert programs.calls()[0].split()[2:4] == ["65534", "2002"], "a user who is not known here is nobody"
    await calls.close()
    assert set(descendants(os.getpid())) <= before, "earlier tests may leave processes that are ending"


@story
async def test_requests_share_a_few_workers_and_excess_is_rejected(programs: Programs) -> None:

    calls, before = ProviderCalls(), set(descendants(os.getpid()))
    tasks = [
        asyncio.create_task(calls.ask(request(programs, "process:sleep:600"), 600))
        for _ in range(CALLS_MAX + CALLS_WAITING_MAX)
    ]
    while len(programs.calls()) < CALLS_MAX:
        await asyncio.sleep(0.02)
    with pytest.raises(TooManyCalls):
        await calls.ask(request(programs), 30)
    for task in tasks:
        task.cancel()
    assert all(isinstance(one, BaseException) for one in await asyncio.gather(*tasks, return_exceptions=True))
    await calls.close()
    assert set(descendants(os.getpid())) <= before and programs.left() == []
    assert CALLS_IDLE_MAX < CALLS_MAX


@pytest.mark.parametrize("action", ["spin", "fork:600", "deaf:600"])
def test_a_hanging_validation_ends_at_its_timeout(programs: Programs, action: str) -> None:
    async def ask() -> None:
        calls = ProviderCalls()
        try:
            with pytest.raises(OperationError) as raised:
                await calls.ask(request(programs, f"process:{action}", timeout_s=1), 1)
            assert raised.value.message == "Timeout @ 1000 msec"
        finally:
            await calls.close()

    asyncio.run(ask())
    assert programs.left() == []


@story
async def test_a_killed_worker_fails_only_its_own_request(programs: Programs) -> None:

    calls, before = ProviderCalls(), set(descendants(os.getpid()))
    asked = asyncio.create_task(calls.ask(request(programs, "process:sleep:600"), 600))
    while not programs.calls():
        await asyncio.sleep(0.02)
    for pid in set(descendants(os.getpid())) - before:
        with contextlib.suppress(ProcessLookupError):  # the worker's end ends what it started
            os.kill(pid, signal.SIGKILL)
    with pytest.raises(OperationError, match="the worker failed"):
        await asked
    assert (await calls.ask(request(programs), 30)).failed == ""
    await calls.close()


class Worker:
    """A worker process whose temporary directory is the test's."""

    def __init__(self, temporary: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "forebay.cluster.providers.worker", str(os.getpid())],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "TMPDIR": str(temporary)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def tell(self, question: CallRequest) -> None:
        """Ask."""
        assert self.process.stdin is not None
        data = msgspec.json.encode(question)
        self.process.stdin.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        self.process.stdin.flush()

    def answer(self) -> CallAnswer:
        """Wait for its answer."""
        assert self.process.stdout is not None
        length = int.from_bytes(self.process.stdout.read(LENGTH_BYTES), "big")
        return msgspec.json.decode(self.process.stdout.read(length), type=CallAnswer)

    def end(self) -> str:
        """Wait for the worker's end and return its log."""
        _, said = self.process.communicate()
        return said.decode()


def of_call(directory: Path) -> list[int]:
    """Return the living processes that a call with this directory started."""
    return [pid for pid in all_pids() if f"FOREBAY_OPERATION={directory.name}".encode() in environment_variables(pid)]


@story
async def test_leftovers_of_a_killed_replicas_call_are_removed_by_the_next_call(
    programs: Programs, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    others = temporary / f"{PREFIX}somebody"
    others.mkdir()
    others.chmod(0o755)  # whatever the umask is
    first, live = Worker(temporary), Worker(temporary)
    first.tell(request(programs, "process:fork:600"))
    await until(lambda: len(programs.calls()) == 1)
    (mine,) = set(temporary.iterdir()) - {others}
    live.tell(request(programs, "process:sleep:600"))
    await until(lambda: len(programs.calls()) == 2)
    (going_on,) = set(temporary.iterdir()) - {mine, others}
    assert {directory.stat().st_mode & 0o777 for directory in (mine, going_on)} == {0o700}
    await until(lambda: bool(of_call(mine) and of_call(going_on)))
    first.process.kill()
    first.process.wait()
    assert mine.exists() and of_call(mine)
    second = Worker(temporary)
    second.tell(request(programs))
    assert second.answer().failed == ""
    assert set(temporary.iterdir()) == {going_on, others}, "only what nobody holds is removed"
    assert of_call(going_on) and not of_call(mine)
    live.process.send_signal(signal.SIGTERM)
    live.end()
    assert programs.left() == [] and set(temporary.iterdir()) == {others}
    second.end()


def test_script_output_is_logged_by_line_without_terminal_escapes(programs: Programs, tmp_path: Path) -> None:
    programs.script.write_text(
        "function slurm_bb_pools() slurm.log_info('a\\27[31m b') print('first\\nsecond') return slurm.SUCCESS end\n"
    )
    worker = Worker(tmp_path)
    worker.tell(request(programs, operation="pools"))
    assert worker.answer().failed == ""
    said = [line.split(": ", 1)[1] for line in worker.end().splitlines()]
    assert said == ["slurm_bb_pools: first", "slurm_bb_pools: second", "slurm_bb_pools: info: a\\x1b[31m b"]


def state_with(*pools: Pool, site: Site) -> State:
    """Return a State with these pools."""
    found = msgspec.structs.replace(EMPTY, site=site)
    for pool in pools:
        found = msgspec.structs.replace(found, pools=found.pools.set(pool.name, pool))
    return found


def test_only_changes_of_a_pool_become_commands() -> None:
    lua = Site(provider="lua")
    reports = (
        PoolReport(name="new", quantity=3, granularity=1024),
        PoolReport(name="same", quantity=2, granularity=10),
        PoolReport(name="more", quantity=4, granularity=10),
        PoolReport(name="units", quantity=4, granularity=1, is_bytes=False),
    )
    state = state_with(
        Pool("same", 20, 10, is_reported=True),
        Pool("more", 20, 10, is_reported=True),
        Pool("gone", 5, 1, is_reported=True),
        Pool("own", 5, 1),
        site=lua,
    )
    assert list(changes(state, reports)) == [
        ChangePool("new", exists=False, quantity=3072, granularity=1024, unit=PoolUnit.BYTES, is_reported=True),
        ChangePool("more", quantity=40, granularity=10, is_reported=True),
        ChangePool("units", exists=False, quantity=4, granularity=1, unit=PoolUnit.COUNT, is_reported=True),
        ChangePool("gone", quantity=0),
    ]
    assert list(changes(state_with(Pool("same", 20, 10, is_reported=True), site=lua), reports[1:2])) == []


def test_a_vanished_pool_grants_no_capacity_under_any_leader() -> None:
    """A new leader knows the state, but no polls of its predecessor."""
    here = World(pools={"fast": 20, "own": 50}, provider="lua")
    asked = [(PoolReport(name="fast", quantity=2, granularity=10), PoolReport(name="big", quantity=9, granularity=1))]
    asked += [(asked[0][1],), (), asked[0]]
    seen = []
    for reports in asked:
        for command in changes(here.state, reports):
            assert not isinstance(here.settle(command, CONTROLLER), Rejection)
        assert list(changes(here.state, reports)) == [], "once is enough"
        seen.append({name: pool.quantity_bytes for name, pool in here.state.pools.items()})
    assert seen[0] == seen[3] == {"fast": 20, "big": 9, "own": 50}
    assert seen[1:3] == [{"fast": 0, "big": 9, "own": 50}, {"fast": 0, "big": 0, "own": 50}]


@pytest.mark.parametrize("free", range(-1, 12))
@pytest.mark.parametrize("held", [(0, 0), (20, 30), (30, 20), (100, 100)])
def test_reported_free_capacity_bounds_the_usage_of_others(free: int, held: tuple[int, int]) -> None:
    def state(amount: int) -> State:
        found = state_with(Pool("fast", 100, 10, out_of_service_bytes=10), site=Site(provider="lua"))
        return msgspec.structs.replace(found, held_bytes=found.held_bytes.set("fast", amount))

    report = PoolReport(name="fast", quantity=10, granularity=10, free=free)
    explained = max(held) + 10
    foreign = 100 - 10 * max(0, free) - explained
    found = foreign_bytes(*map(state, held), (report, PoolReport(name="new", quantity=1, granularity=1, free=0)))
    assert found == ({"fast": foreign} if foreign > 0 else {})
    assert foreign_bytes(*map(state, held), (msgspec.structs.replace(report, free=None),)) == {}


def test_the_first_datawarp_pool_is_the_default_unless_configured() -> None:
    reports = (
        PoolReport(name="first", quantity=1, granularity=1),
        PoolReport(name="second", quantity=1, granularity=1),
    )
    for site, default in (
        (Site(provider="datawarp"), "first"),
        (Site(provider="datawarp", default_pool="second"), "second"),
        (Site(provider="lua"), None),
    ):
        found = changes(state_with(site=site), reports)
        named = [c.pool for c in found if isinstance(c, ChangePool) and c.is_default]
        assert named == ([] if default is None else [default])


def test_replicas_do_not_import_modules_that_fork() -> None:
    code = "import forebay.cluster.serve, sys; print('forebay.cluster.providers.guard' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_a_directory_removed_by_a_concurrent_cleanup_is_recreated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = iter([str(tmp_path / "gone"), str(tmp_path / "there")])
    (tmp_path / "there").mkdir()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda prefix: next(made))
    with private_directory() as directory:
        assert directory == str(tmp_path / "there")
    assert not (tmp_path / "there").exists()
