"""Jobs that want to outlive their end: with a cgroup nothing of them does, without one what can be listed does not."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import msgspec
import pytest

from forebay.cluster.agent.limits import SUPERVISOR_LAUNCHES_MAX
from forebay.cluster.agent.processes import (
    AUTO,
    Cgroup,
    CgroupName,
    CgroupRefused,
    CgroupTree,
    ForkServer,
    cloning,
    enter,
    fork,
    open_tree,
)
from forebay.cluster.agent.processes.environment import account_for
from forebay.cluster.agent.runtime import StateDirectory
from forebay.cluster.agent.scripts.record import ScriptOrder, create_record
from forebay.cluster.agent.service import NOT_PROMISED
from forebay.cluster.system import boot_id, open_directory
from forebay.cluster.system import closing as os_closing
from forebay.replica.messages.commands import OperationDone, ScriptEnded
from forebay.replica.model.job_states import JobState
from forebay.replica.model.orders import SpecialTransfers
from tests.cluster.agent.conftest import Site
from tests.cluster.agent.double import ControllerDouble, stands_still
from tests.faults import escape

ATTACK: Final = Path(escape.__file__)


def why_no_cgroup() -> str:
    """Return why no cgroup can be made here, nothing if one can."""
    try:
        open_tree(AUTO, uuid.uuid4().hex).remove()
    except CgroupRefused as error:
        return str(error)
    return ""


NO_CGROUP: Final = why_no_cgroup()
HELD: Final = pytest.param(
    "auto", tuple(escape.WAYS), id="cgroup", marks=pytest.mark.skipif(bool(NO_CGROUP), reason=NO_CGROUP or "-")
)
LISTED: Final = pytest.param("none", tuple(escape.LISTED), id="listed")
"""Where there is a cgroup all ways are tried, elsewhere those that the listing finds."""

each_promise = pytest.mark.parametrize(("cgroup", "ways"), [HELD, LISTED])


class Attack:
    """One job that does not want to end, and what of it lives."""

    def __init__(self, site: Site, ways: tuple[str, ...]) -> None:
        self._site = site
        self._ways = ways
        self._fifo = site.destinations / "up"
        self.locks = site.destinations / "locks"
        self.locks.mkdir()
        os.mkfifo(self._fifo)

    def command(self, *more: str) -> str:
        """Return the shell command that begins it."""
        words = (sys.executable, "-I", "-S", str(ATTACK), str(self.locks), str(self._fifo), ",".join(self._ways))
        return shlex.join((*words, *more))

    def script(self, *more: str) -> str:
        """Return a job's script that is it."""
        return f"#!/bin/sh\nexec {self.command(*more)}\n"

    async def is_up(self) -> None:
        """Wait until all of it lives."""
        assert await asyncio.to_thread(self._fifo.read_text) == "up\n"

    @property
    def survivors(self) -> list[str]:
        """The ways of which something lives."""
        return escape.survivors(self.locks)


@pytest.fixture
def attack(site: Site, cgroup: str, ways: tuple[str, ...]) -> Iterator[Attack]:
    """A node whose agent holds jobs as the parameters say, and the attack; nothing of it outlives the test."""
    site.configure(more=f'cgroup = "{cgroup}"')
    made = Attack(site, ways)
    yield made
    storage_id = site.home / "storage-id"
    if not NO_CGROUP and storage_id.exists():
        tree = open_tree(AUTO, storage_id.read_text().strip())
        tree.sweep(())
        tree.remove()


async def ended(controller: ControllerDouble) -> ScriptEnded:
    result = await controller.result(7, 2)
    assert isinstance(result, ScriptEnded), result
    return result


@each_promise
def test_nothing_of_a_script_outlives_its_own_end(site: Site, attack: Attack) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            await controller.order(site.order(7, 2, "run", script=attack.script()))
            await attack.is_up()
            assert (await ended(controller)).result is JobState.COMPLETED
            assert attack.survivors == []

    asyncio.run(story())


