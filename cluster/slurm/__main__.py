"""Command `forebay run bridge`: runs the bridge in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import Final

from forebay.cluster.client import Client
from forebay.cluster.config import ConfigError, Reloader, read_access
from forebay.cluster.security import TlsError, until_valid
from forebay.cluster.slurm.bridge import Bridge, BridgeRefused, cluster_token, report_served
from forebay.cluster.slurm.calls import CALL_S
from forebay.cluster.slurm.checks import certificate_fault
from forebay.cluster.slurm.files import DirectoryRefused, SlurmFiles
from forebay.cluster.system import EXIT_CONFIGURATION, SystemClock, begin_logging, leave_when_terminated, say_at_last
from forebay.cluster.system.eventloop import stop_on_signals

EXIT_FAILED: Final = 1

SERVED_S: Final = 10.0
"""Seconds after which a bridge without a leader counts as started, so that slurmctld can start."""


def run(arguments: list[str]) -> int:
    """Run the bridge; return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(
        prog="forebay run bridge", description="Run the bridge between a slurmctld and the cluster."
    )
    parser.add_argument("--config", type=Path, default=Path("forebay.toml"), help="Use this configuration file.")
    parser.add_argument("--name", required=True, help="Use the certificate of this scheduler.")
    parser.add_argument("--state", type=Path, required=True, help="Read slurmctld's StateSaveLocation here.")
    parser.add_argument("--run", type=Path, default=Path("/run/forebay-slurm"), help="Keep files and the socket here.")
    parser.add_argument("--metrics", type=Path, help="Write counters for Prometheus to this file.")
    parser.add_argument(
        "--when-away",
        choices=("refuse", "accept"),
        default="refuse",
        help="Reject or accept jobs with a buffer while no bridge runs.",
    )
    chosen = parser.parse_args(arguments)
    begin_logging("forebay-slurm-bridge")
    try:
        asyncio.run(_serve(chosen))
    except (ConfigError, TlsError, BridgeRefused, DirectoryRefused) as error:
        say_at_last(f"forebay run bridge: {error}")
        return EXIT_CONFIGURATION
    except OSError as error:
        say_at_last(f"forebay run bridge: {error}")
        return EXIT_FAILED
    return 0


async def _serve(chosen: argparse.Namespace) -> None:
    access, clock, stop = read_access(chosen.config), SystemClock(), asyncio.Event()
    stop_on_signals(stop)
    asyncio.get_running_loop().call_later(SERVED_S, report_served)
    fault = certificate_fault(access, chosen.name, clock.now())
    if fault:
        raise BridgeRefused(fault)
    if not await until_valid(access.tls_files(chosen.name).certificate, clock, stop):
        return
    host = socket.gethostname()
    files = SlurmFiles(chosen.run, host, away=chosen.when_away)
    async with Client.from_config(access, chosen.name, deadline_s=CALL_S) as client:
        reloader = Reloader(
            access, chosen.name, read=read_access, applies=("replicas",), restarts=("cluster", "tls"),
            use=lambda renewed: client.reach_at(renewed.endpoints),
        )  # fmt: skip
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
        token = cluster_token(chosen.state)
        bridge = Bridge(
            client, files, token, host, clock,
            state=chosen.state, metrics_file=chosen.metrics, on_served=report_served,
        )  # fmt: skip
        await bridge.run(stop)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
