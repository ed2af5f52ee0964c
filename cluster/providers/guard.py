"""Running one call in a process of its own that can be ended whatever it does.

The calling process has one thread, and adopts the orphans of the call (`become_subreaper`), so that nothing of a call
that has to be ended is out of reach: not what ignores SIGTERM, forks, spins or begins a session of its own. What a call
that came to its own end leaves running is its own affair: a site's data-in may well copy in the background and be asked
about it later.
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

from cluster.providers.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX, OUTPUT_BYTES_MAX, RETURNED_BYTES_MAX, TERM_GRACE_S
from cluster.system import Clock, closing, descendants, die_with_parent, ignore_hangup, send, start_time

EXIT_NO_CALL: Final = 126
"""Exit code of a child in which not even the call could be made, as shells give it."""

_CHUNK_BYTES: Final = 64 * 1024
_CHUNKS_PER_TURN: Final = 64
"""Chunks read from one pipe before the clock is looked at again, count: a flood must not hide that time is up."""

_POLL_S: Final = 3600.0
"""Longest wait for anything without looking at the clock, seconds."""


Tree = frozenset[tuple[int, int]]
"""Processes by number and start time: a number alone may be given to another process, which would then be spared."""


class Finished(NamedTuple):
    """How a call ended."""

    code: int
    """Its exit code, or the negative number of the signal that ended it."""
    printed: bytes
    """Its standard output, the first OUTPUT_BYTES_MAX bytes."""
    complained: bytes
    """Its standard error, likewise."""
    returned: bytes
    """What it wrote to the descriptor that it was given."""
    timed_out: bool = False
    unkillable: tuple[int, ...] = ()
    """Processes of it that are there in spite of SIGKILL: they hang in the kernel."""


class _Pipe:
    """One pipe from the call, read without waiting, its beginning kept."""

    def __init__(self, bound_bytes: int) -> None:
        self.reading, self.writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(self.writing, True)
        self._bound_bytes = bound_bytes
        self.kept = bytearray()
        self.open = True

    def take(self) -> None:
        """Read what is there, up to a bound of its own; what is over is dropped."""
        for _ in range(_CHUNKS_PER_TURN):
            try:
                chunk = os.read(self.reading, _CHUNK_BYTES)
            except BlockingIOError:
                return
            if not chunk:
                self.open = False
                return
            # One byte more than allowed stays, so that whoever looks knows that it was too much.
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
) -> Finished:
    """Make the call in a child and return how it ended; at its timeout it is ended with everything it started.

    `call` is given a descriptor to write its result to, and its own standard streams: nothing to read, and pipes. It
    inherits the descriptors in `keep`. `poll` is told the child's number every `poll_s` seconds until it has ended.
    OSError if no process can be made. An exception in the meantime (SIGTERM to this process) ends the call, too.
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
            # From here on the child's number may be given to somebody else at any moment.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            return _finished(child, pipes, before, timed_out)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    finally:
        for pipe in pipes:
            pipe.close()


def execute(
    argv: Sequence[str], environment: dict[str, str], *, timeout_s: float, clock: Clock, program: str = ""
) -> Finished:
    """Run a command without any shell, as `run` does; `program` is its path if that is not argv[0]."""

    def become(returned: int) -> None:
        os.close(returned)
        try:
            os.execve(program or argv[0], list(argv), environment)
        except OSError as error:
            os.write(2, f"{argv[0]} cannot be executed: {error.strerror}\n".encode())

    return run(become, timeout_s=timeout_s, clock=clock)


def pause(wait_s: float) -> None:
    """Wait; a signal that ends this process ends the wait."""
    signal.sigtimedwait(set(), wait_s)


def how(code: int) -> str:
    """Return how a call ended, in words that follow its name: `was killed by signal 9`, `ended with code 3`."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"


def _watch(
    child: int,
    pipes: Sequence[_Pipe],
    timeout_s: float,
    clock: Clock,
    poll: Callable[[int], None] | None,
    poll_s: float,
) -> bool:
    """Read what the call says until it has ended; True if its time was up before that."""
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


def _finished(child: int, pipes: Sequence[_Pipe], before: Tree, timed_out: bool) -> Finished:
    unkillable: tuple[int, ...] = ()
    if timed_out:
        code, unkillable = _end(child, before)
    else:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # What was written before the end is there; whoever else holds a pipe open is not waited for.
    for pipe in pipes:
        if pipe.open:
            pipe.take()
    reap()
    printed, complained, returned = (bytes(pipe.kept) for pipe in pipes)
    return Finished(code, printed, complained, returned, timed_out, unkillable)


def _end(child: int, before: Tree) -> tuple[int, tuple[int, ...]]:
    """End the call and everything it started: SIGTERM to its group, a moment, SIGKILL until nothing is left."""
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
            # Only now may its number be given to somebody else; the group is killed by number no more.
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
    """Collect orphans of calls that came to this process and have ended."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _become_call(call: Callable[[int], object], pipes: Sequence[_Pipe], parent: int, keep: Collection[int]) -> None:
    """In the child: cut what it must not inherit, make the call, end. Never returns."""
    try:
        os.setsid()
        die_with_parent(parent)
        printed, complained, returned = (pipe.writing for pipe in pipes)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.dup2(printed, 1)
        os.dup2(complained, 2)
        for name in os.listdir("/proc/self/fd"):
            # A lock or a pipe of ours in a process that stays behind would be held for as long as that lives.
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
        sys.stderr = None  # nothing of Python's own goes out twice
        os._exit(EXIT_NO_CALL)
