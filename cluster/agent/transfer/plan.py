"""What a transfer is to move: items, each from one place to another."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from cluster.agent.files import Identity, Target


class Kind(Enum):
    """What an item is."""

    FILE = "file"
    DIRECTORY = "directory"


class Item(NamedTuple):
    """One thing to move. The anchors of the targets stay the caller's, are never closed here, and may be shared."""

    kind: Kind
    source: Target
    destination: Target
    source_barred: Identity | None = None
    """A directory that must not be met on the source's side: the agent's own."""
    destination_barred: Identity | None = None
    staging: int = -1
    """The open directory, on the destination's file system, that temporary files are made in, and that a newer attempt
    takes away (cluster.agent.transfer.fence); -1: they are made beside the destination."""
    backend: str = "native"
    """What moves it (cluster.agent.transfer.backends)."""
    move: bool = False
    """Whether its sources are removed: each only when everything is durable at the destination, and unchanged since."""
