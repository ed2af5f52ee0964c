"""Files that are made while there is room, to be used when there is none: a full disk still takes results and locks."""

from __future__ import annotations

import contextlib
import os

from cluster.agent.files.durable import is_no_room, reserve
from cluster.agent.limits import RESERVE_BYTES, RESERVE_FILES


class ReserveFiles:
    """Spare files in one directory; nothing is ever read of them."""

    def __init__(self, directory: int) -> None:
        """Take stock of the open directory, and make what is missing as far as there is room."""
        self._directory = directory
        self._free: list[str] = []
        for name in sorted(os.listdir(directory)):
            if os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == RESERVE_BYTES:
                self._free.append(name)
            else:
                os.unlink(name, dir_fd=directory)
        self.fill()

    def __len__(self) -> int:
        return len(self._free)

    def fill(self) -> None:
        """Make what is missing, as far as there is room."""
        try:
            while len(self._free) < RESERVE_FILES:
                name = self._unused()
                reserve(self._directory, name)
                self._free.append(name)
        except OSError as error:
            if not is_no_room(error):
                raise

    def lend(self, directory: int, name: str) -> bool:
        """Make one reserve file the file `name` of an open directory on the same disk; False if none is left."""
        if not self._free:
            return False
        os.rename(self._free[-1], name, src_dir_fd=self._directory, dst_dir_fd=directory)
        self._free.pop()
        return True

    def drop(self, directory: int, name: str) -> None:
        """Remove the file `name` of an open directory: a reserve file that was lent comes back as one."""
        with contextlib.suppress(FileNotFoundError):
            if (
                len(self._free) < RESERVE_FILES
                and os.stat(name, dir_fd=directory, follow_symlinks=False).st_size == RESERVE_BYTES
            ):
                free = self._unused()
                os.rename(name, free, src_dir_fd=directory, dst_dir_fd=self._directory)
                self._free.append(free)
                return
            os.unlink(name, dir_fd=directory)

    def _unused(self) -> str:
        taken = set(self._free)
        return next(name for name in map(str, range(RESERVE_FILES + 1)) if name not in taken)
