"""Decide changes of pools and shared filesystems: add, resize, drain, change granularity, unit or default, remove.

Pools may change while they are in use, and no holder ever loses space. A pool that shrinks below its usage has no free
space until enough is released (`overcommitted_bytes`). A new granularity applies to later requests only.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from msgspec.structs import replace

from forebay.replica.decide.checks import names_remedy
from forebay.replica.messages import events as e
from forebay.replica.model import ObservedFilesystem, Pool, PoolUnit, format_amount, pool_unit
from forebay.replica.state import Facts, State
from forebay.replica.values import (
    MESSAGE_CHARACTERS_MAX,
    MOVERS_PER_FILESYSTEM_MAX,
    NAME_CHARACTERS_MAX,
    POOLS_MAX,
    SIZE_BYTES_MAX,
    Rejection,
    RejectionCode,
    name_fault,
)

USERS_NAMED_MAX = 8
"""Number of a pool's users named when its removal is rejected; the others are counted."""


def overcommitted_bytes(pool: Pool, held_bytes: int) -> int:
    """Return by how much the held space exceeds the space in service; this must be released before any is free."""
    return max(0, held_bytes - pool.usable_bytes)


def pool_rejection(pool: Pool, filesystems: Container[str] = ()) -> Rejection | None:
    """Return the rejection of an invalid pool record, or None. `filesystems` are the existing shared filesystems."""
    fault = name_fault(pool.name)
    if fault is not None:
        return Rejection(RejectionCode.INVALID_FIELD, f"the pool name {fault}", "choose another name", "pool.name")
    if pool.granularity_bytes <= 0:
        return Rejection(
            RejectionCode.INVALID_FIELD,
            f"granularity is {pool.granularity_bytes}",
            "use at least 1 byte",
            "pool.granularity",
        )
    if pool.quantity_bytes < 0 or pool.out_of_service_bytes < 0:
        return Rejection(RejectionCode.INVALID_FIELD, "quantity is negative", "use 0 or more bytes", "pool.quantity")
    if max(pool.quantity_bytes, pool.granularity_bytes, pool.out_of_service_bytes) > SIZE_BYTES_MAX:
        return Rejection(
            RejectionCode.INVALID_FIELD,
            "a size of pool {pool.name} is too large",
            f"use at most {SIZE_BYTES_MAX}",
            "pool.quantity",
        )
    if pool.filesystem and pool.filesystem not in filesystems:
        shown = pool.filesystem[:NAME_CHARACTERS_MAX]
        sentence = f"shared filesystem {shown!r} of pool {pool.name} does not exist"
        return Rejection(
            RejectionCode.INVALID_FIELD,
            sentence,
            "`forebay pool filesystem list` shows the shared filesystems",
            "pool.filesystem",
        )
    if pool.filesystem and pool.unit is not PoolUnit.BYTES:
        sentence = f"pool {pool.name} counts {pool.unit.word}, but a shared filesystem holds bytes"
        return Rejection(
            RejectionCode.INVALID_FIELD,
            sentence,
            "omit the shared filesystem, or let the pool count bytes",
            "pool.filesystem",
        )
    return None


def set_pool_events(state: Facts, pool: Pool, unit: PoolUnit | None = None) -> tuple[e.Event, ...]:
    """Return the events that create or change `pool` and keep at most one default pool; none if nothing changes.

    A new pool that the configuration already names as the default becomes the default. Making another pool the default
    removes that name from the configuration. `unit` None keeps the unit.
    """
    awaited, known = state.site.default_pool, state.pools.get(pool.name)
    if unit is None:
        unit = pool_unit(state.pools, pool.name)
    pool = replace(
        pool,
        unit=unit,
        is_default=pool.is_default or (known is None and awaited == pool.name),
        is_reported=pool.is_reported or (known is not None and known.is_reported),
    )
    becomes_default = pool.is_default and not (known is not None and known.is_default)
    events: list[e.Event] = _clear_other_default(state, pool.name) if pool.is_default else []
    if known != pool:
        events.append(e.PoolSet(pool))
    if awaited and becomes_default:
        events.append(e.SiteConfigured(replace(state.site, default_pool="", revision=0)))
    return tuple(events)


def _clear_other_default(state: Facts, name: str) -> list[e.Event]:
    others = (pool for other, pool in sorted(state.pools.items()) if other != name and pool.is_default)
    return [e.PoolSet(replace(pool, is_default=False)) for pool in others]


