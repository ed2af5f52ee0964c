"""Child processes of `forebay cluster up`: every replica and agent of a configuration on one machine.

A child that ends is reported and not restarted, so that a failover can be watched; only a drill's helper may request
a restart. Each child has its own session, so Ctrl-C reaches it only through this process: first helpers, then agents,
then replicas. The kernel ends the children if this process is killed. Job scripts are not children: they continue,
and a later agent finds them.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from forebay.cluster.cli.exits import ExitCode, Failure
from forebay.cluster.cli.extras import check_process
from forebay.cluster.config import LOCAL_GATEWAY, Config
from forebay.cluster.system import is_logged
from forebay.replica.values import plain

GRACE_S: Final = 30.0
"""Seconds between asking a child to end and killing it. A replica ends within a second, but may wait 16 s: 2 each for a
last checkpoint, a new leader and its traces, 5 each for its API workers and its history service."""

DRAIN_S: Final = 1.0
"""Seconds to read the last lines of an ended child from its pipe."""

LINE_BYTES_MAX: Final = 1024 * 1024
"""Largest line of a child's output, bytes: any JSON record fits; a longer line is shown in pieces."""

_PR_SET_PDEATHSIG: Final = 1
"""Option of prctl(2) that sets the signal a child receives when its parent dies."""

Print = Callable[[str], None]


class Child(NamedTuple):
    """Process to start: its name in the output and its command."""

    name: str
    kind: str
    command: tuple[str, ...]


class Running(NamedTuple):
    """Process that was started."""

    child: Child
    process: asyncio.subprocess.Process


def module_command(module: str, *arguments: str) -> tuple[str, ...]:
    """Return the command that runs a module of Forebay with this interpreter.

    `-P`: a file in the current directory must not shadow a module.

    Raises:
        Failure: A package that the module needs is not installed.
    """
    check_process(module)
    return (sys.executable, "-P", "-m", module, *arguments)


def become(command: tuple[str, ...]) -> NoReturn:
    """Replace this process with another program, which then receives its signals and sets its exit code."""
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(command[0], command)
    except OSError as error:
        raise Failure(
            ExitCode.REFUSED, f"{command[0]} cannot be started ({error.strerror})", "install Forebay again"
        ) from error


def list_children(config: Config) -> tuple[list[Child], list[Child], list[Child]]:
    """Return the commands of a configuration's replicas, agents and helpers.

    The gateway for which `forebay cluster init` created a certificate is listed with the replicas. Helpers are listed
    only if [drill] allows a fault.
    """
    file = str(config.file)
    replicas = [
        Child(
            replica.name, "replica", module_command("forebay.cluster.serve", "--config", file, "--name", replica.name)
        )
        for replica in config.replicas
    ]
    if (config.tls.certificates / f"{LOCAL_GATEWAY}.pem").exists():
        command = module_command("forebay.cluster.gateway", "--config", file, "--name", LOCAL_GATEWAY)
        replicas.append(Child(LOCAL_GATEWAY, "gateway", command))
    agents = [
        Child(agent.name, "agent", module_command("forebay.cluster.agent", "--config", file, "--name", agent.name))
        for agent in config.agents
    ]
    helpers = [
        Child(
            helper.name,
            "helper",
            module_command("forebay.cluster.drills.helper", "--config", file, "--name", helper.name),
        )
        for helper in config.helpers
        if config.drill.allow
    ]
    return replicas, agents, helpers


