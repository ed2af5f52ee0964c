"""The process that forks an agent's operations and supervisors: single-threaded, with all that they need loaded.

Run as `python -m cluster.agent.fork_server CHANNEL AGENT ROOM` by the agent (`processes/forking`). It reads no order
and no record: a request names one of `MAINS`, and what a child is to do is in the descriptors that come with it.
Children are the agent's own (CLONE_PARENT): it waits for them, and they outlive this process.

ROOM, and a variable of this process's environment, are room for what a child shows in /proc: a command line and the
mark of its operation, as if it had been started. They are written over in place, as setproctitle(3) does."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NoReturn

import msgspec

from cluster.agent.limits import FORK_DESCRIPTORS_MAX, FORK_REQUEST_BYTES_MAX
from cluster.agent.processes import (
    BEGIN,
    OPERATION_VARIABLE,
    READY,
    CgroupName,
    ForkAnswer,
    ForkRequest,
    enter,
    fork,
    load_accounts,
)
from cluster.agent.scripts import ProcessName, ScriptOrder, supervisor
from cluster.agent.worker import usage_counter, worker
from cluster.system import die_with_parent, ignore_hangup
from replica.messages import ScriptEnded

MAINS: Final[dict[str, Callable[[Sequence[str]], int]]] = {
    "cluster.agent.worker.worker": lambda arguments: worker.main(list(arguments)),
    "cluster.agent.scripts.supervisor": lambda arguments: supervisor.main(list(arguments)),
    "cluster.agent.worker.usage_counter": lambda arguments: usage_counter.main(int(arguments[0])),
}
"""What may be asked for, by the module that would be started."""

_ARGUMENTS_FIELD: Final = 45
_ENVIRONMENT_FIELD: Final = 47
"""Where the arguments and the environment begin in memory, each with its end behind it: fields of /proc/PID/stat from
the state on."""


class Shown:
    """Command line and marking variable of this process as /proc shows them, where the kernel put them."""

    def __init__(self) -> None:
        """Find them, and empty them but for this process's own name. OSError, ValueError."""
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        self._begin, end = (int(fields[_ARGUMENTS_FIELD + more]) for more in (0, 1))
        self._room = end - self._begin
        words = Path("/proc/self/cmdline").read_bytes().split(b"\0")
        self._interpreter = words[: words.index(b"-m") + 1]
        entry = f"{OPERATION_VARIABLE}=".encode()
        environment = Path("/proc/self/environ").read_bytes()
        offset = environment.index(entry)
        self._variable = int(fields[_ENVIRONMENT_FIELD]) + offset
        self._variable_room = environment.index(b"\0", offset) - offset
        os.environ.pop(OPERATION_VARIABLE, None)
        self.mark("")
        self.name(words[words.index(b"-m") + 1].decode(), ())

    def name(self, module: str, arguments: Sequence[str]) -> None:
        """Show the command line that would have started the module."""
        line = b"\0".join([*self._interpreter, module.encode(), *map(os.fsencode, arguments)])
        _overwrite(self._begin, self._room, line)

    def mark(self, marker: str) -> None:
        """Show the variable that marks an operation; empty: none."""
        text = f"{OPERATION_VARIABLE}={marker}" if marker else ""
        _overwrite(self._variable, self._variable_room, text.encode())


def _overwrite(address: int, room: int, data: bytes) -> None:
    # The last byte stays 0: otherwise the kernel takes what lies behind it for a part of it.
    ctypes.memmove(address, data[: room - 1].ljust(room, b"\0"), room)


def load() -> None:
    """Have msgspec look through the types of whatever a child reads first, which takes it 10 ms. Others read theirs by
    decoders that are made when they are loaded.
    """
    for kind in (ForkRequest, ForkAnswer, ScriptOrder, ProcessName, CgroupName, ScriptEnded):
        msgspec.json.Decoder(kind)


def serve(channel: socket.socket, shown: Shown) -> None:
    """Fork for every request, until the agent is gone."""
    load()
    load_accounts()
    # What is loaded is not looked through by anybody's garbage collection: that would copy it.
    gc.collect()
    gc.freeze()
    channel.send(READY)
    while True:
        data, received, _, _ = socket.recv_fds(
            channel, FORK_REQUEST_BYTES_MAX, FORK_DESCRIPTORS_MAX, socket.MSG_CMSG_CLOEXEC
        )
        if not data or not received:
            return
        cgroup = -1
        try:
            request = msgspec.msgpack.decode(data, type=ForkRequest)
            cgroup = received.pop() if request.into_cgroup else -1
            pid, is_within = fork(cgroup, sibling=True)
            if pid == 0:
                channel.close()
                _be_child(request, received, shown, -1 if is_within else cgroup)
            answer = ForkAnswer(pid=pid)
        except OSError as error:
            answer = ForkAnswer(error=error.errno or errno.EIO)
        # Before the last descriptor is closed: who finds that nobody is left looks here.
        channel.send(msgspec.msgpack.encode(answer))
        for descriptor in (*received, *([] if cgroup < 0 else [cgroup])):
            os.close(descriptor)


def _be_child(request: ForkRequest, received: Sequence[int], shown: Shown, cgroup: int) -> NoReturn:
    """Become what is wanted, once the agent says so; never returns into what the fork server was doing.

    `cgroup` is the directory of one that this process has still to enter.
    """
    code = 1
    try:
        agent = received[0]
        try:
            if cgroup >= 0:
                enter(cgroup)
            main = MAINS[request.module]
            agent = _place(received, request.targets)
            if request.new_session:
                os.setsid()
            elif request.new_group:
                os.setpgid(0, 0)
            os.environ.update(request.variables)
            shown.name(request.module, request.arguments)
            shown.mark(request.variables.get(OPERATION_VARIABLE, ""))
            sys.stdin = open(0, closefd=False)
        except OSError as error:
            os.write(agent, msgspec.msgpack.encode(ForkAnswer(error=error.errno or errno.EIO)))
            os._exit(1)
        os.write(agent, msgspec.msgpack.encode(ForkAnswer(pid=os.getpid())))
        # End of file: nobody waits for this process.
        if os.read(agent, len(BEGIN)) != BEGIN:
            os._exit(1)
        os.close(agent)
        code = main(request.arguments)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        with contextlib.suppress(BaseException):
            traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _place(received: Sequence[int], targets: Sequence[int]) -> int:
    """Put every descriptor but the first where it is wanted, inheritable; return where that first one is. OSError."""
    if len(targets) != len(received) - 1:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    # Out of the way of each other first.
    above = max((*targets, *received, 2)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, target in zip(moved[1:], targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    return moved[0]


def main(arguments: Sequence[str]) -> int:
    """Serve the agent of the channel; return the exit code."""
    channel, agent = arguments[:2]
    ignore_hangup()
    die_with_parent(int(agent))
    with socket.socket(fileno=int(channel)) as opened:
        opened.set_inheritable(False)
        with contextlib.suppress(ConnectionError):  # it was killed before it had read an answer
            serve(opened, Shown())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
