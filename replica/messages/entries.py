"""Contents of Raft entries, and the base revision that makes competing leaders harmless (laws 1, 4, 6)."""

from __future__ import annotations

import msgspec

from forebay.replica.messages import events as e
from forebay.replica.messages.commands import CONTROLLER, Actor
from forebay.replica.messages.events import Event
from forebay.replica.values import Instant, Rejection, Revision


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled command: its events or its rejection. Each entry advances the revision by one."""

    id: bytes
    """Client-made command ID, 16 bytes; empty for the controller's own commands, which are never retried."""
    actor: Actor
    command: str
    """Name of the command, for example `submit_job`."""
    events: tuple[Event, ...]
    rejection: Rejection | None = None
    digest: bytes = b""
    """Digest of actor and command (`commands.command_digest`); empty for commands without fields.

    A retry with the same ID must have the same digest. An audit that rebuilds the command from its events compares it.
    """


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Entries that were decided together, on revision `base` at the leader's time `at`."""

    base: Revision
    at: Instant
    entries: tuple[Entry, ...]


class CachedReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Cached reply to a settled command, for retries with the same command ID."""

    revision: Revision
    job: int
    """Job that the command created or concerned; 0: none."""
    rejection: Rejection | None
    digest: bytes = b""
    """Digest of the command. A command with the same ID and another digest is rejected, because it is no retry."""
    actor: Actor = CONTROLLER
    """Sender of the command, whose limit of cached replies it counts toward."""


class Session(msgspec.Struct, frozen=True, gc=False):
    """Session of a program that sends many commands, each with a sequence number."""

    number: int
    """Revision at which the session was opened."""
    actor: Actor
    opened_at: Instant
    used_at: Instant
    """Time at which the last command was settled, rounded to SESSION_USE_STEP_S."""
    acknowledged: int = 0
    """Highest sequence number up to which the program has all replies; these are no longer cached."""
    newest: int = 0
    """Highest settled sequence number."""
    answers: int = 0
    """Number of cached replies, with sequence numbers above `acknowledged` up to `newest`."""


# ---- decisions: events, or a rejection


class Acceptance(msgspec.Struct, frozen=True):
    """Accepted command with its events, possibly none."""

    events: tuple[e.Event, ...]


Decision = Acceptance | Rejection

NOTHING = Acceptance(())
"""Accepted command that changes nothing."""


def decision_of(events: tuple[e.Event, ...] | Rejection) -> Decision:
    """Wrap events as a decision; return a rejection unchanged."""
    return events if isinstance(events, Rejection) else Acceptance(events)
