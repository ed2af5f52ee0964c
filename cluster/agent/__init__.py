"""Node agent: stages files in and out and runs jobs. The public API is `main`.

Heavy imports are avoided here, because workers and supervisors start as modules of this package and must start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forebay.cluster.config import Config

__all__ = ["main"]


def main(config: Config, name: str, *, mover: bool = False) -> int:
    """Run agent `name` in the foreground until SIGTERM or SIGINT; return its exit code.

    A `mover` stages data on shared filesystems and runs no scripts.
    """
    from forebay.cluster.agent.service import serve

    return serve(config, name, mover=mover)
