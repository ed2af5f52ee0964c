"""The site's configuration: showing it, comparing a file with it, and changing all of it in one entry."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.api.service import Call, Reply, handles
from cluster.api.web import refused
from cluster.schemas import configuration as v
from cluster.schemas import made_of
from cluster.schemas import operations as ops
from replica.decide import (
    configuration_events,
    differences,
    file_text,
    shown_default_pool,
    wanted_of,
    written_value,
)
from replica.grammar import KEYS, Owner, Setting
from replica.messages import ConfigureSite
from replica.model import DEFAULT_SITE
from replica.state import State
from replica.values import Refusal


@handles(ops.SHOW_CONFIGURATION)
async def show_configuration(call: Call[None]) -> Reply[v.ConfigurationAnswer]:
    state = await call.state()
    return Reply(state.revision, _answer(state))


@handles(ops.COMPARE_CONFIGURATION)
async def compare_configuration(call: Call[v.CompareRequest]) -> Reply[v.CompareAnswer]:
    state = await call.service.current()
    settings, body = _settings(call.body.settings), call.body
    # The same function that decides the command, so that a dry run promises nothing else than what would happen.
    events = configuration_events(state, settings, partial=body.partial, expected_revision=body.expect_revision)
    wanted = wanted_of(state, settings, partial=body.partial)
    if isinstance(events, Refusal):
        raise refused(events)
    if isinstance(wanted, Refusal):
        raise refused(wanted)
    answer = made_of(
        state,
        v.CompareAnswer,
        changed_revision=state.site.revision,
        differences=tuple(made_of(row, v.DifferenceView) for row in differences(state, wanted)),
    )
    return Reply(state.revision, answer)


@handles(ops.CONFIGURE_SITE)
async def configure_site(call: Call[v.ConfigureRequest]) -> Reply[v.ConfigurationAnswer]:
    body = call.body
    command = ConfigureSite(_settings(body.settings), body.partial, body.expect_revision)
    state = (await call.service.settle(call, command)).state
    return Reply(state.revision, _answer(state))


def _settings(bodies: Iterable[v.SettingBody]) -> tuple[Setting, ...]:
    return tuple(made_of(body, Setting) for body in bodies)


def _answer(state: State) -> v.ConfigurationAnswer:
    rows = []
    for key in KEYS:
        if key.owner is Owner.FLAG:
            continue
        value = written_value(key, state.site, state.transfer_rules)
        rows.append(
            v.SettingView(
                key=key.name,
                value=shown_default_pool(state) if key.field == "default_pool" else value,
                default=written_value(key, DEFAULT_SITE),
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
