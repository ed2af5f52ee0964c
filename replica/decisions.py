"""What deciding a request leads to: events, or a refusal."""

from __future__ import annotations

import msgspec

from replica import events as e
from replica.values.errors import Refusal


class Accepted(msgspec.Struct, frozen=True):
    """A request that is carried out: what happens because of it, possibly nothing."""

    events: tuple[e.Event, ...]


Decision = Accepted | Refusal

NOTHING = Accepted(())
"""A request that is carried out, and changes nothing."""


def accepted(events: tuple[e.Event, ...] | Refusal) -> Decision:
    """Return what these events, or this refusal, are as a decision."""
    return events if isinstance(events, Refusal) else Accepted(events)
