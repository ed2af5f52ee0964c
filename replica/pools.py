"""Pools: named capacity with a granularity. Free capacity is derived, never stored (law 8)."""

from __future__ import annotations

import msgspec


class Pool(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One pool. `quantity_bytes` is what it has in all, `out_of_service_bytes` what an operator has taken away for
    now.
    """

    name: str
    quantity_bytes: int
    granularity_bytes: int
    is_default: bool = False
    out_of_service_bytes: int = 0

    @property
    def usable_bytes(self) -> int:
        """The most that one request could ever get: whole grains of what is in service."""
        in_service = max(0, self.quantity_bytes - self.out_of_service_bytes)
        return in_service // self.granularity_bytes * self.granularity_bytes


def free_bytes(pool: Pool, held_bytes: int) -> int:
    """Return total - held - out of service, and 0 where the pool shrank below what is in use."""
    return max(0, pool.usable_bytes - held_bytes)
