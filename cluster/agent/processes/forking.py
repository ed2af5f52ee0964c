"""Processes of an agent's own modules, forked instead of started: the agent's side of `cluster.agent.fork_server`.

The fork server has imported what operations and supervisors need; it forks one when it is asked, as a child of the
agent (CLONE_PARENT). So the agent waits for it, and learns how it ended, as for one that it started itself, it dies
with the agent if it wants to, and nothing depends on the fork server once it runs.

A request and its descriptors go over a channel, and the answer of the fork server comes back on it. The first
descriptor is one end of a pair whose other end the agent keeps: the child says there who it is, and begins only at the
agent's word. So a child that the agent does not know never does anything, whoever is killed when; and once nobody has
that end, nobody runs.

`multiprocessing.forkserver` does not fit: what it runs is told by pickle, its processes are its own children, so that
they and their exit statuses are lost with it, and it knows neither sessions nor groups."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final, Protocol

import msgspec

from cluster.agent.limits import FORK_AGAIN_S, FORK_DESCRIPTORS_MAX, FORK_REQUEST_BYTES_MAX, FORK_WAIT_S
from cluster.agent.processes.cgroups import Cgroup
from cluster.agent.processes.job_processes import OPERATION_VARIABLE, spawn
from cluster.system import Clock, SystemClock, closing

logger = logging.getLogger(__name__)

FORK_SERVER: Final = "cluster.agent.fork_server"

TITLE_BYTES: Final = 8 * 1024
"""Room for the command line that a forked process shows, bytes: a path has 4,096 at most."""

VARIABLE_BYTES: Final = 256
"""Room for the variable that marks a forked process of an operation, bytes: a storage id and two numbers have 75."""

READY: Final = b"ready"
BEGIN: Final = b"begin"

_UNABLE: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})
"""What a kernel, or a filter of system calls, says that has no clone3(2), which came with Linux 5.3."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """One process that is wanted."""

    module: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    """Added to its environment."""
    targets: tuple[int, ...]
    """What each descriptor that comes with the request, but the first, is to be in the child."""
    new_session: bool
    new_group: bool
    into_cgroup: bool = False
    """Whether the last descriptor is the directory of the cgroup that the child is to live in."""


class ForkAnswer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What the fork server says of it, and the process itself, which waits for the word then."""

    pid: int = 0
    error: int = 0
    """Why there is none, or it cannot begin: an errno."""


