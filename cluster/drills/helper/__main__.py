"""Command `forebay run helper`: runs the helper in the foreground."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from pathlib import Path
from typing import Final

from forebay.cluster.client import Client
from forebay.cluster.config import Config, ConfigError, Reloader
from forebay.cluster.drills.helper.messages import HelperRefused
from forebay.cluster.drills.helper.service import Helper
from forebay.cluster.schemas import operations
from forebay.cluster.schemas.drills import DrillAnswer
from forebay.cluster.security import Credentials, TlsError, until_valid
from forebay.cluster.system import EXIT_CONFIGURATION, SystemClock, begin_logging, leave_when_terminated, say_at_last
from forebay.cluster.system.eventloop import stop_on_signals

EXIT_FAILED: Final = 1

KNOWN_S: Final = 5.0
"""Timeout of the query that checks that a drill is running, seconds."""


def run(arguments: list[str]) -> int:
    """Run the helper; return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(prog="forebay run helper", description="Run a machine's helper for drills.")
    parser.add_argument("--config", type=Path, default=Path("forebay.toml"), help="the cluster's configuration")
    parser.add_argument("--name", required=True, help="name of the helper in its [[helper]] table")
    parser.add_argument("--up", type=int, help="descriptor of the pipe to `forebay cluster up`")
    chosen = parser.parse_args(arguments)
    begin_logging("forebay-drill-helper")
    try:
        asyncio.run(_serve(chosen))
    except (ConfigError, TlsError) as error:
        say_at_last(f"forebay run helper: {error}")
        return EXIT_CONFIGURATION
    except (OSError, ValueError, HelperRefused) as error:
        say_at_last(f"forebay run helper: {error}")
        return EXIT_FAILED
    return 0


async def _serve(chosen: argparse.Namespace) -> None:
    config, clock, stop = Config.load(chosen.config), SystemClock(), asyncio.Event()
    config.helper(chosen.name)
    stop_on_signals(stop)
    files = config.tls_files(chosen.name)
    if not await until_valid(files.certificate, clock, stop):
        return
    async with Client.from_config(config, chosen.name, deadline_s=KNOWN_S) as client:

        async def known(drill: int) -> DrillAnswer:
            return await client.call(operations.SHOW_DRILL, drill=drill)

        credentials = Credentials(files, serves=True, clock=clock)
        helper = Helper(config, chosen.name, known, clock, credentials=credentials, up=chosen.up)

        def use(renewed: Config) -> None:
            client.reach_at(renewed.endpoints)
            helper.renew(renewed)

        reloader = Reloader(
            config, chosen.name, read=Config.load, applies=("replicas", "drill"),
            restarts=("cluster", "tls", "helpers", "storage"), use=use,
        )  # fmt: skip
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reloader.ask)
        await helper.run(stop)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
