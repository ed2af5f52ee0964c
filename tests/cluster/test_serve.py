"""The process: it starts, forms a cluster, survives its leader's death, and ends with a code and a sentence."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest

from forebay.cluster.client import Client
from forebay.cluster.client.errors import ApiError
from forebay.cluster.config.config import Config
from forebay.cluster.config.new_site import Founding, PoolSpec, create_site
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas.job_fields import SubmitRequest
from forebay.cluster.security.identity import Role
from forebay.cluster.security.pki import CERTIFICATE_LIFETIME_DAYS, issue, load_authority
from forebay.cluster.serve import CommitWatch
from forebay.cluster.server.controller import Controller
from forebay.cluster.server.storage import first_start_mark
from forebay.cluster.system.clock import SystemClock
from forebay.cluster.system.processes import hold_termination
from forebay.replica.values.units import Instant
from forebay.wal.sync_log import LOG_BYTES
from tests.account import OWN
from tests.cluster.harness import PATIENCE_S, PLAIN, story
from tests.ports import free_ports
from tests.repo.tree import ROOT


def make(directory: Path, replicas: int) -> Config:
    founding = Founding(
        replicas=replicas,
        agents=1,
        base_port=free_ports(14)[0],
        pools=(PoolSpec("fast", "96MiB", "8MiB", True),),
        users=("alice",),
        accounts=OWN,
        destination_roots=(directory,),
    )
    return create_site(directory, founding, clock=SystemClock())


async def start(
    config: Path, name: str, *words: str, module: str = "forebay.cluster.serve", **options: object
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        "--config",
        str(config),
        "--name",
        name,
        *words,
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
        **options,  # type: ignore[arg-type]
    )


async def finish(process: asyncio.subprocess.Process) -> tuple[int, str]:
    async with asyncio.timeout(PATIENCE_S):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode()


@contextlib.asynccontextmanager
async def running(config: Config, *names: str) -> AsyncIterator[dict[str, asyncio.subprocess.Process]]:
    processes = {name: await start(config.file, name) for name in names}
    drains = [asyncio.create_task(drain(process)) for process in processes.values()]
    try:
        yield processes
    finally:
        for process in processes.values():
            if process.returncode is None:
                process.kill()
            await process.wait()
        for task in drains:
            await task


async def drain(process: asyncio.subprocess.Process) -> None:
    assert process.stderr is not None
    with contextlib.suppress(ValueError, RuntimeError):
        while await process.stderr.read(65536):
            pass


async def ready(client: Client) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                await client.call(ops.LIST_MEMBERS, deadline_s=10)
                return
            except ApiError:
                await asyncio.sleep(0.05)


def request(client: Client, directory: Path) -> SubmitRequest:
    return SubmitRequest(
        command_id=client.new_command_id(), script=PLAIN, time_limit_s=60, workdir=str(directory), hold=True
    )


@story
async def test_three_processes_agree_survive_their_leaders_death_and_end_with_the_same_digests(tmp_path: Path) -> None:
    config = make(tmp_path, 3)
    async with running(config, "r1", "r2", "r3") as processes:
        async with Client(config.endpoints, config.tls_files("alice")) as client:
            await ready(client)
            jobs = [(await client.call(ops.SUBMIT_JOB, request(client, tmp_path))).job_id for _ in range(5)]
            leader = (await client.call(ops.LIST_MEMBERS)).leader
            assert leader is not None
            processes[leader].kill()
            await processes[leader].wait()
            jobs += [(await client.call(ops.SUBMIT_JOB, request(client, tmp_path))).job_id for _ in range(5)]
            assert jobs == list(range(1, 11))
            assert (await client.call(ops.LIST_MEMBERS)).leader not in (None, leader)
            processes[leader] = await start(config.file, leader)
            task = asyncio.create_task(drain(processes[leader]))
            revision = (await client.call(ops.LIST_JOBS)).revision
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    with contextlib.suppress(ApiError):
                        calls = (
                            client.call(ops.SHOW_STATUS, replica=replica.api, digest=True, deadline_s=2)
                            for replica in config.replicas
                        )
                        found = await asyncio.gather(*calls)
                        # A leader may record a digest at any moment: that is a revision, too.
                        revisions = {status.revision for status in found}
                        if len(revisions) == 1 and min(revisions) >= revision and all(one.ready for one in found):
                            break
                    await asyncio.sleep(0.05)
            assert len({(status.state_digest, status.ledger_digest, status.applied_index) for status in found}) == 1
            for name, process in processes.items():
                process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(PATIENCE_S):
                    assert await process.wait() == 0, name
            await task


@story
async def test_a_replica_that_cannot_start_says_why_in_one_sentence_with_an_exit_code(tmp_path: Path) -> None:
    config = make(tmp_path, 1)

    async def refused(code: int, *words: str, file: Path = config.file, name: str = "r1") -> None:
        found_code, errors = await finish(await start(file, name))
        last = errors.strip().splitlines()[-1]
        assert found_code == code, errors
        assert last.startswith("forebay: "), errors
        for word in words:
            assert word in last, errors
        assert "Traceback" not in errors

    await refused(78, "r9", name="r9")
    await refused(78, "nowhere.toml", file=tmp_path / "nowhere.toml")
    odd = tmp_path / "odd.toml"
    odd.write_text(config.file.read_text().replace("snapshots_kept", "snapshots_keept"))
    await refused(78, "snapshots_keept", file=odd)
    key = config.tls.certificates / "r1.key"
    key.chmod(0o644)
    await refused(78, "r1.key")
    key.chmod(0o600)
    with socket.socket() as taken:
        taken.bind((config.replicas[0].api.host, config.replicas[0].api.port))
        taken.listen()
        await refused(69, "address", "r1")
    async with running(config, "r1"):
        async with Client(config.endpoints, config.tls_files("alice")) as client:
            await ready(client)
        await refused(66, "process")
        code, errors = await finish(await start(config.file, "r1", "--first-start"))
        assert code == 66 and "has run" in errors.strip().splitlines()[-1], errors
        assert not first_start_mark(config, "r1").exists(), "it would let r1 start empty once its data is lost"
    other = config.file.read_text().replace(config.cluster.id, "0" * 32)
    (tmp_path / "other.toml").write_text(other)
    await refused(66, "cluster", file=tmp_path / "other.toml")


@story
async def test_a_replica_or_agent_whose_clock_is_wrong_at_its_start_waits_and_ends_well_when_it_is_told_to(
    tmp_path: Path,
) -> None:
    """A machine's clock is often wrong until its time service has begun: then no certificate is valid yet, or still."""
    config = make(tmp_path, 1)
    authority = load_authority(config.tls.certificates)
    for name, role, module in (
        ("r1", Role.REPLICA, "forebay.cluster.serve"),
        (config.agents[0].name, Role.AGENT, "forebay.cluster.agent"),
    ):
        for days in (2, -2 * CERTIFICATE_LIFETIME_DAYS):
            made_at = Instant(SystemClock().now() + days * 86_400 * 1_000_000)
            hosts = ["127.0.0.1"] if role is Role.REPLICA else []
            issue(authority, config.tls.certificates, role=role, name=name, addresses=hosts, at=made_at, replace=True)
            process = await start(config.file, name, module=module)
            assert process.stderr is not None
            async with asyncio.timeout(PATIENCE_S):
                while b"set the clock" not in (line := await process.stderr.readline()):
                    assert line, "it ended"
            process.send_signal(signal.SIGTERM)
            code, errors = await finish(process)
            assert (code, "Traceback" in errors) == (0, False), errors


