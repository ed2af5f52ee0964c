"""Worker process for a replica's provider calls: validation, pools and status.

`cluster.providers.calls` runs it as `python -m cluster.providers.worker PARENT_PID`. The worker reads a request, writes
the answer, and reads the next request. Each is a length (four bytes, big-endian) and JSON. It ends when its input
closes or the parent dies. Each call runs in a child process that can be killed (`guard`) and has a temporary directory.
"""

from __future__ import annotations

import os
import pwd
import signal
import sys
from types import FrameType
from typing import BinaryIO, Final, Literal, NoReturn

import msgspec

from forebay.cluster.providers import provider_for
from forebay.cluster.providers.interface import NO_LOCAL, Local, OperationError, PoolReport, Subject, log_for
from forebay.cluster.providers.limits import ANSWER_BYTES_MAX, REQUEST_BYTES_MAX
from forebay.cluster.providers.private_directory import private_directory, remove_abandoned
from forebay.cluster.system import SystemClock, become_subreaper, die_with_parent, ignore_hangup
from forebay.replica.model import Provision

LENGTH_BYTES: Final = 4

EXIT_ENDED: Final = 143
"""Exit code after SIGTERM, as shells report it."""

NOBODY: Final = 65534
"""User ID and group ID for accounts that this machine does not know."""


class CallRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request to a provider."""

    operation: Literal["process", "pools", "get_status"]
    provision: Provision
    local: Local = NO_LOCAL
    subject: Subject | None = None
    """Job to validate with `process`; the worker looks up its user ID and group ID by name."""
    user: str = ""
    arguments: tuple[str, ...] = ()
    """Requesting user and arguments of `get_status`."""


class CallAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a request."""

    text: str = ""
    pools: tuple[PoolReport, ...] | None = None
    failed: str = ""
    """Reason of the failure; empty if successful."""
    operation: str = ""


class _Terminated(BaseException):
    """SIGTERM arrived: unwind, so that the call is killed and its directory removed."""


def ids_of(user: str) -> tuple[int, int]:
    """Return the user and group ID of an account on this machine, or 65534 for both if unknown."""
    try:
        found = pwd.getpwnam(user)
    except (KeyError, ValueError):
        return NOBODY, NOBODY
    return found.pw_uid, found.pw_gid


def perform(request: CallRequest) -> CallAnswer:
    """Carry out a request."""
    try:
        with private_directory() as directory:
            provider = provider_for(request.provision, request.local, SystemClock())
            match request.operation:
                case "process":
                    assert request.subject is not None
                    uid, gid = ids_of(request.subject.user)
                    subject = msgspec.structs.replace(request.subject, uid=uid, gid=request.subject.gid or gid)
                    return CallAnswer(text=provider.process(subject, directory))
                case "pools":
                    return CallAnswer(pools=provider.pools(directory))
                case "get_status":
                    uid, gid = ids_of(request.user)
                    return CallAnswer(text=provider.get_status(request.arguments, uid, gid, directory))
    except OperationError as error:
        return CallAnswer(failed=error.message or "the provider gave no message", operation=error.operation)
    except OSError as error:
        return CallAnswer(failed=f"the call cannot be made: {error.strerror or error}", operation=request.operation)


def serve(reading: BinaryIO, writing: BinaryIO) -> None:
    """Serve requests until the input ends."""
    while True:
        head = reading.read(LENGTH_BYTES)
        if len(head) < LENGTH_BYTES:
            return
        length = int.from_bytes(head, "big")
        if length > REQUEST_BYTES_MAX:
            raise ValueError(f"a request of {length} bytes")
        request = msgspec.json.decode(reading.read(length), type=CallRequest)
        data = msgspec.json.encode(perform(request))
        if len(data) > ANSWER_BYTES_MAX:
            data = msgspec.json.encode(
                CallAnswer(failed=f"the answer has more than {ANSWER_BYTES_MAX} bytes", operation=request.operation)
            )
        writing.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
        writing.flush()


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise _Terminated


def main(arguments: list[str]) -> int:
    """Serve the standard streams; return the exit code."""
    try:
        ignore_hangup()
        signal.signal(signal.SIGTERM, _end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        die_with_parent(int(arguments[0]))
        become_subreaper()
        os.umask(0o077)
        log_for()
        remove_abandoned()
        serve(sys.stdin.buffer, sys.stdout.buffer)
        return 0
    except _Terminated:
        return EXIT_ENDED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