@each_promise
def test_nothing_of_a_script_outlives_its_time_limit(site: Site, attack: Attack) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            await controller.order(site.order(7, 2, "run", script=attack.script("stay"), time_limit_s=2))
            await attack.is_up()
            assert (await ended(controller)).result is JobState.TIMEOUT
            assert attack.survivors == []

    asyncio.run(story())


@each_promise
def test_nothing_of_a_script_outlives_its_cancellation_though_the_agent_was_killed_before(
    site: Site, attack: Attack
) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            script = attack.script("stay")
            await controller.order(site.order(7, 2, "run", script=script))
            await attack.is_up()
            await site.kill_agent(agent)
            site.start_agent()
            await controller.wait(lambda: len(controller.registrations) > 1)
            await controller.order(site.order(7, 2, "run", script=script, started=True, cancel=True))
            assert (await ended(controller)).result is JobState.CANCELLED
            assert attack.survivors == []

    asyncio.run(story())


@pytest.mark.parametrize(("cgroup", "ways"), [HELD])
def test_nothing_of_a_script_outlives_its_supervisor_for_long(site: Site, attack: Attack) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            await controller.order(site.order(7, 2, "run", script=attack.script("stay")))
            await attack.is_up()
            (supervisor,) = site.supervisors()
            os.kill(supervisor, signal.SIGKILL)
            assert (await ended(controller)).result is JobState.NODE_FAIL
            assert attack.survivors == []

    asyncio.run(story())


@each_promise
def test_nothing_of_a_command_outlives_its_stage_in(site: Site, attack: Attack) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            special = SpecialTransfers(commands=(attack.command(),))
            await controller.order(site.order(7, 2, "stage_in", special=special))
            await attack.is_up()
            assert isinstance(await controller.result(7, 2), OperationDone)
            assert attack.survivors == []

    asyncio.run(story())


@pytest.mark.parametrize(("cgroup", "ways"), [HELD])
def test_a_script_that_nobody_has_a_record_of_is_ended_when_the_agent_starts(site: Site, attack: Attack) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            await controller.order(site.order(7, 2, "run", script=attack.script("stay")))
            await attack.is_up()
            await site.kill_agent(agent)
            (site.home / "steps" / "7").rename(site.home / "moved-away")
            site.start_agent()
            await controller.wait(lambda: len(controller.registrations) > 1)
            assert attack.survivors == []

    asyncio.run(story())


@pytest.mark.parametrize(("cgroup", "ways"), [HELD])
def test_a_suspended_script_stands_still_as_a_whole_and_goes_on_when_it_is_cancelled(
    site: Site, attack: Attack
) -> None:
    async def story() -> None:
        async with site.running() as (controller, _):
            script = attack.script("stay")
            await controller.order(site.order(7, 2, "run", script=script))
            await attack.is_up()
            tree = open_tree(AUTO, (site.home / "storage-id").read_text().strip())
            procs = Path(tree.path, "job-7-2", "cgroup.procs")
            await controller.order(site.order(7, 2, "run", script=script, started=True, suspend=True))
            while not all(map(stands_still, await asyncio.to_thread(lambda: procs.read_text().split()))):
                await asyncio.sleep(0)
            still = sorted(procs.read_text().split())
            assert len(still) > len(escape.WAYS) and set(escape.survivors(attack.locks)) == set(escape.WAYS)
            assert sorted(procs.read_text().split()) == still
            await controller.order(site.order(7, 2, "run", script=script, started=True, suspend=True, cancel=True))
            assert (await ended(controller)).result is JobState.CANCELLED
            assert attack.survivors == [] and not procs.exists()

    asyncio.run(story())