class Position(NamedTuple):
    """Where a replica is, as its watchdog looks at it."""

    term: int = 3
    last: int = 10
    commit: int = 10
    applied: int = 10
    leads: bool = True


@pytest.mark.parametrize(
    ("before", "after", "is_sound"),
    [
        pytest.param(Position(), Position(), True, id="nothing to do"),
        pytest.param(Position(last=12), Position(last=14, commit=12, applied=12), True, id="committed"),
        pytest.param(Position(last=12), Position(last=14, commit=11, applied=11), True, id="committed in part"),
        pytest.param(Position(last=12), Position(last=12), False, id="a leader that commits nothing"),
        pytest.param(Position(last=12), Position(last=12, leads=False), True, id="a majority away"),
        pytest.param(Position(last=12), Position(term=4, last=12), True, id="a leader anew"),
        pytest.param(Position(last=10), Position(last=12), True, id="proposed since"),
        pytest.param(Position(applied=8), Position(applied=10), True, id="applied"),
        pytest.param(Position(applied=8), Position(last=99, commit=99, applied=9), True, id="applied in part"),
        pytest.param(Position(applied=8), Position(applied=8), False, id="a leader that applies nothing"),
        pytest.param(
            Position(applied=8, leads=False), Position(term=4, applied=8, leads=False), False,
            id="a follower that applies nothing",
        ),
    ],
)  # fmt: skip
def test_a_replica_is_sound_while_it_gets_on_with_what_there_is_and_no_longer(
    before: Position, after: Position, is_sound: bool
) -> None:
    engine = SimpleNamespace(role="leader", leader="r1")
    controller = SimpleNamespace(engine=engine)

    def be_at(position: Position) -> None:
        engine.term, engine.last_index, engine.commit_index = position.term, position.last, position.commit
        controller.applied_index, controller.leads = position.applied, position.leads

    be_at(before)
    watch = CommitWatch(cast(Controller, controller))
    be_at(after)
    assert watch.is_sound() is is_sound


