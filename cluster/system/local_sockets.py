"""Unix sockets at a path: whoever is at the other end is told by the kernel, and a path may be as long as it likes."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred of unix(7)."""

OVERFLOW_UID: Final = 65534
"""Whom the kernel names for an account that this user namespace does not know (/proc/sys/kernel/overflowuid)."""


class PeerAccount(NamedTuple):
    """Who is at the other end: of one who connected, then; of one who listens, when it began to."""

    pid: int
    uid: int
    gid: int


def peer_account(connection: socket.socket) -> PeerAccount:
    """Return who is at the other end of a connection of this machine (SO_PEERCRED); OSError."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(data)
    return PeerAccount(pid, uid & 0xFFFFFFFF, gid & 0xFFFFFFFF)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Give a name for `path` that fits an address of 108 bytes while the context lasts; OSError if its directory is not
    there."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
