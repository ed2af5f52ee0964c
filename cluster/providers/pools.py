"""The pools that a provider reports, read from its JSON."""

from __future__ import annotations

import msgspec

from cluster.providers.interface import OperationError, PoolReport
from replica.values import POOLS_MAX, SIZE_BYTES_MAX, name_fault


class _Row(msgspec.Struct):
    id: str
    quantity: int
    granularity: int = 1
    units: str = ""
    free: int | None = None


class _Pools(msgspec.Struct):
    pools: list[_Row]


def parse_pools(text: bytes, *, operation: str, bytes_by_default: bool) -> tuple[PoolReport, ...]:
    """Return the pools of `{"pools": [{"id": …, "quantity": …, "granularity": …}]}`; keys not known are ignored.

    `quantity` counts grains. OperationError says what is wrong with it.
    """
    try:
        rows = msgspec.json.decode(text, type=_Pools).pools
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OperationError(operation, f"the pools are not the JSON that is expected: {error}") from error
    if len(rows) > POOLS_MAX:
        raise OperationError(operation, f"there are {len(rows)} pools; at most {POOLS_MAX} are possible")
    found: dict[str, PoolReport] = {}
    for row in rows:
        fault = name_fault(row.id)
        if fault is not None:
            raise OperationError(operation, f"the id of a pool {fault}")
        if row.id in found:
            raise OperationError(operation, f"the pool {row.id} is there twice")
        if row.quantity < 0 or row.granularity < 1 or row.quantity * row.granularity > SIZE_BYTES_MAX:
            raise OperationError(
                operation, f"the pool {row.id} has quantity {row.quantity} and granularity {row.granularity}"
            )
        found[row.id] = PoolReport(
            name=row.id,
            quantity=row.quantity,
            granularity=row.granularity,
            is_bytes=bytes_by_default if not row.units else row.units == "bytes",
            free=row.free,
        )
    return tuple(found.values())