async def run(
    replicas: Sequence[Child],
    agents: Sequence[Child],
    helpers: Sequence[Child] = (),
    *,
    say: Print,
    announce: Callable[[], Awaitable[None]],
    grace_s: float = GRACE_S,
) -> bool:
    """Start all children and wait until all have ended or SIGINT or SIGTERM arrives; return whether a signal arrived.

    `say` prints a line; `announce` runs concurrently once all are started, for instance to wait for a leader.
    """
    width = max((len(child.name) for child in (*replicas, *agents, *helpers)), default=0)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    running: list[Running] = []
    watchers: list[asyncio.Task[None]] = []
    announcing: asyncio.Task[None] | None = None
    wanted, asks = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    starting = asyncio.Lock()
    again = set[asyncio.Task[None]]()

    async def start(child: Child, word: str = "started") -> None:
        async with starting:
            if any(one.child is child and one.process.returncode is None for one in running) or stop.is_set():
                return
            given = (asks,) if child.kind == "helper" else ()
            started = await _start(child, given)
            running.append(started)
            say(f"{child.name:<{width}} | {word}, process {started.process.pid}")
            watchers.append(loop.create_task(_watch(started, width, stop, say)))

    def start_wanted() -> None:
        names = os.read(wanted, LINE_BYTES_MAX).decode("ascii", "replace").split()
        for child in (*replicas, *agents):
            if child.name in names:
                task = loop.create_task(start(child, "started again, after a drill"))
                again.add(task)
                task.add_done_callback(again.discard)

    try:
        loop.add_reader(wanted, start_wanted)
        for child in (*replicas, *agents, *helpers):
            await start(child)
        announcing = loop.create_task(_ignoring_failures(announce, say))
        all_ended = loop.create_task(_wait_for_all(watchers))
        asked = loop.create_task(stop.wait())
        await asyncio.wait((all_ended, asked), return_when=asyncio.FIRST_COMPLETED)
        all_ended.cancel()
        asked.cancel()
        return stop.is_set()
    finally:
        if announcing is not None:
            announcing.cancel()
        loop.remove_reader(wanted)
        # A process that a drill has stopped cannot end before its helper undoes the fault.
        for kinds in (("helper",), ("agent",), {one.child.kind for one in running} - {"helper", "agent"}):
            await _end([one for one in running if one.child.kind in kinds], grace_s, say)
        await asyncio.gather(*watchers, return_exceptions=True)
        os.close(wanted)
        os.close(asks)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


async def _wait_for_all(watchers: Sequence[asyncio.Task[None]]) -> None:
    await asyncio.wait(watchers)


async def _ignoring_failures(announce: Callable[[], Awaitable[None]], say: Print) -> None:
    try:
        await announce()
    except Exception as error:  # the cluster runs without the announcement
        say(f"(the cluster's state is unknown: {error})")


async def _start(child: Child, given: tuple[int, ...] = ()) -> Running:
    up = tuple(word for descriptor in given for word in ("--up", str(descriptor)))
    more: dict[str, Any] = {"pass_fds": given} if given else {}
    process = await asyncio.create_subprocess_exec(
        *child.command,
        *up,
        **more,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        limit=LINE_BYTES_MAX,
        preexec_fn=_end_with_parent(),
    )
    return Running(child, process)


def _end_with_parent() -> Callable[[], None]:
    # Allocations and imports must happen before the fork.
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    parent, terminate = os.getpid(), int(signal.SIGTERM)

    def in_child() -> None:
        prctl(_PR_SET_PDEATHSIG, terminate, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return in_child


async def _watch(running: Running, width: int, stop: asyncio.Event, say: Print) -> None:
    child, process = running
    reading = asyncio.ensure_future(_show(running, width, say))
    code = await process.wait()
    # A process that outlives the child, such as a job's script, may hold the pipe open, so the wait is bounded.
    await asyncio.wait((reading,), timeout=DRAIN_S)
    reading.cancel()
    if stop.is_set():
        return
    how = f"with signal {-code} ({signal.Signals(-code).name})" if code < 0 else f"with exit code {code}"
    say(f"{child.name:<{width}} | ended {how}; to restart it: forebay run {child.kind} --name {child.name}")


async def _show(running: Running, width: int, say: Print) -> None:
    stream = running.process.stdout
    assert stream is not None  # the process was started with a pipe
    while line := await _line(stream):
        text = plain(line.decode("utf-8", "replace").rstrip())
        say(text if is_logged(text) else f"{running.child.name:<{width}} | {text}")


async def _line(stream: asyncio.StreamReader) -> bytes:
    try:
        return await stream.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await stream.readexactly(max(1, error.consumed))


async def _end(running: Sequence[Running], grace_s: float, say: Print) -> None:
    alive = [one for one in running if one.process.returncode is None]
    for one in alive:
        with contextlib.suppress(ProcessLookupError):
            one.process.terminate()
    if not alive:
        return
    _, late = await asyncio.wait([asyncio.ensure_future(one.process.wait()) for one in alive], timeout=grace_s)
    if late:
        for one in alive:
            if one.process.returncode is None:
                say(f"{one.child.name} did not end within {grace_s:g} s and is killed")
                with contextlib.suppress(ProcessLookupError):
                    one.process.kill()
        await asyncio.wait(late)
