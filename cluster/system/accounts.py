"""Accounts and groups of this machine, and the account of a local socket's peer.

The name service may take any time to answer. The kernel returns the account of a peer at once.
"""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_CREDENTIALS: Final = struct.Struct("iII")
"""struct ucred of unix(7)."""

OVERFLOW_UID: Final = 65534
"""UID that the kernel reports for an account without a UID in this namespace (/proc/sys/kernel/overflowuid)."""


def uid_of(name: str) -> int | None:
    """Return the UID of an account, or None if it does not exist. A decimal number is returned as UID."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError, OSError):
        return None


def account_of(uid: int) -> str | None:
    """Return the name of an account, or None if it does not exist.

    Raises:
        OSError: The name service fails.
    """
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


def is_member(account: str, group: str) -> bool:
    """Return whether an account belongs to a group.

    Raises:
        OSError: The name service fails.
    """
    try:
        found = grp.getgrnam(group)
    except KeyError:
        return False
    if account in found.gr_mem:
        return True
    try:
        primary = pwd.getpwnam(account).pw_gid
    except KeyError:
        return False
    return found.gr_gid in os.getgrouplist(account, primary)


def group_name(gid: int) -> str | None:
    """Return the name of a group, or None if it does not exist."""
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, ValueError, OSError, OverflowError):
        return None


class PeerAccount(NamedTuple):
    """Credentials of a peer: of a client when it connected, or of a server when it began to listen."""

    pid: int
    uid: int
    gid: int


def peer_account(connection: socket.socket) -> PeerAccount:
    """Return the credentials of a local connection's peer (SO_PEERCRED).

    Raises:
        OSError: The kernel does not know the peer.
    """
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return PeerAccount(*_CREDENTIALS.unpack(data))


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Provide a path to the same file that fits into a socket address (108 bytes), valid inside the context.

    Raises:
        OSError: The directory of `path` does not exist.
    """
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