@pytest.mark.parametrize("why", ["output", "workdir", "interpreter", "cancel", "started"])
@pytest.mark.parametrize(("cgroup", "ways"), [HELD])
def test_a_script_that_never_starts_leaves_no_cgroup(site: Site, attack: Attack, why: str) -> None:
    """Its job has no buffer here, so no teardown looks after what is left."""
    asked: dict[str, dict[str, object]] = {
        "output": {"output": str(site.destinations / "missing" / "x.out")},
        "workdir": {"workdir": str(site.destinations / "missing")},
        "interpreter": {"script": "#!/no/such/interpreter\n"},
        "cancel": {"cancel": True},
        "started": {"started": True},
    }

    async def story() -> None:
        async with site.running() as (controller, _):
            tree = Path(open_tree(AUTO, (site.home / "storage-id").read_text().strip()).path)
            await controller.order(site.order(7, 2, "run", **{"script": "#!/bin/sh\n", **asked[why]}))
            assert (await ended(controller)).result is not JobState.COMPLETED
            assert list(tree.glob("job-7-*")) == []

    asyncio.run(story())


@pytest.mark.parametrize(("cgroup", "ways"), [HELD])
def test_a_script_whose_supervisors_died_before_they_started_it_leaves_no_cgroup(site: Site, attack: Attack) -> None:
    """The agent of before had made the record and the cgroup, and had launched as many as may be."""

    async def story() -> None:
        async with site.running() as (controller, agent):
            await site.kill_agent(agent)
            storage_id = (site.home / "storage-id").read_text().strip()
            order = site.order(7, 2, "run", script="#!/bin/sh\n")
            wanted = ScriptOrder(
                order=order, node="n1", home=str(site.home), storage_id=storage_id, accounts="own", kill_wait_s=1
            )
            with (
                closing(open_tree(AUTO, storage_id).script(7, 2)) as cgroup,
                os_closing(open_directory(str(site.home / "steps"))) as steps,
            ):
                record = create_record(steps, wanted, account_for("own", "alice"), cgroup.name)
                for _ in range(SUPERVISOR_LAUNCHES_MAX):
                    record.count_launch()
                record.close()
            await controller.order(order)
            site.start_agent()
            assert (await ended(controller)).result is JobState.NODE_FAIL
            assert not os.path.exists(cgroup.path)

    asyncio.run(story())


@pytest.mark.parametrize(("cgroup", "ways"), [HELD])
def test_an_agent_that_ends_leaves_no_cgroup_unless_a_script_lives_in_it(site: Site, attack: Attack) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            tree = Path(open_tree(AUTO, (site.home / "storage-id").read_text().strip()).path)
            agent.terminate()
            assert await site.ended(agent) == 0 and not tree.exists()
            agent = site.start_agent()
            await controller.wait(lambda: len(controller.registrations) > 1)
            await controller.order(site.order(7, 2, "run", script=attack.script("stay")))
            await attack.is_up()
            agent.terminate()
            assert await site.ended(agent) == 0 and [path.name for path in tree.glob("*-*")] == ["job-7-2"]
            assert set(attack.survivors) == set(escape.WAYS)

    asyncio.run(story())


def test_an_agent_without_cgroups_says_at_its_start_what_it_cannot_promise(site: Site) -> None:
    site.configure(more='cgroup = "none"')

    async def story() -> None:
        async with site.running():
            assert NOT_PROMISED in (site.directory / "agent.log").read_text()

    asyncio.run(story())


def test_an_agent_whose_cgroup_is_none_does_not_start_where_one_is_demanded(site: Site) -> None:
    site.configure(more=f'cgroup = "{site.directory}"')
    agent = site.start_agent()
    assert agent.wait(60) == 1
    assert f"{site.directory} is not a cgroup (v2)" in (site.directory / "agent.log").read_text()


class OldCgroup(Cgroup):
    """Cgroup of a kernel before 5.14, which has no cgroup.kill."""

    def _write(self, file: str, text: str) -> None:
        if file == "cgroup.kill":
            raise FileNotFoundError(file)
        super()._write(file, text)


@pytest.fixture
def tree() -> Iterator[CgroupTree]:
    """A tree of one's own."""
    if NO_CGROUP:
        pytest.skip(NO_CGROUP)
    made = open_tree(AUTO, uuid.uuid4().hex)
    yield made
    made.sweep(())
    made.remove()


