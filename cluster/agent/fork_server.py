"""Fork server of an agent: a single-threaded process that has loaded the code of workers and supervisors.

The agent runs it as `python -m cluster.agent.fork_server CHANNEL AGENT_PID PADDING` (`processes/forking`). It reads no
orders or records: a request names an entry of `MAINS`, and the descriptors it carries tell the child what to do.
Children are created with CLONE_PARENT, so the agent waits for them and they outlive this process.

PADDING and an environment variable reserve memory for the command line and operation marker that a child shows in
/proc, as if it had been executed. They are overwritten in place, as setproctitle(3) does.
"""

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

from forebay.cluster.agent.limits import FORK_DESCRIPTORS_MAX, FORK_REQUEST_BYTES_MAX
from forebay.cluster.agent.processes import (
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
from forebay.cluster.agent.scripts import ProcessName, ScriptOrder, supervisor
from forebay.cluster.agent.worker import usage_counter, worker
from forebay.cluster.system import die_with_parent, ignore_hangup
from forebay.replica.messages import ScriptEnded

MAINS: Final[dict[str, Callable[[Sequence[str]], int]]] = {
    "forebay.cluster.agent.worker.worker": lambda arguments: worker.main(list(arguments)),
    "forebay.cluster.agent.scripts.supervisor": lambda arguments: supervisor.main(list(arguments)),
    "forebay.cluster.agent.worker.usage_counter": lambda arguments: usage_counter.main(int(arguments[0])),
}
"""Permitted modules and their entry points."""

_ARGUMENTS_FIELD: Final = 45
_ENVIRONMENT_FIELD: Final = 47
"""Indexes of the start addresses of arguments and environment in /proc/PID/stat, counted from the state field; each end
address follows.
"""


class ProcessTitle:
    """Command line and operation marker of this process in /proc, overwritten in place."""

    def __init__(self) -> None:
        """Locate both and clear them, except for this module's name.

        Raises:
            OSError: /proc cannot be read.
            ValueError: The arguments or the variable are missing.
        """
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
        """Show the variable that marks an operation; hide it if `marker` is empty."""
        text = f"{OPERATION_VARIABLE}={marker}" if marker else ""
        _overwrite(self._variable, self._variable_room, text.encode())


def _overwrite(address: int, room: int, data: bytes) -> None:
    # Keep the final 0 byte: without it the kernel reads past the end.
    ctypes.memmove(address, data[: room - 1].ljust(room, b"\0"), room)


def load() -> None:
    """Have msgspec inspect the message types in advance, which takes 10 ms; other modules build their decoders on
    import.
    """
    for kind in (ForkRequest, ForkAnswer, ScriptOrder, ProcessName, CgroupName, ScriptEnded):
        msgspec.json.Decoder(kind)


def serve(channel: socket.socket, shown: ProcessTitle) -> None:
    """Fork for each request until the agent closes the channel."""
    load()
    load_accounts()
    # Exclude loaded objects from garbage collection, which would copy their pages.
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
        # Reply before closing the last descriptor: the agent checks for a reply when a child is gone.
        channel.send(msgspec.msgpack.encode(answer))
        for descriptor in (*received, *([] if cgroup < 0 else [cgroup])):
            os.close(descriptor)


def _be_child(request: ForkRequest, received: Sequence[int], shown: ProcessTitle, cgroup: int) -> NoReturn:
    """Become the requested process once the agent confirms; never return to the fork server's code.

    `cgroup` is a directory that this process still has to enter, or negative.
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
        # End of file: the agent no longer waits for this process.
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
    """Move every descriptor but the first to its target, inheritable; return the new number of the first.

    Raises:
        OSError: The number of descriptors is wrong or the limit is reached.
    """
    if len(targets) != len(received) - 1:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    # Move them out of each other's way first.
    above = max((*targets, *received, 2)) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    for descriptor in received:
        os.close(descriptor)
    for descriptor, target in zip(moved[1:], targets, strict=True):
        os.dup2(descriptor, target)
        os.close(descriptor)
    return moved[0]


def main(arguments: Sequence[str]) -> int:
    """Serve the agent at the other end of the channel; return the exit code."""
    channel, agent = arguments[:2]
    ignore_hangup()
    die_with_parent(int(agent))
    with socket.socket(fileno=int(channel)) as opened:
        opened.set_inheritable(False)
        with contextlib.suppress(ConnectionError):  # killed before it read a reply
            serve(opened, ProcessTitle())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
