"""Witness process: `python -m cluster.witness --key KEY --db DB --listen ADDRESS --keys FILE`.

The process needs only the public keys of the clusters that it witnesses. Exit codes: 0 stopped on request, 64 wrong
usage, 66 unusable key or database, 69 unusable address, 78 unusable log keys or certificate. Every code except 0 comes
with one sentence on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import ssl
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from forebay.cluster.security import TlsError, open_server_context
from forebay.cluster.security.proofs import NoteError, parse_key
from forebay.cluster.system import (
    EXIT_CONFIGURATION,
    Address,
    AddressError,
    SystemClock,
    begin_logging,
    leave_when_terminated,
    say_at_last,
)
from forebay.cluster.system.eventloop import stop_on_signals
from forebay.cluster.witness.checkpoint_store import CheckpointStore
from forebay.cluster.witness.keys import WitnessError, read_key
from forebay.cluster.witness.server import WitnessServer
from forebay.cluster.witness.witness import CheckpointWitness, WitnessedLog, log_of, logs_in
from forebay.replica.values import plain

LOGGER = logging.getLogger("forebay.cluster.witness")

EXIT_OK: Final = 0
EXIT_USAGE: Final = 64
EXIT_STATE_REFUSED: Final = 66
EXIT_ADDRESS_UNUSABLE: Final = 69

LOGS_MAX: Final = 1024
"""Maximum number of logs of one witness: each is a row and some keys in memory."""


class _WitnessUsageError(Exception):
    def __init__(self, sentence: str, code: int) -> None:
        super().__init__(sentence)
        self.code = code


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, and return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(prog="forebay run witness", description="Cosign checkpoints of transparency logs.")
    parser.add_argument("--key", type=Path, required=True)
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--log", action="append", default=[])
    parser.add_argument("--keys", type=Path, action="append", default=[])
    parser.add_argument("--certificate", type=Path)
    parser.add_argument("--certificate-key", type=Path)
    try:
        options = parser.parse_args(arguments)
    except SystemExit as leaving:
        return EXIT_OK if leaving.code in (0, None) else EXIT_USAGE
    begin_logging("forebay-witness")
    os.umask(0o077)
    try:
        asyncio.run(_run(options))
    except _WitnessUsageError as error:
        say_at_last(f"forebay: {error}")
        return error.code
    return EXIT_OK


async def _run(options: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    stop_on_signals(stopped)
    logs = _logs(options.log, options.keys)
    address, tls = _place(options.listen, options.certificate, options.certificate_key)
    try:
        name, private = read_key(options.key)
        witness = CheckpointWitness(
            name, private, logs, seen := CheckpointStore(options.db, _vkey(options.key)), SystemClock()
        )
    except WitnessError as error:
        raise _WitnessUsageError(str(error), EXIT_STATE_REFUSED) from error
    server = WitnessServer(witness, address, tls)
    try:
        await server.start()
    except OSError as error:
        seen.close()
        raise _WitnessUsageError(
            f"the address cannot be used ({error}); use another one", EXIT_ADDRESS_UNUSABLE
        ) from error
    _say(logs)

    def reload() -> None:
        try:
            found = _logs(options.log, options.keys)
        except _WitnessUsageError as error:
            LOGGER.error("new keys cannot be used; the previous ones stay in use: %s", error)
            return
        witness.renew(found)
        _say(found)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    LOGGER.info("listening at %s as %s", address, witness.key)
    await stopped.wait()
    await server.stop()
    seen.close()


def _say(logs: Sequence[WitnessedLog]) -> None:
    for log in logs:
        LOGGER.info("witnessing %s: %d of %d keys must sign", plain(log.origin), log.least, len(log.keys))


def _vkey(path: Path) -> str:
    from forebay.cluster.security.proofs import COSIGNATURE_KEY, verifier_of

    return str(verifier_of(*read_key(path), COSIGNATURE_KEY))


def _logs(given: Sequence[str], files: Sequence[Path]) -> list[WitnessedLog]:
    """Return the logs named in options and files, each once."""
    try:
        logs = [_log(one) for one in given]
        for file in files:
            logs += logs_in(file.read_text(encoding="utf-8"))
    except (WitnessError, NoteError) as error:
        raise _WitnessUsageError(str(error), EXIT_CONFIGURATION) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _WitnessUsageError(
            f"the keys cannot be read ({error}); correct the file, or use another one", EXIT_CONFIGURATION
        ) from error
    origins = {log.origin for log in logs}
    if not logs or len(origins) != len(logs) or len(logs) > LOGS_MAX:
        raise _WitnessUsageError(
            f"{len(logs)} logs are given, {len(origins)} of them distinct; give 1 to {LOGS_MAX}, each once",
            EXIT_CONFIGURATION,
        )
    return logs


def _log(given: str) -> WitnessedLog:
    origin, equals, keys = given.partition("=")
    if not equals:
        raise WitnessError(f"{given!r} has no keys", "write ORIGIN=KEY,KEY,KEY")
    return log_of(origin, [parse_key(one) for one in keys.split(",")])


def _place(
    listen: str, certificate: Path | None, key: Path | None
) -> tuple[Address, Callable[[], ssl.SSLContext] | None]:
    try:
        address = Address.parse(listen)
    except AddressError as error:
        raise _WitnessUsageError(str(error), EXIT_CONFIGURATION) from error
    if certificate is None and key is None:
        if not address.is_loopback:
            raise _WitnessUsageError(
                f"{address} is reachable from other machines, but there is no certificate; specify --certificate and "
                "--certificate-key, or listen on loopback, behind a proxy",
                EXIT_CONFIGURATION,
            )
        return address, None
    if certificate is None or key is None:
        raise _WitnessUsageError("specify both --certificate and --certificate-key, or neither", EXIT_CONFIGURATION)
    try:
        return address, _RenewedLogs(certificate, key)
    except TlsError as error:
        raise _WitnessUsageError(str(error), EXIT_CONFIGURATION) from error


class _RenewedLogs:
    """TLS context of the next handshake, reloaded when its files change."""

    def __init__(self, certificate: Path, key: Path) -> None:
        self._files = certificate, key
        self._read = self._times()
        self._context = open_server_context(certificate, key)

    def __call__(self) -> ssl.SSLContext:
        if (found := self._times()) != self._read:
            self._read = found
            try:
                self._context = open_server_context(*self._files)
            except TlsError as error:
                LOGGER.error("the new certificate cannot be used; the previous one stays in use: %s", error)
        return self._context

    def _times(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in self._files)
        except OSError:
            return ()


if __name__ == "__main__":
    sys.exit(main())
