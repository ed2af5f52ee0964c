"""Certificate and key files: paths, and checks of their permissions.

This module is separate from `tls`, because access through a gateway needs no TLS library.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

import msgspec

FORBIDDEN_KEY_BITS: Final = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits forbidden on a private key; other accounts could impersonate its holder."""


class TlsError(Exception):
    """A certificate, key or authority file cannot be used; the message names the file and the remedy."""


class TlsFiles(msgspec.Struct, frozen=True):
    """The three files one side of a connection needs."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def shows_nothing(self) -> bool:
        """Return True if the client presents no certificate, and is authenticated in another way."""
        return self.certificate == NO_CERTIFICATE


NO_CERTIFICATE: Final = Path()
"""Path of certificate and key for a client that presents no certificate."""


def is_there(certificate: Path) -> bool:
    """Return True if the certificate exists.

    Raises:
        TlsError: Its directory belongs to another account and is not accessible.
    """
    try:
        return certificate.exists()
    except OSError as error:
        raise TlsError(
            f"{certificate} cannot be read ({error.strerror}); use a copy of forebay.toml whose [tls] names a "
            "directory of your own, made by an operator with `forebay cert issue NAME --role user --into DIR`"
        ) from error


def find_unsafe_keys(directory: Path) -> tuple[str, str] | None:
    """Return (sentence, remedy) if other accounts can change the key directory or read a key in it, else None.

    An account without access to the directory finds no keys here. The key that it uses is checked when loaded.
    """
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        keys = sorted(path for path in directory.iterdir() if path.suffix == ".key")
        modes = [(path, stat.S_IMODE(path.stat().st_mode)) for path in keys]
    except OSError:
        return None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} has mode {mode:04o}, so others may replace the keys in it", f"run: chmod 700 {directory}"
    return next((fault for path, key_mode in modes if (fault := _mode_fault(path, key_mode)) is not None), None)


def unsafe_key(path: Path) -> tuple[str, str] | None:
    """Return (sentence, remedy) if other accounts may use a key, else None.

    A key that this account cannot see is checked where it is used.
    """
    try:
        return _mode_fault(path, stat.S_IMODE(path.stat().st_mode))
    except OSError:
        return None


def _mode_fault(path: Path, mode: int) -> tuple[str, str] | None:
    if mode & FORBIDDEN_KEY_BITS:
        return f"the private key {path} has mode {mode:04o}, so others may use it", f"run: chmod 600 {path}"
    return None
