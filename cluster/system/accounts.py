"""Accounts and groups of this machine, and who is at the other end of a local socket.

The name service may take as long as it likes to answer; the kernel tells at once who has connected.
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

_CREDENTIALS: Final = struct.Struct("3i")
"""struct ucred of unix(7)."""

OVERFLOW_UID: Final = 65534
"""Whom the kernel names for an account that this user namespace does not know (/proc/sys/kernel/overflowuid)."""


def uid_of(name: str) -> int | None:
    """Return the uid of an account of this machine, None if there is none; a number stands for itself."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError, OSError):
        return None


def account_of(uid: int) -> str | None:
    """Return the name of an account of this machine, None if there is none; OSError where nobody can tell."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return None


def is_member(account: str, group: str) -> bool:
    """Say whether an account belongs to a group of this machine; OSError where nobody can tell."""
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
    """Return the name of a group of this machine, None if there is none."""
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, ValueError, OSError, OverflowError):
        return None


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
