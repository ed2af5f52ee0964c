"""Process of `forebay run gateway`: a login node's gateway in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path
from typing import Final

from forebay.cluster.config import ConfigError, read_access
from forebay.cluster.gateway.service import Gateway, GatewayError
from forebay.cluster.security import Role, TlsError, certificate_of, until_valid
from forebay.cluster.system import (
    EXIT_CONFIGURATION,
    READY,
    SystemClock,
    begin_logging,
    leave_when_terminated,
    say_at_last,
    tell_manager,
)
from forebay.cluster.system.eventloop import stop_on_signals

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1

LOGGER = logging.getLogger("forebay.cluster.gateway")


def run(arguments: list[str]) -> int:
    """Run the gateway and return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(prog="forebay run gateway", description="Run a login node's gateway.")
    parser.add_argument("--config", type=Path, default=Path("forebay.toml"), help="the cluster's configuration")
    parser.add_argument("--name", required=True, help="name of the gateway's certificate in the tls directory")
    chosen = parser.parse_args(arguments)
    begin_logging("forebay-gateway")
    try:
        asyncio.run(_serve(chosen))
    except (ConfigError, TlsError) as error:
        say_at_last(f"forebay run gateway: {error}")
        return EXIT_CONFIGURATION
    except (OSError, GatewayError) as error:
        say_at_last(f"forebay run gateway: {error}")
        return EXIT_FAILED
    return EXIT_OK


async def _serve(chosen: argparse.Namespace) -> None:
    config, clock, stop = read_access(chosen.config), SystemClock(), asyncio.Event()
    stop_on_signals(stop)
    files = config.tls_files(chosen.name)
    found = certificate_of(files.certificate.parent, chosen.name)
    if found.role != Role.GATEWAY:
        raise TlsError(
            f"{files.certificate} has the role {found.role or 'none'!r}, but a gateway needs its own certificate: "
            "forebay cert issue NAME --role gateway"
        )
    if not await until_valid(files.certificate, clock, stop):
        return
    gateway = Gateway(config, files, config.access.socket, clock)
    await gateway.start()
    tell_manager(READY, status=f"listens at {config.access.socket}")
    LOGGER.info("gateway %s of cluster %s listens at %s", chosen.name, config.cluster.name, config.access.socket)
    try:
        await stop.wait()
    finally:
        await gateway.stop()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
