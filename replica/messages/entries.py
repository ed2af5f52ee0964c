"""Contents of Raft entries, and the base revision that makes competing leaders harmless (laws 1, 4, 6)."""

from __future__ import annotations

import msgspec

from replica.messages import events as e
from replica.messages.commands import CONTROLLER, Actor
from replica.messages.events import Event
from replica.values import Instant, Refusal, Revision


class Entry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A settled command: its events or its rejection. Settling a command advances the revision by one."""

    id: bytes
    """The client-made command id, 16 bytes; empty for the controller's own commands, which are never retried."""
    actor: Actor
    command: str
    """The command's name, for example `submit_job`."""
    events: tuple[Event, ...]
    refusal: Refusal | None = None
    digest: bytes = b""
    """Digest of actor and command (`commands.command_digest`): what a retry with the same id must repeat, and what
    proves a command that an audit makes again from its events. Empty where a command says nothing but its name."""


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The events of many commands. `base` is the revision that it was decided on, `at` the leader's clock."""

    base: Revision
    at: Instant
    entries: tuple[Entry, ...]


class CachedReply(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The first answer to a command id. `job` is the job it made or concerned, 0 for none."""

    revision: Revision
    job: int
    refusal: Refusal | None
    digest: bytes = b""
    """Of the command that was settled; another command with the same id is refused, not taken for a retry."""
    actor: Actor = CONTROLLER
    """Sender of the command, whose share of cached replies it counts against."""


class Session(msgspec.Struct, frozen=True, gc=False):
    """A program's session, numbered by the revision at which it was opened."""

    number: int
    actor: Actor
    opened_at: Instant
    used_at: Instant
    """When its last command was settled, to SESSION_USE_STEP_S."""
    acknowledged: int = 0
    """Its program has every answer up to this sequence number; they are forgotten."""
    newest: int = 0
    """The highest sequence number that was settled."""
    answers: int = 0
    """Answers that are kept: of numbers above `acknowledged`, up to `newest`."""


# ---- what deciding a request leads to: events, or a refusal


class Accepted(msgspec.Struct, frozen=True):
    """A request that is carried out: what happens because of it, possibly nothing."""

    events: tuple[e.Event, ...]


Decision = Accepted | Refusal

NOTHING = Accepted(())
"""A request that is carried out, and changes nothing."""


def decision_of(events: tuple[e.Event, ...] | Refusal) -> Decision:
    """Return what these events, or this refusal, are as a decision."""
    return events if isinstance(events, Refusal) else Accepted(events)
