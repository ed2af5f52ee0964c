"""Handlers of pools, shared filesystems, and the site's configuration."""

from __future__ import annotations

from collections.abc import Iterable

from forebay.cluster.api import request_decoding
from forebay.cluster.api.render import capacity_controls, holders, pool_view
from forebay.cluster.api.service import ApiCall, CommandBody, Reply, handles
from forebay.cluster.api.web import bad_request, rejection_problem
from forebay.cluster.schemas import Command, FilesystemsAnswer, FilesystemView, PoolsAnswer, PoolView, made_of
from forebay.cluster.schemas import configuration as v
from forebay.cluster.schemas import operations as ops
from forebay.cluster.schemas import requests as r
from forebay.replica.decide import (
    configuration_events,
    configured_default_pool,
    differences,
    file_text,
    file_value,
    target_configuration,
)
from forebay.replica.grammar import KEYS, ConfSetting, SettingOwner
from forebay.replica.messages import commands as c
from forebay.replica.model import DEFAULT_SITE, FilesystemLayout, PoolUnit, parse_amount, parse_unit, pool_unit
from forebay.replica.state import State
from forebay.replica.values import Rejection, SizeError

ALL = "all"
"""In place of a size: the pool's whole capacity when the command is decided."""


@handles(ops.LIST_POOLS)
async def list_pools(call: ApiCall[None]) -> Reply[PoolsAnswer]:
    state = await call.state()
    return Reply(state.revision, PoolsAnswer(revision=state.revision, pools=_views(state)))


@handles(ops.SET_POOL)
async def set_pool(call: ApiCall[r.PoolRequest]) -> Reply[PoolView]:
    name = call.params["name"]
    return await _settle_change(call, request_decoding.set_pool(name, call.body), name)


@handles(ops.ADD_POOL)
async def add_pool(call: ApiCall[v.PoolAddRequest]) -> Reply[PoolView]:
    body = call.body
    unit = parse_unit(body.unit) or PoolUnit.BYTES
    command = c.ChangePool(
        call.params["name"],
        exists=False,
        quantity=_amount(body.quantity, unit, "quantity", zero=True),
        granularity=_amount(body.granularity, unit, "granularity"),
        is_default=body.default,
        unit=None if unit is PoolUnit.BYTES else unit,
        filesystem=body.filesystem,
    )
    return await _settle_change(call, command, command.pool)


@handles(ops.CHANGE_POOL)
async def change_pool(call: ApiCall[v.PoolChangeRequest]) -> Reply[PoolView]:
    body, name = call.body, call.params["name"]
    # A number without a unit counts the pool's current unit, or its new one from this command.
    unit = (None if body.unit is None else parse_unit(body.unit)) or pool_unit(
        (await call.service.current()).pools, name
    )
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
        filesystem=body.filesystem,
    )
    return await _settle_change(call, command, command.pool)


@handles(ops.REMOVE_POOL)
async def remove_pool(call: ApiCall[Command]) -> Reply[v.PoolRemovedAnswer]:
    name = call.params["name"]
    state = (await call.service.settle(call, c.RemovePool(name))).state
    return Reply(state.revision, v.PoolRemovedAnswer(revision=state.revision, removed=name, pools=_views(state)))


async def _settle_change(call: ApiCall[CommandBody], command: c.SetPool | c.ChangePool, name: str) -> Reply[PoolView]:
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, pool_view(state, name, holders(state).get(name, 0), capacity_controls(state)))


@handles(ops.LIST_FILESYSTEMS)
async def list_filesystems(call: ApiCall[None]) -> Reply[FilesystemsAnswer]:
    return _filesystems(await call.state())


@handles(ops.ADD_FILESYSTEM)
async def add_filesystem(call: ApiCall[v.FilesystemAddRequest]) -> Reply[FilesystemsAnswer]:
    body, layout = call.body, call.body.layout
    wanted = None if layout is None else made_of(layout, FilesystemLayout)
    command = c.AddFilesystem(call.params["name"], body.path, body.quota, wanted)
    return _filesystems((await call.service.settle(call, command)).state)


@handles(ops.REMOVE_FILESYSTEM)
async def remove_filesystem(call: ApiCall[Command]) -> Reply[FilesystemsAnswer]:
    return _filesystems((await call.service.settle(call, c.RemoveFilesystem(call.params["name"]))).state)


def _filesystems(state: State) -> Reply[FilesystemsAnswer]:
    views = []
    for name in sorted(state.filesystems):
        filesystem = state.filesystems[name]
        known = ((mover, state.nodes.get(mover)) for mover in filesystem.movers)
        up = tuple(mover for mover, node in known if node is not None and node.is_up)
        pools = tuple(pool for pool in sorted(state.pools) if state.pools[pool].filesystem == name)
        layout = filesystem.layout
        view = made_of(
            filesystem,
            FilesystemView,
            movers_up=up,
            pools=pools,
            layout=layout.adapter,
            stripe_count=layout.stripe_count,
            stripe_bytes=layout.stripe_bytes,
            stripe_pool=layout.pool,
            revision=state.revision,
        )
        views.append(view)
    return Reply(state.revision, FilesystemsAnswer(revision=state.revision, filesystems=tuple(views)))


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
        raise bad_request(
            error.sentence, error.remedy, f"{place} column {error.offset + 1}", "invalid_capacity"
        ) from error


# ---- the configuration: show, compare with a file, and replace in one entry


@handles(ops.SHOW_CONFIGURATION)
async def show_configuration(call: ApiCall[None]) -> Reply[v.ConfigurationAnswer]:
    state = await call.state()
    return Reply(state.revision, _configuration(state))


@handles(ops.COMPARE_CONFIGURATION)
async def compare_configuration(call: ApiCall[v.CompareRequest]) -> Reply[v.CompareAnswer]:
    state = await call.service.current()
    settings, body = _settings(call.body.settings), call.body
    # The command uses the same function, so the dry run is exact.
    events = configuration_events(state, settings, partial=body.partial, expected_revision=body.expect_revision)
    wanted = target_configuration(state, settings, partial=body.partial)
    if isinstance(events, Rejection):
        raise rejection_problem(events)
    if isinstance(wanted, Rejection):
        raise rejection_problem(wanted)
    answer = made_of(
        state,
        v.CompareAnswer,
        changed_revision=state.site.revision,
        differences=tuple(made_of(row, v.DifferenceView) for row in differences(state, wanted)),
    )
    return Reply(state.revision, answer)


@handles(ops.CONFIGURE_SITE)
async def configure_site(call: ApiCall[v.ConfigureRequest]) -> Reply[v.ConfigurationAnswer]:
    body = call.body
    command = c.ConfigureSite(_settings(body.settings), body.partial, body.expect_revision)
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, _configuration(state))


def _settings(bodies: Iterable[v.SettingBody]) -> tuple[ConfSetting, ...]:
    return tuple(made_of(body, ConfSetting) for body in bodies)


def _configuration(state: State) -> v.ConfigurationAnswer:
    rows = []
    for key in KEYS:
        if key.owner is SettingOwner.FLAG:
            continue
        value = file_value(key, state.site, state.transfer_rules, state.scheduling_rules)
        rows.append(
            v.SettingView(
                key=key.name,
                value=configured_default_pool(state) if key.field == "default_pool" else value,
                default=file_value(key, DEFAULT_SITE),
                slurm=key.is_slurm,
                about=key.about,
            )
        )
    return v.ConfigurationAnswer(
        revision=state.revision,
        changed_revision=state.site.revision,
        settings=tuple(rows),
        text=file_text(state),
        burst_buffer_conf=file_text(state, slurm_only=True),
    )
