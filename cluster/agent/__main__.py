"""`python -m cluster.agent --config FILE --name NODE`: the agent in the foreground."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

from cluster.agent import main
from cluster.config import Config, ConfigError
from cluster.system import EXIT_CONFIGURATION, begin_logging, leave_when_terminated, say_at_last


def run(arguments: list[str]) -> int:
    """Read the command line and the configuration, and run the agent; return the exit code."""
    leave_when_terminated()
    parser = argparse.ArgumentParser(prog="python -m cluster.agent", description="Run the agent of one node.")
    parser.add_argument("--config", type=Path, default=Path("forebay.toml"), help="the cluster's configuration")
    parser.add_argument("--name", required=True, help="the node, as [[agent]] names it")
    parser.add_argument("--mover", action="store_true", help="stage for the places of this machine, and run no scripts")
    chosen = parser.parse_args(arguments)
    begin_logging("forebay-agent", node=chosen.name)
    try:
        config = Config.load(chosen.config)
    except ConfigError as error:
        say_at_last(f"forebay run agent: {error}")
        return EXIT_CONFIGURATION
    return main(config, chosen.name, mover=chosen.mover)


def leave(code: int) -> NoReturn:
    """End the process with `code`, whatever became of the log: Python 3.11.2 exits 120 when its last flush fails."""
    try:
        sys.stderr.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    sys.exit(code)


if __name__ == "__main__":
    leave(run(sys.argv[1:]))
