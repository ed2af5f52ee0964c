"""The command line `forebay`: what people and scripts type.

It runs on any machine that has the configuration and a certificate, so it imports neither consensus nor storage.
"""

from cluster.cli.app import main

__all__ = ["main"]