def default_pool_events(state: Facts, name: str) -> tuple[e.Event, ...]:
    """Return the events that make the pool `name` the default; none if it is.

    Raises:
        KeyError: The pool does not exist.
    """
    pool = state.pools[name]
    if pool.is_default:
        return ()
    return (*_clear_other_default(state, name), e.PoolSet(replace(pool, is_default=True)))


def change_pool(
    state: State,
    name: str,
    *,
    exists: bool,
    quantity: int | None,
    granularity: int | None,
    out_of_service: int | None,
    is_default: bool | None,
    unit: PoolUnit | None,
    drain_all: bool = False,
    is_reported: bool = False,
    filesystem: str | None = None,
) -> tuple[e.Event, ...] | Rejection:
    """Return the events that create a pool (`exists` is false), or change those of its fields that are not None."""
    known = state.pools.get(name)
    if exists and known is None:
        return unknown_pool_rejection(state, name)
    if not exists and known is not None:
        return Rejection(
            RejectionCode.WRONG_STATE,
            f"pool {name!r} already exists",
            "resize it with `forebay pool set`, or choose another name",
            "pool.name",
        )
    if known is None:
        if quantity is None:
            return Rejection(
                RejectionCode.INVALID_FIELD, "pool {name!r} has no quantity", "specify its quantity", "pool.quantity"
            )
        if len(state.pools) >= POOLS_MAX:
            return Rejection(
                RejectionCode.LIMIT_EXCEEDED,
                f"the limit of {POOLS_MAX} pools is reached",
                "change an existing pool",
                "pool.name",
            )
        known = Pool(name, quantity, state.site.granularity)
    pool = replace(
        known,
        quantity_bytes=known.quantity_bytes if quantity is None else quantity,
        granularity_bytes=known.granularity_bytes if granularity is None else granularity,
        out_of_service_bytes=known.out_of_service_bytes if out_of_service is None else out_of_service,
        is_default=known.is_default if is_default is None else is_default,
        is_reported=known.is_reported or is_reported,
        filesystem=known.filesystem if filesystem is None else filesystem,
    )
    if drain_all:
        pool = replace(pool, out_of_service_bytes=pool.quantity_bytes)
    rejection = pool_rejection(pool if unit is None else replace(pool, unit=unit), state.filesystems)
    if rejection is None and exists and pool.filesystem != known.filesystem:
        rejection = _in_use_rejection(state, name, "its shared filesystem cannot be changed", "pool.filesystem")
    if rejection is None and unit is not None and unit != pool_unit(state.pools, name):
        rejection = _in_use_rejection(state, name, "its unit cannot be changed", "pool.unit")
    return set_pool_events(state, pool, unit) if rejection is None else rejection


def remove_pool(state: State, name: str) -> tuple[e.Event, ...] | Rejection:
    """Return the events that remove a pool, or a Rejection while a job or persistent buffer needs its space."""
    if name not in state.pools:
        return unknown_pool_rejection(state, name)
    rejection = _in_use_rejection(state, name, "it cannot be removed", "pool.name")
    if rejection is not None:
        return rejection
    return (e.PoolRemoved(name),)


def unknown_pool_rejection(state: Facts, name: str) -> Rejection:
    """Build the rejection of a command about a pool that does not exist."""
    remedy = names_remedy(state.pools, "create one with `forebay pool create`")
    return Rejection(
        RejectionCode.UNKNOWN_POOL,
        f"pool {name!r} does not exist",
        remedy[:MESSAGE_CHARACTERS_MAX],
        "pool.name",
    )


def _in_use_rejection(state: State, name: str, therefore: str, place: str) -> Rejection | None:
    users = list(pool_users(state, name))
    if not users:
        return None
    more = f" and {len(users) - USERS_NAMED_MAX} more" if len(users) > USERS_NAMED_MAX else ""
    return Rejection(
        RejectionCode.WRONG_STATE,
        f"pool {name!r} is in use, so {therefore}: {'; '.join(users[:USERS_NAMED_MAX])}{more}",
        "drain it with `forebay pool drain`, wait until its space is released, and cancel jobs that wait for it",
        place,
    )


