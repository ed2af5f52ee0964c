"""Certificate, key and authorities of a process, reloaded from their files without a restart.

Handshakes that start after a change use the new files. Unusable files, for example a half-copied pair, change nothing:
they are logged once, and read again at their next change.
"""

import logging
import os
import ssl
from collections.abc import Callable
from typing import Final

from forebay.cluster.security.tls import (
    TlsError,
    TlsFiles,
    client_context,
    describe_certificate,
    read_pem,
    server_context,
)
from forebay.cluster.system import Clock, SystemClock

LOGGER = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""Interval of checks for changed files, seconds; a check costs three stat calls."""

_AUTHORITIES: Final = "the certificate authority"

_Signature = tuple[tuple[int, int, int], ...]
"""Identity of three files: inode, size and modification time in ns."""


class Credentials:
    """TLS contexts of one process for outgoing and incoming connections, from the same files."""

    def __init__(
        self,
        files: TlsFiles,
        *,
        serves: bool = False,
        open_to_all: bool = False,
        clock: Clock | None = None,
        load: Callable[[TlsFiles], ssl.SSLContext] = client_context,
    ) -> None:
        """Read the files.

        `serves`: create contexts for listeners. `open_to_all`: the API accepts clients without a certificate. `load`
        creates the context of outgoing connections.

        Raises:
            TlsError: The files cannot be used.
        """
        self.files: Final = files
        self._serves: Final = serves
        self._clock: Final = clock or SystemClock()
        self._signature = _signature(files)
        self._authorities = read_pem(files.authority, _AUTHORITIES)
        self._load: Final = load
        self._client = load(files)
        self._server = server_context(files) if serves else None
        self._open_to_all: Final = open_to_all
        self._api = server_context(files, required=False) if open_to_all else self._server
        self._read_s = self._clock.monotonic_s()
        self.generation = 0
        """Number of reloads. Open connections may use contexts of earlier generations."""
        self.on_renewed: list[Callable[[], None]] = []
        """Called after each reload."""
        self.on_authorities: list[Callable[[], None]] = []
        """Called when the authorities changed, so that peers of a removed authority must reconnect."""

    def client_context(self) -> ssl.SSLContext:
        """Return the context for the next outgoing connection."""
        return self._client

    def server_context(self) -> ssl.SSLContext:
        """Return the context for the next accepted connection."""
        assert self._server is not None
        return self._server

    def api_context(self) -> ssl.SSLContext:
        """Return the context for the next connection to the API."""
        assert self._api is not None
        return self._api

    def refresh(self, *, at_once: bool = False) -> None:
        """Reload changed files; checks at most once in REFRESH_S unless `at_once`."""
        now_s = self._clock.monotonic_s()
        if not at_once and now_s - self._read_s < REFRESH_S:
            return
        self._read_s = now_s
        signature = _signature(self.files)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            authorities = read_pem(self.files.authority, _AUTHORITIES)
            client = self._load(self.files)
            server = server_context(self.files) if self._serves else None
            api = server_context(self.files, required=False) if self._open_to_all else server
        except TlsError as error:
            LOGGER.error("new certificates cannot be used; the previous ones stay in use: %s", error)
            return
        self._client, self._server, self._api = client, server, api
        self.generation += 1
        LOGGER.info("now using %s", describe_certificate(self.files.certificate))
        for call in self.on_renewed:
            call()
        if authorities != self._authorities:
            self._authorities = authorities
            for call in self.on_authorities:
                call()


def _signature(files: TlsFiles) -> _Signature:
    found = []
    for path in (files.authority, files.certificate, files.key):
        try:
            status = os.stat(path)
        except OSError:
            found.append((0, 0, 0))
        else:
            found.append((status.st_ino, status.st_size, status.st_mtime_ns))
    return tuple(found)
