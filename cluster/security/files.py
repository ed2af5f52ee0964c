"""Files of certificates and keys: where they are, and whether others may change or read them.

Apart from what uses them: a command that comes by a gateway loads no TLS.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

import msgspec

FORBIDDEN_KEY_BITS: Final = stat.S_IRWXG | stat.S_IRWXO
"""Permission bits that a private key must not have: anybody but its owner could impersonate its holder."""


class TlsError(Exception):
    """A certificate, key or authority file cannot be used; the message names the file and the remedy."""


class TlsFiles(msgspec.Struct, frozen=True):
    """The three files that one side of a connection needs."""

    authority: Path
    certificate: Path
    key: Path

    @property
    def shows_nothing(self) -> bool:
        """Whether no certificate is shown: whoever asks is vouched for otherwise."""
        return self.certificate == NO_CERTIFICATE


NO_CERTIFICATE: Final = Path()
"""Certificate and key of who shows none."""


def is_there(certificate: Path) -> bool:
    """Say whether a certificate exists; TlsError if its directory is somebody else's and may not be looked into."""
    try:
        return certificate.exists()
    except OSError as error:
        raise TlsError(
            f"{certificate} may not be read ({error.strerror}); use a copy of forebay.toml whose [tls] names a "
            f"directory of your own, made by an operator with `forebay cert issue NAME --role user --into DIR`"
        ) from error


def find_unsafe_keys(directory: Path) -> tuple[str, str] | None:
    """Return (sentence, remedy) if others may change the directory of keys or read a key in it, else None.

    Whoever may not look into the directory sees no keys: the one that is used is checked again when it is loaded.
    """
    try:
        mode = stat.S_IMODE(directory.stat().st_mode)
        keys = sorted(path for path in directory.iterdir() if path.suffix == ".key")
        modes = [(path, stat.S_IMODE(path.stat().st_mode)) for path in keys]
    except OSError:
        return None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{directory} has mode {mode:04o}, others may replace the keys in it", f"run: chmod 700 {directory}"
    for path, key_mode in modes:
        if key_mode & FORBIDDEN_KEY_BITS:
            return f"the private key {path} has mode {key_mode:04o}, others may use it", f"run: chmod 600 {path}"
    return None
