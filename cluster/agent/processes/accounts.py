"""Whose account an operation or a script runs as, and becoming it for good.

`own`: everything runs as the account of the agent. `switch`: everything that touches a job's files runs as the job's
user, which needs root."""

from __future__ import annotations

import os
import pwd
from typing import Final, Literal, NamedTuple

Mode = Literal["own", "switch"]

DEFAULT_SHELL: Final = "/bin/sh"


class AccountRefused(Exception):
    """An account that nothing may run as; the message names the user."""


class Account(NamedTuple):
    """A user of this machine."""

    name: str
    uid: int
    gid: int
    home: str
    shell: str
    switch: bool
    """Whether a process has to become this user."""


def account_for(mode: Mode, user: str) -> Account:
    """Return whom the operations of `user`'s jobs run as.

    AccountRefused if that user does not exist here or is root.
    """
    if mode == "own":
        try:
            found = pwd.getpwuid(os.geteuid())
        except KeyError:
            return Account(str(os.geteuid()), os.geteuid(), os.getegid(), "/", DEFAULT_SHELL, False)
        return Account(found.pw_name, os.geteuid(), os.getegid(), found.pw_dir, found.pw_shell or DEFAULT_SHELL, False)
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        raise AccountRefused(f"the user {user!r} does not exist on this node; make the account here") from None
    if found.pw_uid == 0:
        raise AccountRefused(f"the user {user!r} is root here; jobs never run as root: submit as an ordinary user")
    return Account(found.pw_name, found.pw_uid, found.pw_gid, found.pw_dir, found.pw_shell or DEFAULT_SHELL, True)


def become(account: Account) -> None:
    """Become the account for good, if it is another one; OSError or AccountRefused if that does not hold.

    A parent-death signal that was set before is gone afterwards: set it after this.
    """
    if not account.switch:
        return
    os.initgroups(account.name, account.gid)
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)
    if os.getresuid() != (account.uid,) * 3 or os.getresgid() != (account.gid,) * 3:
        raise AccountRefused(f"could not become the user {account.name!r}")
    try:
        os.setresuid(0, 0, 0)
    except PermissionError:
        return
    raise AccountRefused(f"the user {account.name!r} could become root again; the node's capabilities are wrong")
