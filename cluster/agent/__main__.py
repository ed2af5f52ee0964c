"""Command line `python -m cluster.agent --config FILE --name NODE`: run the agent in the foreground."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from forebay.cluster.agent import main
from forebay.cluster.config import Config, ConfigError
from forebay.cluster.system import EXIT_CONFIGURATION, begin_logging, leave_when_terminated, say_at_last


def run(arguments: list[str]) -> int:
    """Read the command line and the configuration, then run the agent; return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(prog="python -m forebay.cluster.agent", description="Run the agent of one node.")
    parser.add_argument("--config", type=Path, default=Path("forebay.toml"), help="Cluster configuration file")
    parser.add_argument("--name", required=True, help="Node name, as in its [[agent]] table")
    parser.add_argument(
        "--mover", action="store_true", help="Stage on this machine's shared filesystems and run no scripts"
    )
    chosen = parser.parse_args(arguments)
    begin_logging("forebay-agent", node=chosen.name)
    try:
        config = Config.load(chosen.config)
    except ConfigError as error:
        say_at_last(f"forebay run agent: {error}")
        return EXIT_CONFIGURATION
    return main(config, chosen.name, mover=chosen.mover)


def leave(code: int) -> NoReturn:
    """Exit with `code` even if the last flush of the log fails, for which Python 3.11.2 would exit 120."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(code)


if __name__ == "__main__":
    leave(run(sys.argv[1:]))
