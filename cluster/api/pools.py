"""Pools while they are in use: add, change what is named, remove."""

from __future__ import annotations

from cluster.api.problems import bad
from cluster.api.render import holders, pool_view
from cluster.api.service import Call, Reply
from cluster.schemas.configuration import PoolRemovedAnswer
from replica.decide.pools import unit_in
from replica.messages import commands as c
from replica.model.pools import PoolUnit, parse_amount, unit_of
from replica.state.state import State
from replica.values.units import SizeError

ALL = "all"
"""Instead of a size: everything that the pool has when the command is decided."""


async def add(call: Call) -> Reply:
    """Make a pool that is not there."""
    body = call.body
    unit = unit_of(body.unit) or PoolUnit.BYTES
    command = c.ChangePool(
        call.params["name"],
        exists=False,
        quantity=_amount(body.quantity, unit, "quantity", zero=True),
        granularity=_amount(body.granularity, unit, "granularity"),
        is_default=body.default,
        unit=None if unit is PoolUnit.BYTES else unit,
    )
    return await _changed(call, command)


async def change(call: Call) -> Reply:
    """Change what is named of a pool, whoever uses it; nothing is taken from who holds a part of it."""
    body, name = call.body, call.params["name"]
    # What a number counts is the pool's present unit, or the one that it gets with this very command.
    unit = (None if body.unit is None else unit_of(body.unit)) or unit_in(await call.service.current(), name)
    command = c.ChangePool(
        name,
        quantity=_amount(body.quantity, unit, "quantity", zero=True),
        granularity=_amount(body.granularity, unit, "granularity"),
        out_of_service=None
        if body.out_of_service == ALL
        else _amount(body.out_of_service, unit, "out_of_service", zero=True),
        drain_all=body.out_of_service == ALL,
        is_default=body.default,
        unit=None if body.unit is None else unit,
    )
    return await _changed(call, command)


async def remove(call: Call) -> Reply:
    """Remove a pool that nobody holds a part of or waits for; else refused with who does."""
    name = call.params["name"]
    settled = await call.service.settle(call, c.RemovePool(name))
    state = settled.state
    counts = holders(state)
    rows = tuple(pool_view(state, left, counts.get(left, 0)) for left in sorted(state.pools))
    return Reply(state.revision, PoolRemovedAnswer(revision=state.revision, removed=name, pools=rows))


async def _changed(call: Call, command: c.ChangePool) -> Reply:
    settled = await call.service.settle(call, command)
    return Reply(settled.state.revision, _view(settled.state, command.pool))


def _view(state: State, name: str) -> object:
    return pool_view(state, name, holders(state).get(name, 0))


def _amount(text: str | None, unit: PoolUnit, place: str, *, zero: bool = False) -> int | None:
    if text is None:
        return None
    if zero and text == "0":
        return 0
    try:
        return parse_amount(text, unit)
    except SizeError as error:
        raise bad(error.sentence, error.remedy, f"{place} column {error.offset + 1}", "invalid_capacity") from error
