"""Agent's side of the fork server (`cluster.agent.fork_server`), which forks instead of starting interpreters.

The fork server has imported all that workers and supervisors need, and forks each as a child of the agent
(CLONE_PARENT). The agent waits for them as for its own children, and they do not depend on the fork server once they
run.

Requests and their descriptors go over a channel, which also returns the reply. The first descriptor is one end of a
socket pair: the child reports its process ID there and begins only when the agent confirms. A child unknown to the
agent therefore never does anything, whichever process is killed; and when the other end is closed, no child is left.

`multiprocessing.forkserver` is unsuitable: it uses pickle, its processes are its own children, so that their exit
statuses are lost with it, and it supports neither sessions nor process groups.
"""

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

from forebay.cluster.agent.limits import FORK_AGAIN_S, FORK_DESCRIPTORS_MAX, FORK_REQUEST_BYTES_MAX, FORK_WAIT_S
from forebay.cluster.agent.processes.cgroups import Cgroup
from forebay.cluster.agent.processes.job_processes import OPERATION_VARIABLE, spawn
from forebay.cluster.system import Clock, SystemClock, closing

logger = logging.getLogger(__name__)

FORK_SERVER: Final = "forebay.cluster.agent.fork_server"

TITLE_BYTES: Final = 8 * 1024
"""Space for the command line shown by a forked process, bytes: a path has at most 4,096."""

VARIABLE_BYTES: Final = 256
"""Space for the marker variable of a forked operation, bytes: a storage ID and two numbers take 75."""

READY: Final = b"ready"
BEGIN: Final = b"begin"

_UNABLE: Final = frozenset({errno.ENOSYS, errno.EPERM, errno.EINVAL})
"""Errors of clone3(2) on kernels before Linux 5.3, or behind a system call filter."""


class ForkRequest(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Request for one process."""

    module: str
    arguments: tuple[str, ...]
    variables: dict[str, str]
    """Variables added to the environment."""
    targets: tuple[int, ...]
    """Target number in the child for each descriptor of the request except the first."""
    new_session: bool
    new_group: bool
    into_cgroup: bool = False
    """True if the last descriptor is the directory of the child's cgroup."""


class ForkAnswer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Reply of the fork server, and of the child, which then waits for confirmation."""

    pid: int = 0
    error: int = 0
    """Errno if there is no process or it cannot begin; otherwise 0."""


class ChildProcess(Protocol):
    """Child of this process, however it was started."""

    pid: int

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""

    def wait(self) -> int:
        """Wait for the process and return its exit code."""

    def kill(self) -> None:
        """Send SIGKILL."""


class ForkedProcess:
    """Child of this process created by the fork server."""

    def __init__(self, pid: int) -> None:
        """Take ownership of the child."""
        self.pid = pid
        self._code: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal, or None while the process runs."""
        return self._reap(os.WNOHANG)

    def wait(self) -> int:
        """Wait for the process and return its exit code."""
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
    """Fork server of one agent, restarted when it ends."""

    def __init__(self, clock: Clock | None = None) -> None:
        """Begin without a server; until `start`, processes are new interpreters."""
        self._clock = clock or SystemClock()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._is_ready = False
        self._is_wanted = False
        self._started_s = 0.0

    @property
    def pid(self) -> int | None:
        """Process ID of the fork server, or None."""
        return None if self._server is None or self._server.poll() is not None else self._server.pid

    def start(self) -> None:
        """Use a fork server from now on. Failures are logged; processes are then started as new interpreters."""
        self._is_wanted = True
        self._follow()

    def await_ready(self) -> None:
        """Wait at most FORK_WAIT_S seconds until the fork server is ready or has died."""
        self._follow()
        if self._channel is not None and not self._is_ready:
            select.select([self._channel], [], [], FORK_WAIT_S)
            self._follow()

    def close(self) -> None:
        """End the fork server; the processes it forked keep running."""
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
    ) -> ChildProcess:
        """Run `main` of a module in a new process, forked if a fork server is ready and started otherwise.

        The process is in `cgroup` from the start. If it is started as an interpreter, it gets an additional argument,
        the number of a descriptor with which it must `join` the cgroup before doing anything else.

        Raises:
            OSError: The process cannot be started.
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
        """Fork a process; return None if the fork server is unavailable and no child exists or will exist.

        Raises:
            OSError: The kernel rejected the fork.
        """
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
                if (process := self._receive_process(self._channel, ours)) is not None:
                    return process
            except (TimeoutError, BlockingIOError):
                # A late child finds the channel closed and exits.
                logger.error("the fork server did not answer within %s s; restarting it", FORK_WAIT_S)
            except (BrokenPipeError, ConnectionResetError):
                pass
            # The fork server has ended, or must be.
            self._end()
            self._follow()
            return None

    def _receive_process(self, channel: socket.socket, ours: socket.socket) -> ForkedProcess | None:
        """Return the forked process after confirming it, or None if there is none.

        Raises:
            OSError: The process cannot be created or cannot begin.
        """
        ours.settimeout(FORK_WAIT_S)
        if data := ours.recv(FORK_REQUEST_BYTES_MAX):
            process = _process(data)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                ours.send(BEGIN)
            return process
        # The child was killed before its first message or never existed; the fork server's reply tells which.
        told = _last_of(channel)
        try:
            return _process(told) if told else None
        except OSError as error:
            if error.errno not in _UNABLE:
                raise
            logger.warning(
                "processes are started instead of forked, which takes 0.2 s of processor time each: clone3: %s",
                error.strerror,
            )
            self.close()
            return None

    def _follow(self) -> None:
        """Start the fork server if necessary, and check whether it is ready."""
        if self._server is not None and (code := self._server.poll()) is not None:
            logger.warning("the fork server ended (%s); restarting it. The processes it forked keep running", code)
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
                logger.warning("the fork server cannot be started, retrying: %s", error.strerror)
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
    """Return the process in a reply.

    Raises:
        OSError: The reply contains an error.
    """
    answer = msgspec.msgpack.decode(told, type=ForkAnswer)
    if answer.error:
        raise OSError(answer.error, os.strerror(answer.error))
    return ForkedProcess(answer.pid)


def _last_of(channel: socket.socket) -> bytes:
    """Return the last message on a channel without waiting, or b""."""
    last = b""
    with contextlib.suppress(BlockingIOError, ConnectionResetError):
        while data := channel.recv(FORK_REQUEST_BYTES_MAX):
            last = data
    return last
