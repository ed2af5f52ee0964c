"""What accounts, their users and QOS have used of burst buffers: space times the time that it was held.

It is what `GrpBBMinutes` limits, with what is held now counted up to its time limits, so that nobody has to be ended
when the limit is reached (Slurm: AccountingStorageEnforce=safe). It grows when a buffer gives back its space, and is
kept until an operator resets it: as in Slurm with PriorityDecayHalfLife=0 and PriorityUsageResetPeriod=NONE.
"""

from __future__ import annotations

from collections.abc import Iterator

import immutables

from replica.buffers import Buffer
from replica.use import SECONDS_PER_MINUTE, Standing
from replica.values.limits import CONSUMED_MAX
from replica.values.units import MICROSECONDS_PER_SECOND, SIZE_BYTES_MAX

Consumed = immutables.Map[str, int]
"""What is named by `consumed_key` -> bytes (units of the pool) times minutes; SIZE_BYTES_MAX is as good as for ever."""

MICROSECONDS_PER_MINUTE = SECONDS_PER_MINUTE * MICROSECONDS_PER_SECOND


def consumed_key(whose: str, name: str, user: str, pool: str) -> str:
    """Return the key of what an account (`a`), or a QOS (`q`), used; empty: of all users, in all pools. No name has a
    slash.
    """
    return f"{whose}/{name}/{user}/{pool}"


def keys_of(standing: Standing, pool: str) -> Iterator[str]:
    """Yield what a buffer of a job counts for."""
    for name in (pool, ""):
        if standing.account:
            yield consumed_key("a", standing.account, "", name)
            yield consumed_key("a", standing.account, standing.user, name)
        if standing.qos:
            yield consumed_key("q", standing.qos, "", name)


def with_given_back(consumed: Consumed, standing: Standing, buffer: Buffer, at: int) -> Consumed:
    """Return the records after a buffer that was held until `at` has given back its space."""
    held_us = max(0, at - buffer.created_at)
    minutes = buffer.held_bytes * held_us // MICROSECONDS_PER_MINUTE
    if not minutes:
        return consumed
    for key in keys_of(standing, buffer.pool):
        used = consumed.get(key)
        if used is not None or len(consumed) < CONSUMED_MAX:
            consumed = consumed.set(key, min(SIZE_BYTES_MAX, (used or 0) + minutes))
    return consumed


def without(consumed: Consumed, whose: str, name: str) -> Consumed:
    """Return the records without those of one account or QOS."""
    prefix = f"{whose}/{name}/"
    for key in [key for key in consumed if key.startswith(prefix)]:
        consumed = consumed.delete(key)
    return consumed
