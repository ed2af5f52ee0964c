"""Ownership of files that are replaced: a new file takes the owner, group and mode of the file that it replaces."""

import os
import stat


def keep_ownership(descriptor: int, name: str | os.PathLike[str], *, directory: int | None = None) -> None:
    """Give an open file the owner, group and mode of the file `name`, if that exists and is a regular file.

    Call it before the rename. A command that an administrator runs as root would otherwise leave a service with a file
    it cannot read. `name` is relative to the open `directory` if one is given. OSError.
    """
    try:
        replaced = os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return
    if not stat.S_ISREG(replaced.st_mode):
        return
    new = os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (replaced.st_uid, replaced.st_gid):
        os.fchown(descriptor, replaced.st_uid, replaced.st_gid)
    # After fchown, which clears the set-user-ID and set-group-ID bits.
    os.fchmod(descriptor, stat.S_IMODE(replaced.st_mode))
