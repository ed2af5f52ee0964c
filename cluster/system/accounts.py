"""Accounts and groups of this machine, as its name service knows them: it may take as long as it likes to answer."""

from __future__ import annotations

import grp
import os
import pwd


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
