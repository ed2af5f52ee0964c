"""Ownership of files that are replaced: a new file takes the owner, group and mode of the file that it replaces."""

import os
import stat


def keep_ownership(descriptor: int, name: str | os.PathLike[str], *, directory: int | None = None) -> None:
    """Give an open file the owner, group and mode of the file `name`, if that exists and is a regular file.

    Call it before the rename. A command that an administrator runs as root would otherwise leave a service with a file
    it cannot read. `name` is relative to the open `directory` if one is given. A file in a directory that more accounts
    than its owner may write to says nothing: an attacker may have put it there to be given a key. OSError.
    """
    try:
        replaced = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    above = os.stat(os.path.dirname(name) or ".", dir_fd=directory)
    if not stat.S_ISREG(replaced.st_mode) or above.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (replaced.st_uid, replaced.st_gid):
        os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    # After fchown, which clears the set-user-ID and set-group-ID bits.
    os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))
