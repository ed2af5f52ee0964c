"""Execution of a call in a child process that can always be killed.

The calling process is single-threaded and adopts orphans of the call (`become_subreaper`). So it can kill every process
of a call, even processes that ignore SIGTERM, fork, spin or start their own session. If a call ends by itself, its
remaining processes continue, because a site's data-in may copy in the background and be polled later.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Final, NamedTuple

from forebay.cluster.providers.limits import (
    KILL_PAUSE_S,
    KILL_ROUNDS_MAX,
    OUTPUT_BYTES_MAX,
    RETURNED_BYTES_MAX,
    TERM_GRACE_S,
)
from forebay.cluster.system import Clock, closing, descendants, die_with_parent, ignore_hangup, send, start_time

EXIT_NO_CALL: Final = 126
"""Exit code of a child that could not start the call, as in shells."""

_CHUNK_BYTES: Final = 64 * 1024
_CHUNKS_PER_TURN: Final = 64
"""Maximum number of chunks read from a pipe between two checks of the clock, so that timeouts are punctual."""

_POLL_S: Final = 3600.0
"""Longest wait between two checks of the clock, seconds."""


Tree = frozenset[tuple[int, int]]
"""Processes by ID and start time, because an ID may be reused."""


class CallResult(NamedTuple):
    """Result of a call."""

    code: int
    """Exit code, or the negative signal number."""
    printed: bytes
    """First OUTPUT_BYTES_MAX bytes of standard output."""
    complained: bytes
    """First OUTPUT_BYTES_MAX bytes of standard error."""
    returned: bytes
    """Data written to the result descriptor."""
    timed_out: bool = False
    unkillable: tuple[int, ...] = ()
    """Processes that survived SIGKILL, because they hang in the kernel."""


class _Pipe:
    """Output pipe of a call, read without blocking; keeps the beginning of the data."""

    def __init__(self, bound_bytes: int) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writing, True)
        self._bound_bytes = bound_bytes
        self.kept = bytearray()
        self.open = True

    def take(self) -> None:
        """Read available data up to a limit per call; drop data beyond the size limit."""
        for _ in range(_CHUNKS_PER_TURN):
            try:
                chunk = os.read(self.reading, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.open = False
                return
            # Keep one byte more than the limit, so that an overflow is detected.
            self.kept += chunk[: self._bound_bytes + 1 - len(self.kept)]

    def close_writing(self) -> None:
        if self.writing >= 0:
            os.close(self.writing)
            self.writing = -1

    def close(self) -> None:
        self.close_writing()
        os.close(self.reading)


def run(
    call: Callable[[int], object],
    *,
    timeout_s: float,
    clock: Clock,
    keep: Collection[int] = (),
    poll: Callable[[int], None] | None = None,
    poll_s: float = _POLL_S,
) -> CallResult:
    """Run `call` in a child process and return the result; at the timeout, kill all of its processes.

    `call` receives a descriptor for its result. Its standard streams are an empty input and pipes, and it inherits the
    descriptors in `keep`. `poll` receives the child's process ID every `poll_s` seconds. An exception during the wait,
    for example from a handler of SIGTERM, also kills the call.

    Raises:
        OSError: No process can be created.
    """
    before = _tree()
    pipes = (_Pipe(OUTPUT_BYTES_MAX), _Pipe(OUTPUT_BYTES_MAX), _Pipe(RETURNED_BYTES_MAX))
    try:
        parent = os.getpid()
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        child = -1
        try:
            child = os.fork()
            if child == 0:
                _become_call(call, pipes, parent, keep)
            for pipe in pipes:
                pipe.close_writing()
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            timed_out = _watch(child, pipes, timeout_s, clock, poll, poll_s)
        except BaseException:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            if child > 0:
                _end(child, before)
            raise
        else:
            # The child's process ID may be reused from here on.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            return _collect_result(child, pipes, before, timed_out)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        for pipe in pipes:
            pipe.close()


def execute(
    argv: Sequence[str],
    environment: dict[str, str],
    *,
    timeout_s: float,
    clock: Clock,
    program: str = "",
    stdin: bytes = b"",
) -> CallResult:
    """Run a command without a shell, like `run`.

    `program` is its path if different from argv[0]. Its standard input is a file with `stdin`, so that a command that
    does not read it blocks nothing.
    """

    def become(returned: int) -> None:
        os.close(returned)
        if stdin:
            given = os.memfd_create("stdin")
            os.write(given, stdin)
            os.lseek(given, 0, os.SEEK_SET)
            os.dup2(given, 0)
        try:
            os.execve(program or argv[0], list(argv), environment)
        except OSError as error:
            os.write(2, f"{argv[0]} cannot be executed: {error.strerror}\n".encode())

    return run(become, timeout_s=timeout_s, clock=clock)


def pause(wait_s: float) -> None:
    """Wait; signals with a handler interrupt the wait."""
    signal.sigtimedwait(set(), wait_s)


def describe_exit(code: int) -> str:
    """Describe how a call ended, to follow its name: `was killed by signal 9`, `ended with code 3`."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _watch(
    child: int,
    pipes: Sequence[_Pipe],
    timeout_s: float,
    clock: Clock,
    poll: Callable[[int], None] | None,
    poll_s: float,
) -> bool:
    """Read the call's output until it ends; return True if it timed out."""
    with closing(os.pidfd_open(child)) as handle:
        deadline_s = clock.monotonic_s() + timeout_s
        poller = select.poll()
        poller.register(handle, select.POLLIN)
        for pipe in pipes:
            poller.register(pipe.reading, select.POLLIN)
        while True:
            left_s = deadline_s - clock.monotonic_s()
            if left_s <= 0:
                return True
            ready = {number for number, _ in poller.poll(min(left_s, poll_s) * 1000)}
            for pipe in pipes:
                if pipe.open and pipe.reading in ready:
                    pipe.take()
                    if not pipe.open:
                        poller.unregister(pipe.reading)
            if handle in ready:
                return False
            if poll is not None:
                poll(child)


