"""The entry that settles a command, and what a command weighs while it waits to be settled."""

from __future__ import annotations

from replica.messages.commands import Request, SubmitJob, UpdateJob, command_digest, kind_of
from replica.messages.entries import Entry
from replica.messages.events import Event
from replica.values.errors import Refusal, RefusalCode
from replica.values.limits import BATCH_BYTES_MAX

ENTRY_OVERHEAD_BYTES = 64
"""What an entry takes in a batch besides its own encoding, bytes, rounded up generously."""

ENTRIES_BYTES_MAX = BATCH_BYTES_MAX - 1024
"""The entries of one batch, bytes: what surrounds them (kind, base, instant) takes far less than the rest."""


def entry_of(request: Request, events: tuple[Event, ...] = (), refusal: Refusal | None = None) -> Entry:
    """Return the entry that settles `request` with these events, or with this refusal."""
    digest = command_digest(request) if request.id else b""
    return Entry(request.id, request.actor, kind_of(request.command), events, refusal, digest)


def entry_too_large(request: Request, size_bytes: int) -> Entry:
    """Return the entry that refuses `request`, whose own would have this size."""
    refusal = Refusal(
        RefusalCode.LIMIT_EXCEEDED,
        f"the command would take {size_bytes} bytes of the ledger; one entry has at most {ENTRIES_BYTES_MAX}",
        "send a smaller script, environment or set of directives",
    )
    return entry_of(request, refusal=refusal)


def weight_bytes(request: Request) -> int:
    """Return what a command takes while it waits, bytes: its texts, and something for the rest."""
    command = request.command
    if type(command) is UpdateJob:
        return ENTRY_OVERHEAD_BYTES + (0 if command.request is None else len(command.request.text))
    if type(command) is not SubmitJob:
        return ENTRY_OVERHEAD_BYTES
    spec = command.spec
    text = "" if command.request is None else command.request.text
    environment = sum(len(name) + len(value) for name, value in spec.environment)
    return ENTRY_OVERHEAD_BYTES + len(spec.script) + len(text) + environment