@story
async def test_a_service_manager_hears_of_replica_and_agent_when_they_serve_while_they_are_sound_and_when_they_stop(
    tmp_path: Path,
) -> None:
    config = make(tmp_path, 1)
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.setblocking(False)
        told = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "150000"}

        async def heard(word: str) -> str:
            async with asyncio.timeout(PATIENCE_S):
                while word not in (text := (await loop.sock_recv(manager, 1000)).decode()):
                    assert "READY" not in text or word == "READY", text
                return text

        replica = await start(config.file, "r1", env=told)
        draining = asyncio.create_task(drain(replica))
        assert "READY=1" in await heard("READY")
        with socket.create_connection((config.replicas[0].api.host, config.replicas[0].api.port), timeout=PATIENCE_S):
            pass  # it serves indeed
        await heard("WATCHDOG=1\nSTATUS=leader in term")
        agent = await start(config.file, "n1", module="forebay.cluster.agent", env=told)
        draining_agent = asyncio.create_task(drain(agent))
        await heard("READY")
        await heard("STATUS=registered at revision")
        agent.terminate()
        await heard("STOPPING=1\nSTATUS=stopping transfers")
        assert await agent.wait() == 0
        replica.terminate()
        await heard("STOPPING=1\nSTATUS=transfers leadership")
        assert await replica.wait() == 0
        await asyncio.gather(draining, draining_agent)


def test_sigterm_in_the_first_moments_of_a_replica_or_agent_ends_it_with_0(tmp_path: Path) -> None:
    """`forebay run replica` and `forebay run agent` keep it for the program that they become."""
    config = make(tmp_path, 1)
    for name, module in (("r1", "forebay.cluster.serve"), (config.agents[0].name, "forebay.cluster.agent")):
        words = (sys.executable, "-m", module, "--config", str(config.file), "--name", name)
        process = subprocess.Popen(
            words, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, preexec_fn=hold_termination
        )
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, errors) == (0, b"")


@story
async def test_a_disk_that_fails_stops_the_replica_with_code_70_and_a_restart_has_every_answer_that_was_given(
    tmp_path: Path,
) -> None:
    config = make(tmp_path, 1)

    def limit() -> None:
        import resource

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        most_bytes = LOG_BYTES + 600_000  # the sync log has its size from the beginning; LMDB's file grows
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    process = await start(config.file, "r1", preexec_fn=limit)
    reading = asyncio.create_task(finish(process))
    acknowledged = []
    async with Client(config.endpoints, config.tls_files("alice")) as client:
        await ready(client)
        script = PLAIN + "#" * 20_000
        while process.returncode is None and len(acknowledged) < 600:
            submission = SubmitRequest(
                command_id=client.new_command_id(), script=script, time_limit_s=60, workdir=str(tmp_path), hold=True
            )
            with contextlib.suppress(ApiError):
                acknowledged.append((await client.call(ops.SUBMIT_JOB, submission, deadline_s=1)).job_id)
    code, errors = await reading
    assert code == 70, errors
    assert errors.strip().splitlines()[-1].startswith("forebay: this replica stops itself: StorageFailed"), errors
    assert acknowledged
    async with running(config, "r1"):
        async with Client(config.endpoints, config.tls_files("alice")) as client:
            await ready(client)
            kept = {job.job_id for job in (await client.call(ops.LIST_JOBS)).jobs}
            assert set(acknowledged) <= kept


def test_the_usage_is_refused_with_code_64_and_help_is_not() -> None:
    from forebay.cluster.serve import main

    assert main(["--nonsense"]) == 64
    assert main(["--help"]) == 0