class Process(Protocol):
    """A child of this process, however it was started."""

    pid: int

    def poll(self) -> int | None:
        """Return how it ended, None if it has not; negative for a signal."""

    def wait(self) -> int:
        """Wait for its end and return how it ended."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """A child of this process that the fork server made."""

    def __init__(self, pid: int) -> None:
        """Take it over."""
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return how it ended, None if it has not; negative for a signal."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for its end and return how it ended."""
        code = self._reap(0)
        assert code is not None
        return code

    def kill(self) -> None:
        """Send SIGKILL."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _reap(self, how: int) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, how)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code


class ForkServer:
    """Fork server of one agent: started once, and again when it has ended."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Begin without one: until `start`, processes are new interpreters."""
        self._clock = clock or SystemClock()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._is_wanted = False
        self._started_s = 0.0

    @property
    def pid(self) -> int | None:
        """Process id of the fork server; None if there is none."""
        return None if self._server is None or self._server.poll() is not None else self._server.pid

    def start(self) -> None:
        """Have a fork server from now on. What keeps it from being started is logged: processes are started then."""
        self._is_wanted = True
        self._follow()

    def await_ready(self) -> None:
        """Wait until the fork server, if there is one, is ready, or dead; FORK_WAIT_S seconds at most."""
        self._follow()
        if self._channel is not None and not self._is_ready:
            select.select([self._channel], [], [], FORK_WAIT_S)
            self._follow()

    def close(self) -> None:
        """End the fork server; what it has forked goes on."""
        self._is_wanted = False
        self._end()

    def spawn(
        self,
        module: str,
        arguments: Sequence[str],
        *,
        descriptors: Sequence[int],
        stdin: int,
        stdout: int,
        stderr: int | None,
        new_session: bool,
        variables: Mapping[str, str] = MappingProxyType({}),
        new_group: bool = False,
        cgroup: Cgroup | None = None,
    ) -> Process:
        """Return a new process that runs `main` of a module; as `job_processes.spawn`, which is what happens while no
        fork server is ready. OSError if it cannot be started.

        It lives in `cgroup` from its first moment on; where it is started, it is given one more argument, the number of
        a descriptor through which it is to `join` that before it does anything.
        """
        streams = ((0, stdin), (1, stdout)) + (() if stderr is None else ((2, stderr),))
        given = (*streams, *((descriptor, descriptor) for descriptor in descriptors))
        request = ForkRequest(
            module=module,
            arguments=tuple(arguments),
            variables=dict(variables),
            targets=tuple(target for target, _ in given),
            new_session=new_session,
            new_group=new_group,
            into_cgroup=cgroup is not None,
        )
        directories = [] if cgroup is None else [cgroup.directory]
        forked = self._fork(request, [*(descriptor for _, descriptor in given), *directories])
        if forked is not None:
            return forked
        with contextlib.ExitStack() as held:
            entrances: list[int] = []
            if cgroup is not None:
                entrances.append(held.enter_context(closing(cgroup.open_entrance())))
            return spawn(
                module,
                (*arguments, *map(str, entrances)),
                descriptors=(*descriptors, *entrances),
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                new_session=new_session,
                variables=variables,
                new_group=new_group,
            )

    def _fork(self, request: ForkRequest, descriptors: Sequence[int]) -> ForkedProcess | None:
        """Return the process that was forked; None if there is none, and none will be. OSError if it is refused."""
        self._follow()
        data = msgspec.msgpack.encode(request)
        fits = len(data) <= FORK_REQUEST_BYTES_MAX and len(descriptors) < FORK_DESCRIPTORS_MAX
        if self._channel is None or not self._is_ready or not fits:
            return None
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with contextlib.closing(ours):
            try:
                _last_of(self._channel)
                with contextlib.closing(theirs):
                    socket.send_fds(self._channel, [data], [theirs.fileno(), *descriptors])
                if (process := self._forked(self._channel, ours)) is not None:
                    return process
            except (TimeoutError, BlockingIOError):
                # Whoever is late finds that nobody waits for him, and ends.
                logger.error("the fork server did not answer within %s s: it is ended, and started again", FORK_WAIT_S)
            except (BrokenPipeError, ConnectionResetError):
                pass
            # It ended, or is to.
            self._end()
            self._follow()
            return None

    def _forked(self, channel: socket.socket, ours: socket.socket) -> ForkedProcess | None:
        """Return who was forked, now that it knows that it may begin; None if nobody was. OSError if it cannot be."""
        ours.settimeout(FORK_WAIT_S)
        if data := ours.recv(FORK_REQUEST_BYTES_MAX):
            process = _process(data)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                ours.send(BEGIN)
            return process
        # It was killed before it said anything, or never was there: the fork server, if it lives, has said which.
        told = _last_of(channel)
        try:
            return _process(told) if told else None
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            logger.warning("processes are started and not forked, 0.2 s of processor each: clone3: %s", error.strerror)
            self.close()
            return None

    def _follow(self) -> None:
        """See that there is a fork server, and whether it is ready."""
        if self._server is not None and (code := self._server.poll()) is not None:
            logger.warning("the fork server ended (%s): it is started again; what it has forked goes on", code)
            self._end()
        if self._server is None:
            now_s = self._clock.monotonic_s()
            if not self._is_wanted or (self._started_s and now_s - self._started_s < FORK_AGAIN_S):
                return
            self._started_s = now_s
            self._begin()
        elif not self._is_ready:
            assert self._channel is not None
            self._is_ready = _last_of(self._channel) == READY

    def _begin(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        with contextlib.closing(theirs):
            try:
                self._server = spawn(
                    FORK_SERVER,
                    (str(theirs.fileno()), str(os.getpid()), "-" * TITLE_BYTES),
                    descriptors=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None,
                    new_session=False,
                    new_group=True,
                    variables={OPERATION_VARIABLE: "-" * VARIABLE_BYTES},
                )
            except OSError as error:
                ours.close()
                logger.warning("the fork server cannot be started, it is tried again: %s", error.strerror)
                return
        self._channel = ours

    def _end(self) -> None:
        self._is_ready = False
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._server is not None:
            self._server.kill()
            self._server.wait()
            self._server = None


def _process(told: bytes) -> ForkedProcess:
    """Return the process that was told of. OSError if there is none."""
    answer = msgspec.msgpack.decode(told, type=ForkAnswer)
    if answer.error:
        raise OSError(answer.error, os.strerror(answer.error))
    return ForkedProcess(answer.pid)


def _last_of(channel: socket.socket) -> bytes:
    """Return what came last on a channel, without waiting; nothing if nothing came."""
    last = b""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while data := channel.recv(FORK_REQUEST_BYTES_MAX):
            last = data
    return last
