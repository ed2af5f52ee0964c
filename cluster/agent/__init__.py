"""The process on a node that stages files in and out and runs jobs: its public face is `main`.

Nothing heavy is imported here, because workers and step supervisors are started as modules of this package and must
start fast."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.config import Config

__all__ = ["main"]


def main(config: Config, name: str, *, mover: bool = False) -> int:
    """Run the agent `name` of the configuration in the foreground until SIGTERM or SIGINT; return its exit code.

    `mover`: it stages for places, and runs no scripts.
    """
    from cluster.agent.service import serve

    return serve(config, name, mover=mover)
