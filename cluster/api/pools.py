"""Pools: listed with what is free, and changed while they are in use."""

from __future__ import annotations

from cluster.api import wire
from cluster.api.render import capacity_controls, holders, pool_view
from cluster.api.service import AskedCommand, Call, Reply, handles
from cluster.api.web import bad
from cluster.schemas import Command, PoolsAnswer, PoolView
from cluster.schemas import configuration as v
from cluster.schemas import operations as ops
from cluster.schemas import requests as r
from replica.messages import commands as c
from replica.model import PoolUnit, parse_amount, unit_in, unit_of
from replica.state import State
from replica.values import SizeError

ALL = "all"
"""Instead of a size: everything that the pool has when the command is decided."""


@handles(ops.LIST_POOLS)
async def list_pools(call: Call[None]) -> Reply[PoolsAnswer]:
    state = await call.state()
    return Reply(state.revision, PoolsAnswer(revision=state.revision, pools=_views(state)))


@handles(ops.SET_POOL)
async def set_pool(call: Call[r.PoolRequest]) -> Reply[PoolView]:
    name = call.params["name"]
    return await _changed(call, wire.set_pool(name, call.body), name)


@handles(ops.ADD_POOL)
async def add_pool(call: Call[v.PoolAddRequest]) -> Reply[PoolView]:
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
    return await _changed(call, command, command.pool)


@handles(ops.CHANGE_POOL)
async def change_pool(call: Call[v.PoolChangeRequest]) -> Reply[PoolView]:
    body, name = call.body, call.params["name"]
    # What a number counts is the pool's present unit, or the one that it gets with this very command.
    unit = (None if body.unit is None else unit_of(body.unit)) or unit_in((await call.service.current()).pools, name)
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
    return await _changed(call, command, command.pool)


@handles(ops.REMOVE_POOL)
async def remove_pool(call: Call[Command]) -> Reply[v.PoolRemovedAnswer]:
    name = call.params["name"]
    state = (await call.service.settle(call, c.RemovePool(name))).state
    return Reply(state.revision, v.PoolRemovedAnswer(revision=state.revision, removed=name, pools=_views(state)))


async def _changed(call: Call[AskedCommand], command: c.SetPool | c.ChangePool, name: str) -> Reply[PoolView]:
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, pool_view(state, name, holders(state).get(name, 0), capacity_controls(state)))


def _views(state: State) -> tuple[PoolView, ...]:
    counts, controls = holders(state), capacity_controls(state)
    return tuple(pool_view(state, name, counts.get(name, 0), controls) for name in sorted(state.pools))


def _amount(text: str | None, unit: PoolUnit, place: str, *, zero: bool = False) -> int | None:
    if text is None:
        return None
    if zero and text == "0":
        return 0
    try:
        return parse_amount(text, unit)
    except SizeError as error:
        raise bad(error.sentence, error.remedy, f"{place} column {error.offset + 1}", "invalid_capacity") from error
