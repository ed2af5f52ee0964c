"""The fork server of an agent: what it forks is what would have been started, and nothing depends on it then."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from forebay.cluster.agent.processes import OPERATION_VARIABLE, ChildProcess, ForkServer, forking
from forebay.cluster.agent.worker import Usage, UsageQuery, UsageReply, UsageRequest
from forebay.cluster.system import TREE, fields_of
from forebay.replica.messages import ScriptEnded, ScriptStarted
from forebay.replica.model import JobState
from tests.cluster.agent.conftest import Site

COUNTER = "forebay.cluster.agent.worker.usage_counter"
"""A process that lives for as long as something may be asked of it, and ends with code 0."""


STATUS = ("Umask", "Uid", "Gid", "Groups", "NoNewPrivs", "SigBlk", "SigIgn", "SigCgt", "CapEff", "Threads")


class Counter:
    """A process that counts, and the ends of its pipes."""

    def __init__(
        self, server: ForkServer, *, new_session: bool = False, variables: dict[str, str] | None = None
    ) -> None:
        with ExitStack() as held:
            asked, self.asks = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, asked)
            self.answers, answered = os.pipe2(os.O_CLOEXEC)
            held.callback(os.close, answered)
            self.process: ChildProcess = server.spawn(
                COUNTER,
                (str(os.getpid()),),
                descriptors=(),
                stdin=asked,
                stdout=answered,
                stderr=None,
                new_session=new_session,
                new_group=not new_session,
                variables=variables or {},
            )

    def count(self, directory: Path) -> Usage:
        look = UsageQuery(path=str(directory), most_bytes=2**40, most_inodes=2**40)
        os.write(self.asks, msgspec.json.encode(UsageRequest(1, look)) + b"\n")
        return msgspec.json.decode(os.read(self.answers, 4096), type=UsageReply).usage

    def end(self) -> int:
        """Let it come to its own end and return how it ended."""
        os.close(self.asks)
        os.close(self.answers)
        return self.process.wait()


@pytest.fixture
def server() -> Iterator[ForkServer]:
    """A fork server that is ready."""
    fork_server = ForkServer()
    fork_server.start()
    fork_server.await_ready()
    yield fork_server
    fork_server.close()


def is_forked(process: ChildProcess) -> bool:
    return isinstance(process, forking.ForkedProcess)


def proc(pid: int, name: str) -> bytes:
    return Path(f"/proc/{pid}/{name}").read_bytes()


def seen(process: ChildProcess) -> dict[str, object]:
    """What /proc says of a process that runs, and that its start decides."""
    pid = process.pid
    fields = fields_of(pid)
    assert fields is not None
    status = dict(line.split(":\t", 1) for line in proc(pid, "status").decode().splitlines() if ":\t" in line)
    environment = {entry for entry in proc(pid, "environ").split(b"\0") if entry}
    return {
        "command": proc(pid, "cmdline").rstrip(b"\0").split(b"\0"),
        "environment": environment,
        "parent": int(fields[1]),
        "leads its group": int(fields[2]) == pid,
        "leads its session": int(fields[3]) == pid,
        "descriptors": sorted(map(int, os.listdir(f"/proc/{pid}/fd"))),
        "directory": os.readlink(f"/proc/{pid}/cwd"),
        **{
            name: status[name]
            for name in (
                "Umask",
                "Uid",
                "Gid",
                "Groups",
                "NoNewPrivs",
                "SigBlk",
                "SigIgn",
                "SigCgt",
                "CapEff",
                "Threads",
            )
        },
        "limits": proc(pid, "limits"),
        "cgroup": proc(pid, "cgroup"),
    }


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("variables", [{}, {OPERATION_VARIABLE: f"{'ab' * 16}.{10**19}.{10**19}"}])
def test_what_is_forked_looks_to_everybody_as_if_it_had_been_started(
    server: ForkServer, tmp_path: Path, new_session: bool, variables: dict[str, str]
) -> None:
    forked = Counter(server, new_session=new_session, variables=variables)
    started = Counter(ForkServer(), new_session=new_session, variables=variables)
    assert is_forked(forked.process) and not is_forked(started.process)
    # An answer: whoever gives it has done all that it does before it is of use.
    assert forked.count(tmp_path) == started.count(tmp_path)
    assert seen(forked.process) == seen(started.process)
    assert (forked.end(), started.end()) == (0, 0)


def test_whoever_kills_the_fork_server_ends_nothing_that_it_forked_and_there_is_another_one(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "FORK_AGAIN_S", 0.0)
    one, other = Counter(server), Counter(server)
    killed = server.pid
    assert killed is not None
    os.kill(killed, signal.SIGKILL)
    # While it comes up, processes are started.
    meanwhile = Counter(server)
    server.await_ready()
    after = Counter(server)
    assert (is_forked(meanwhile.process), is_forked(after.process)) == (False, True)
    assert server.pid not in (None, killed)
    for counter in (one, other, meanwhile, after):
        assert counter.count(tmp_path).inodes == 0
    os.kill(other.process.pid, signal.SIGTERM)
    assert other.process.wait() == -signal.SIGTERM
    assert [counter.end() for counter in (one, meanwhile, after)] == [0, 0, 0]


def test_what_a_late_fork_server_forks_never_begins(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = server.pid
    assert late is not None and server._channel is not None
    with ExitStack() as held:
        # Another holder of the channel, so that the request is not gone with the agent's end of it.
        ours, theirs = forking.socket.socketpair(forking.socket.AF_UNIX, forking.socket.SOCK_SEQPACKET)
        held.callback(ours.close)
        made = tmp_path / "made"
        output = os.open(made, os.O_WRONLY | os.O_CREAT)
        nothing = os.open(os.devnull, os.O_RDONLY)
        request = forking.ForkRequest(
            module=COUNTER,
            arguments=("not a number: it would say so",),
            variables={},
            targets=(0, 1, 2),
            new_session=False,
            new_group=True,
        )
        forking.socket.send_fds(
            server._channel, [msgspec.msgpack.encode(request)], [theirs.fileno(), nothing, output, output]
        )
        theirs.close()
        answer = msgspec.msgpack.decode(ours.recv(4096), type=forking.ForkAnswer)
    # The agent has gone away without a word.
    assert forking.ForkedProcess(answer.pid).wait() == 1
    assert made.read_bytes() == b""
    for descriptor in (output, nothing):
        os.close(descriptor)


def test_a_fork_server_that_hangs_is_killed_and_processes_are_started_without_it(
    server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "FORK_WAIT_S", 0.05)
    hung = server.pid
    assert hung is not None
    os.kill(hung, signal.SIGSTOP)
    counter = Counter(server)
    assert not is_forked(counter.process) and server.pid != hung
    assert counter.count(tmp_path).inodes == 0
    assert counter.end() == 0


def test_a_module_that_nobody_may_ask_for_is_not_run(server: ForkServer) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    process = server.spawn(
        "this", (), descriptors=(), stdin=nothing, stdout=nothing, stderr=nothing, new_session=False, new_group=True
    )
    os.close(nothing)
    assert is_forked(process) and process.wait() == 1


def test_a_fork_server_keeps_nothing_that_it_passed_on(server: ForkServer, tmp_path: Path) -> None:
    assert server.pid is not None
    before = sorted(os.listdir(f"/proc/{server.pid}/fd"))
    secret = os.urandom(24).hex().encode()
    work = os.memfd_create("work")
    os.write(work, secret)
    nothing = os.open(os.devnull, os.O_RDWR)
    process = server.spawn(
        "forebay.cluster.agent.worker.worker",
        (),
        descriptors=(work,),
        stdin=work,
        stdout=nothing,
        stderr=nothing,
        new_session=False,
        new_group=True,
    )
    assert is_forked(process) and process.wait() != 0
    os.close(work)
    os.close(nothing)
    # One more, after which the first one is certainly over and done with.
    assert Counter(server).end() == 0
    assert sorted(os.listdir(f"/proc/{server.pid}/fd")) == before
    with Path(f"/proc/{server.pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{server.pid}/maps").read_text().splitlines():
            area, rights, *_, name = [*line.split(maxsplit=5), ""][:6]
            first, last = (int(text, 16) for text in area.split("-"))
            if rights.startswith("rw") and not name.startswith("[v"):
                memory.seek(first)
                assert secret not in memory.read(last - first)


def test_a_fork_server_dies_with_its_agent() -> None:
    told = (
        "import sys; from forebay.cluster.agent.processes import ForkServer; s = ForkServer(); s.start(); "
        "s.await_ready(); print(s.pid, flush=True); sys.stdin.read()"
    )
    agent = subprocess.Popen(
        [sys.executable, "-c", told],
        cwd=TREE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert agent.stdin is not None and agent.stdout is not None
    handle = os.pidfd_open(int(agent.stdout.readline()))
    agent.kill()
    agent.wait()
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)
    agent.stdin.close()
    agent.stdout.close()


def test_a_fork_server_whose_agent_read_nothing_ends_without_a_word() -> None:
    agent, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server = subprocess.Popen(
        [sys.executable, "-m", "forebay.cluster.agent.fork_server", str(channel.fileno()), str(os.getpid()), "-" * 200],
        cwd=TREE,
        env={**os.environ, OPERATION_VARIABLE: "-" * 200},
        pass_fds=(channel.fileno(),),
        stderr=subprocess.PIPE,
    )
    channel.close()
    assert select.select([agent], [], [], 30)[0]
    agent.close()
    said = server.communicate()[1]
    assert (said, server.returncode) == (b"", 0)


def fork_server_of(agent: int) -> int:
    """Return the fork server of an agent."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    (found,) = [int(child) for child in children if b"cluster.agent.fork_server" in proc(int(child), "cmdline")]
    return found


def test_an_agent_that_loses_its_fork_server_still_learns_how_everything_ended(site: Site) -> None:
    async def story() -> None:
        async with site.running() as (controller, agent):
            os.mkfifo(site.destinations / "go", 0o666)
            script = "#!/bin/sh\nread go < go\nexit 7\n"
            await controller.order(site.order(1, 1, "run", script=script))
            await controller.result(1, 1, ScriptStarted)
            (supervisor,) = site.supervisors()
            fields = fields_of(supervisor)
            assert fields is not None and int(fields[1]) == agent.pid
            # Forked: no other process has the room of the fork server's command line.
            assert len(proc(supervisor, "cmdline")) > forking.TITLE_BYTES
            os.kill(fork_server_of(agent.pid), signal.SIGKILL)
            (site.destinations / "go").write_text("go\n")
            assert await controller.result(1, 1) == ScriptEnded(JobState.FAILED, 7)

    asyncio.run(story())
