"""`python -m cluster.agent --config FILE --name NODE`: the agent in the foreground."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster.agent import main
from cluster.agent.service import EXIT_CONFIGURATION
from cluster.config import Config, ConfigError


def run(arguments: list[str]) -> int:
    """Read the command line and the configuration, and run the agent; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cluster.agent", description="Run the agent of one node.")
    parser.add_argument("--config", type=Path, default=Path("forebay.toml"), help="the cluster's configuration")
    parser.add_argument("--name", required=True, help="the node, as [[agent]] names it")
    chosen = parser.parse_args(arguments)
    try:
        config = Config.load(chosen.config)
    except ConfigError as error:
        print(f"forebay agent: {error}", file=sys.stderr)
        return EXIT_CONFIGURATION
    return main(config, chosen.name)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
