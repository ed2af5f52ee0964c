"""Bugs to plant beside those of plain jobs: see `bugs`."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from forebay.replica.model.buffers import PersistentBuffer
from forebay.replica.scheduler import persistent


def persistent_space_not_counted() -> list[Any]:
    """What a persistent buffer holds is taken for free (law 8)."""
    return [patch.object(PersistentBuffer, "held_bytes", property(lambda self: 0))]


def destroyed_while_used() -> list[Any]:
    """A persistent buffer is removed although jobs work with it."""
    original = persistent._missing_name

    def blind(*given: Any) -> str:
        sentence = original(*given)
        return "" if " is in use by " in sentence else sentence

    return [patch.object(persistent, "_waits_for_names", blind)]


PLANTS_OF_WHOLE = (persistent_space_not_counted, destroyed_while_used)
