"""The last leader, remembered between commands to avoid a redirect and a second handshake.

It is stored in the login session's private directory (XDG_RUNTIME_DIR). Without a usable directory nothing is stored. A
wrong entry costs one redirect.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from forebay.cluster.client.calls import Endpoints
from forebay.cluster.system import Address, closing, open_directory

DIRECTORY_VARIABLE: Final = "XDG_RUNTIME_DIR"
"""Environment variable of the session's directory (XDG Base Directory Specification)."""

_BYTES_MAX: Final = 512
"""Longest stored address, bytes; a host name has at most 253."""


class RememberedEndpoints(Endpoints):
    """Endpoints that start with the leader of the previous command."""

    def __init__(self, addresses: Iterable[Address], cluster_id: str) -> None:
        super().__init__(addresses)
        self._name = f"forebay-{cluster_id}.leader"
        self._remembered: Address | None = None
        said = self._read()
        for address in self.order:
            if str(address) == said:
                self._remembered = address
                super().prefer(address)

    def prefer(self, address: Address) -> None:
        """Move a leader to the front, and store it for the next command."""
        super().prefer(address)
        if address != self._remembered:
            self._remembered = address
            self._write(str(address))

    def _read(self) -> str:
        with suppress(OSError, ValueError), closing(_directory()) as directory:
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            with closing(os.open(self._name, flags, dir_fd=directory)) as file:
                return os.read(file, _BYTES_MAX).decode()
        return ""

    def _write(self, text: str) -> None:
        with suppress(OSError), closing(_directory()) as directory:
            new = f"{self._name}.{os.getpid()}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with closing(os.open(new, flags, 0o600, dir_fd=directory)) as file:
                    os.write(file, text.encode())
                os.rename(new, self._name, src_dir_fd=directory, dst_dir_fd=directory)
            except OSError:
                with suppress(FileNotFoundError):
                    os.unlink(new, dir_fd=directory)


def _directory() -> int:
    """Return a descriptor of the session's directory.

    Raises:
        OSError: There is no such directory, or other accounts may write to it.
    """
    directory = open_directory(os.environ.get(DIRECTORY_VARIABLE, ""))
    status = os.fstat(directory)
    if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(directory)
        raise PermissionError("others may write there")
    return directory
