"""Command line `forebay`.

It runs on any machine that has the configuration and a certificate, so it imports neither consensus nor storage.
"""

from forebay.cluster.cli.startup import defer_imports

defer_imports()

from forebay.cluster.cli.app import main  # noqa: E402 - imports what is deferred

__all__ = ["main"]
