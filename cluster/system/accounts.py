"""Accounts and groups of this machine, as its name service knows them: it may take as long as it likes to answer."""

from __future__ import annotations

import grp
import pwd


def uid_of(name: str) -> int | None:
    """Return the uid of an account of this machine, None if there is none; a number stands for itself."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError, OSError):
        return None


def group_name(gid: int) -> str | None:
    """Return the name of a group of this machine, None if there is none."""
    try:
        return grp.getgrgid(gid).gr_name
    except (KeyError, ValueError, OSError, OverflowError):
        return None