@pytest.mark.parametrize("kind", [Cgroup, OldCgroup])
def test_a_cgroup_is_ended_whole_by_any_kernel(tree: CgroupTree, tmp_path: Path, kind: type[Cgroup]) -> None:
    made = tree.script(7, 1)
    with closing(kind(made.path, made.directory)) as cgroup:
        locks, fifo = tmp_path / "locks", tmp_path / "up"
        locks.mkdir()
        os.mkfifo(fifo)
        child = os.fork()
        if child == 0:
            try:
                enter(os.dup(cgroup.directory))
                escape.main(locks, fifo, tuple(escape.WAYS), stays=False)
            finally:
                os._exit(0)
        assert fifo.read_text() == "up\n"
        os.waitpid(child, 0)
        assert set(escape.survivors(locks)) == set(escape.WAYS) and not cgroup.is_empty
        assert cgroup.kill(30) == [] and escape.survivors(locks) == [] and cgroup.is_empty
        assert cgroup.remove() and not os.path.exists(made.path)


def where_is(pid: int) -> str:
    """Return the cgroup of a process."""
    return next(line[3:] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line.startswith("0::"))


@pytest.mark.parametrize("sibling", [False, True], ids=["child", "sibling"])
@pytest.mark.parametrize("old", [False, True], ids=["now", "before 5.7"])
def test_what_is_forked_for_a_cgroup_is_in_it_or_knows_that_it_has_to_enter(
    tree: CgroupTree, monkeypatch: pytest.MonkeyPatch, old: bool, sibling: bool
) -> None:
    clone = cloning._clone

    def of_old_kernel(cgroup: int, *, sibling: bool) -> int:
        if cgroup >= 0:
            raise OSError(7, os.strerror(7))
        return clone(cgroup, sibling=sibling)

    if old:
        monkeypatch.setattr(cloning, "_clone", of_old_kernel)
    answers, answered = os.pipe()
    with closing(tree.script(7, 1)) as cgroup:
        # A sibling's parent is this test's own, who does not wait for it: so it is made by a child.
        middle = os.fork() if sibling else 0
        if middle == 0:
            pid, is_within = fork(cgroup.directory, sibling=sibling)
            if pid == 0:
                before = where_is(os.getpid())
                if not is_within:
                    enter(os.dup(cgroup.directory))
                os.write(answered, f"{is_within} {before} {where_is(os.getpid())} {os.getpid()}".encode())
                os._exit(0)
            if sibling:
                os._exit(0)
            middle = pid
        os.waitpid(middle, 0)
        is_within, before, after, forked = os.read(answers, 4096).decode().split()
        assert after.endswith("/job-7-1")
        assert (is_within == "True") == (before == after) == (not old)
        if sibling:
            os.waitpid(int(forked), 0)
        assert cgroup.is_empty and cgroup.remove()
    os.close(answers)
    os.close(answered)


@pytest.mark.parametrize("is_forked", [True, False], ids=["forked", "started"])
def test_a_worker_is_in_its_cgroup_before_it_does_anything(tree: CgroupTree, site: Site, is_forked: bool) -> None:
    server = ForkServer()
    if is_forked:
        server.start()
        server.await_ready()
    asks, asked = os.pipe()
    nothing = os.open(os.devnull, os.O_RDWR)
    os.write(asked, b"no work\n")
    with closing(tree.script(7, 1)) as cgroup:
        worker = server.spawn(
            "forebay.cluster.agent.worker.worker",
            (),
            descriptors=(),
            stdin=asks,
            stdout=nothing,
            stderr=nothing,
            new_session=False,
            new_group=True,
            cgroup=cgroup,
        )
        while worker.pid not in cgroup.pids():
            assert worker.poll() is None, "it ended without having been there"
        # It reads to the end before it does anything.
        os.close(asked)
        assert worker.wait() == 1
        assert cgroup.is_empty
    for descriptor in (asks, nothing):
        os.close(descriptor)
    server.close()