def pool_users(state: State, name: str) -> Iterator[str]:
    """Yield a description of each buffer, reservation and job that holds, waits for or will request space of a pool."""
    unit = pool_unit(state.pools, name)
    is_default = name in state.pools and state.pools[name].is_default
    for persistent in sorted(state.persistent):
        buffer = state.persistent[persistent]
        if buffer.pool == name:
            yield f"persistent buffer {persistent} of {buffer.user} holds {format_amount(buffer.granted_bytes, unit)}"
    for named in sorted(state.reservations):
        size = state.reservations[named].size_in(name)
        if size:
            yield f"reservation {named} reserves {format_amount(size, unit)}"
    for job_id in sorted(state.unfinished):
        job_buffer, request = state.buffers.get(job_id), state.jobs[job_id].request
        if job_buffer is not None and job_buffer.pool == name:
            verb = "holds" if job_buffer.held_bytes else "waits for"
            yield f"job {job_id} of {request.user} {verb} {format_amount(job_buffer.granted_bytes, unit)}"
            continue
        if request.buffer is None:
            continue
        creates = [
            asked.name for asked in request.buffer.creates if asked.pool == name or (is_default and not asked.pool)
        ]
        if creates and not set(creates) <= set(state.persistent):
            yield f"job {job_id} of {request.user} will create {', '.join(creates)} there"


# ---- shared filesystems


def filesystem_removal_rejection(state: Facts, name: str) -> Rejection | None:
    """Return the rejection of removing a shared filesystem, or None."""
    if name not in state.filesystems:
        return _unknown_filesystem_rejection(state, name, "filesystem.name")
    pools = sorted(pool.name for pool in state.pools.values() if pool.filesystem == name)
    if pools:
        sentence = f"shared filesystem {name} is in use by pool {', '.join(pools)}"
        remedy = "remove these pools, or change their shared filesystem with `forebay pool set`"
        return Rejection(RejectionCode.WRONG_STATE, sentence[:MESSAGE_CHARACTERS_MAX], remedy, "filesystem.name")
    for mover in state.filesystems[name].movers:
        for job_id in state.on_node.get(mover, ()):
            buffer = state.buffers.get(job_id)
            if buffer is not None and name in buffer.filesystems:
                sentence = f"shared filesystem {name} is in use by the buffer of job {job_id}"
                return Rejection(
                    RejectionCode.WRONG_STATE, sentence, "wait until the buffer is removed", "filesystem.name"
                )
    return None


def mover_rejection(state: Facts, node: str, seen: tuple[ObservedFilesystem, ...]) -> Rejection | None:
    """Return the rejection of a node as mover of the shared filesystems that it found mounted, or None."""
    names = [found.name for found in seen]
    if len(names) != len(set(names)):
        return Rejection(
            RejectionCode.INVALID_FIELD, "a shared filesystem is named twice", "name each once", "filesystems"
        )
    for found in seen:
        filesystem = state.filesystems.get(found.name)
        if filesystem is None:
            return _unknown_filesystem_rejection(state, found.name, "filesystems")
        fault = name_fault(found.identity)
        if fault is not None:
            return Rejection(
                RejectionCode.INVALID_FIELD,
                f"the identity of {filesystem.name} {fault}",
                "send the identity that the mount has",
                "filesystems",
            )
        if filesystem.identity and found.identity != filesystem.identity:
            sentence = f"node {node} has a file system other than {filesystem.name} mounted at {filesystem.path}"
            return Rejection(
                RejectionCode.STORAGE_CHANGED,
                sentence,
                f"mount shared filesystem {filesystem.name} on {node}",
                "filesystems",
            )
        if node not in filesystem.movers and len(filesystem.movers) >= MOVERS_PER_FILESYSTEM_MAX:
            sentence = f"shared filesystem {filesystem.name} has the maximum of {MOVERS_PER_FILESYSTEM_MAX} movers"
            return Rejection(RejectionCode.LIMIT_EXCEEDED, sentence, "use an existing mover", "filesystems")
    return None


def _unknown_filesystem_rejection(state: Facts, name: str, field: str) -> Rejection:
    remedy = names_remedy(state.filesystems, "add one with `forebay pool filesystem add`")
    sentence = f"shared filesystem {name[:NAME_CHARACTERS_MAX]!r} does not exist"
    return Rejection(RejectionCode.INVALID_FIELD, sentence, remedy[:MESSAGE_CHARACTERS_MAX], field)
