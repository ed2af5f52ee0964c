"""Fold events of persistent buffers."""

from __future__ import annotations

from msgspec.structs import replace

from forebay.replica.messages import events as e
from forebay.replica.model import BufferInput, BufferState, IllegalTransition, PersistentBuffer, next_state
from forebay.replica.state import StateBuilder
from forebay.replica.values import Instant, LedgerViolation


def _find_persistent(builder: StateBuilder, name: str) -> PersistentBuffer:
    try:
        return builder.persistent[name]
    except KeyError:
        raise LedgerViolation(f"an event names the persistent buffer {name!r}, which does not exist") from None


def _next_state(builder: StateBuilder, name: str, buffer_input: BufferInput) -> BufferState:
    try:
        return next_state(_find_persistent(builder, name).state, buffer_input)
    except IllegalTransition as error:
        raise LedgerViolation(f"persistent buffer {name!r}: {error}") from None


def _fold_persistent_reserved(builder: StateBuilder, event: e.PersistentReserved) -> None:
    if event.name in builder.persistent:
        raise LedgerViolation(f"space was reserved for the persistent buffer {event.name!r}, which exists")
    at = Instant(builder.at)
    buffer = PersistentBuffer(
        name=event.name,
        user=event.user,
        gid=event.gid,
        pool=event.pool,
        granted_bytes=event.granted_bytes,
        access=event.access,
        type=event.kind,
        state=next_state(BufferState.PENDING, BufferInput.CREATION_STARTED),
        node=event.node,
        job=builder.job(event.job).id,
        created_at=at,
        changed_at=at,
        filesystem=event.filesystem,
        directory=event.directory,
    )
    builder.persistent = builder.persistent.set(event.name, buffer)
    builder.hold(event.pool, buffer.held_bytes)


def _fold_persistent_created(builder: StateBuilder, event: e.PersistentCreated) -> None:
    state = _next_state(builder, event.name, BufferInput.CREATED)
    buffer = replace(_find_persistent(builder, event.name), state=state, changed_at=Instant(builder.at))
    builder.persistent = builder.persistent.set(event.name, buffer)


def _fold_persistent_deletion_started(builder: StateBuilder, event: e.PersistentDeletionStarted) -> None:
    state = _next_state(builder, event.name, BufferInput.DELETION_STARTED)
    buffer = _find_persistent(builder, event.name)
    deleting = replace(buffer, state=state, job=event.job, hurry=event.hurry, changed_at=Instant(builder.at))
    builder.persistent = builder.persistent.set(event.name, deleting)


def _fold_persistent_deleted(builder: StateBuilder, event: e.PersistentDeleted) -> None:
    _next_state(builder, event.name, BufferInput.DELETED)
    buffer = _find_persistent(builder, event.name)
    builder.hold(buffer.pool, -buffer.held_bytes)
    builder.persistent = builder.persistent.delete(event.name)