def test_a_cgroup_is_found_again_by_its_name_and_another_one_at_its_path_is_not(tree: CgroupTree) -> None:
    with closing(tree.script(7, 1)) as cgroup:
        name = cgroup.name
        found = Cgroup.find(name)
        assert found is not None and found.name == name
        found.close()
        assert cgroup.remove()
    with closing(tree.script(7, 1)) as other:
        assert other.path == name.path
        assert Cgroup.find(name) is None
        assert Cgroup.find(CgroupName(path=other.path, inode=other.name.inode, boot="another")) is None


def test_what_is_no_cgroup_is_never_found(tmp_path: Path) -> None:
    assert Cgroup.find(None) is None
    name = CgroupName(path=str(tmp_path), inode=tmp_path.stat().st_ino, boot=boot_id())
    assert Cgroup.find(name) is None


@pytest.mark.parametrize("kind", [Cgroup, OldCgroup])
def test_the_end_of_a_jobs_scripts_is_the_end_of_no_other_jobs(
    tree: CgroupTree, monkeypatch: pytest.MonkeyPatch, kind: type[Cgroup]
) -> None:
    monkeypatch.setattr(
        CgroupTree, "_open", lambda self, name: kind(path := f"{self.path}/{name}", open_directory(path))
    )
    living = {}
    for job, attempt in ((7, 1), (7, 2), (77, 1)):
        with closing(tree.script(job, attempt)) as cgroup:
            pid, is_within = fork(cgroup.directory)
            if pid == 0:
                if not is_within:
                    enter(cgroup.directory)
                signal.pause()
            living[job, attempt] = pid
            while pid not in cgroup.pids():
                pass
    assert tree.end_scripts(7) == []
    for attempt in (1, 2):
        assert os.waitpid(living[7, attempt], 0)[1] == signal.SIGKILL
    assert os.waitpid(living[77, 1], os.WNOHANG) == (0, 0)
    tree.sweep(())
    os.waitpid(living[77, 1], 0)
    assert tree.end_scripts(7) == []
    tree.remove()
    assert tree.end_scripts(7) == []


@pytest.mark.parametrize("earlier", ["none", "other", "same"])
@pytest.mark.parametrize("held", [True, False], ids=["held", "not held"])
@pytest.mark.skipif(bool(NO_CGROUP), reason=NO_CGROUP or "-")
def test_all_processes_are_looked_at_for_each_job_that_may_have_some_outside_of_its_cgroups(
    tmp_path: Path, earlier: str, held: bool
) -> None:
    with closing(StateDirectory(tmp_path / "n1", "own")) as home:
        (home.path / "buffers" / "7").mkdir()
        (home.path / "steps" / "8").mkdir()
        if held:
            name = CgroupName(path="/sys/fs/cgroup/x", inode=1, boot=boot_id())
            (home.path / "steps" / "8" / "cgroup.json").write_bytes(msgspec.json.encode(name))
        if earlier != "none":
            path = open_tree(AUTO, home.storage_id).path if earlier == "same" else "/sys/fs/cgroup/other"
            name = CgroupName(path=path, inode=1, boot="another")
            (home.path / "cgroup").write_bytes(msgspec.json.encode(name))
        assert home.cgroups_of(7) == ""
        assert home.hold_processes(AUTO) == "" and home.cgroups is not None
        everywhere = {job for job in (7, 8, 9) if not home.cgroups_of(job)}
        assert everywhere == ({7} if earlier != "same" else set()) | (set() if held else {8})
        assert home.cgroups_of(9) == home.cgroups.path
        home.cgroups.remove()


def test_a_home_without_cgroups_says_why(tmp_path: Path) -> None:
    with closing(StateDirectory(tmp_path / "n1", "own")) as home:
        assert home.hold_processes("none") == 'cgroup = "none" is configured' and home.cgroups is None