def _collect_result(child: int, pipes: Sequence[_Pipe], before: Tree, timed_out: bool) -> CallResult:
    unkillable: tuple[int, ...] = ()
    if timed_out:
        code, unkillable = _end(child, before)
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # All output of the call itself is available now; do not wait for other processes that hold a pipe open.
    for pipe in pipes:
        if pipe.open:
            pipe.take()
    reap()
    printed, complained, returned = (bytes(pipe.kept) for pipe in pipes)
    return CallResult(code, printed, complained, returned, timed_out, unkillable)


def _end(child: int, before: Tree) -> tuple[int, tuple[int, ...]]:
    """Kill a call with all its processes: SIGTERM to its group, a short wait, then SIGKILL until none is left."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGTERM)
    pause(TERM_GRACE_S)
    code: int | None = None
    left: Tree = frozenset()
    for _ in range(KILL_ROUNDS_MAX):
        if code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
        left = _tree() - before
        for pid, started in left:
            send(pid, signal.SIGKILL, still=partial(_is_still, pid, started))
        if code is None:
            # Its process ID may be reused from here on, so the group is no longer signalled.
            found, status = os.waitpid(child, os.WNOHANG)
            code = os.waitstatus_to_exitcode(status) if found else None
        else:
            reap()
        if not left and code is not None:
            break
        pause(KILL_PAUSE_S)
    return (-signal.SIGKILL if code is None else code), tuple(sorted(pid for pid, _ in left))


def _is_still(pid: int, started: int) -> bool:
    return start_time(pid) == started


def _tree() -> Tree:
    """Return the living descendants of this process."""
    found = ((pid, start_time(pid)) for pid in descendants(os.getpid()))
    return frozenset((pid, started) for pid, started in found if started is not None)


def reap() -> None:
    """Reap orphaned processes of calls that have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_call(call: Callable[[int], object], pipes: Sequence[_Pipe], parent: int, keep: Collection[int]) -> None:
    """Close inherited descriptors, run the call and exit, in the child process; never returns."""
    try:
        os.setsid()
        die_with_parent(parent)
        printed, complained, returned = (pipe.writing for pipe in pipes)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(printed, 1)
        os.dup2(complained, 2)
        for name in os.listdir("/proc/self/fd"):
            # Otherwise a background process would hold an inherited lock or pipe as long as it lives.
            if int(name) > 2 and int(name) != returned and int(name) not in keep:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        ignore_hangup()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.chdir("/")
        call(returned)
        os._exit(EXIT_NO_CALL)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode("utf-8", "replace"))
    finally:
        sys.stderr = None  # suppress a second report by Python
        os._exit(EXIT_NO_CALL)
