"""The site's configuration: showing it, comparing a file with it, and changing all of it in one entry."""

from __future__ import annotations

from collections.abc import Iterable

from cluster.api.service import Call, Reply
from cluster.api.web import refused
from cluster.schemas import CompareAnswer, ConfigurationAnswer, DifferenceView, SettingBody, SettingView
from replica.decide import (
    DEFAULT_POLICY,
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
from replica.operations import rules_of
from replica.state import State
from replica.values import Refusal


async def show(call: Call) -> Reply:
    """Show the configuration of the site, with what is as by default."""
    state = await call.state()
    return Reply(state.revision, _answer(state))


async def diff(call: Call) -> Reply:
    """Show what a change of the configuration would do, or why it would be refused; nothing is changed."""
    state = await call.service.current()
    settings, body = _settings(call.body.settings), call.body
    # The same function that decides the command, so that a dry run promises nothing else than what would happen.
    events = configuration_events(state, settings, partial=body.partial, expected_revision=body.expect_revision)
    wanted = wanted_of(state, settings, partial=body.partial)
    if isinstance(events, Refusal):
        raise refused(events)
    if isinstance(wanted, Refusal):
        raise refused(wanted)
    rows = tuple(DifferenceView(key=row.key, before=row.before, after=row.after) for row in differences(state, wanted))
    answer = CompareAnswer(
        revision=state.revision,
        changed_revision=state.site.revision,
        feature_level=state.feature_level,
        differences=rows,
    )
    return Reply(state.revision, answer)


async def configure(call: Call) -> Reply:
    """Change the configuration: all of it in one entry, or nothing."""
    body = call.body
    command = ConfigureSite(_settings(body.settings), body.partial, body.expect_revision)
    settled = await call.service.settle(call, command)
    return Reply(settled.state.revision, _answer(settled.state))


def _settings(bodies: Iterable[SettingBody]) -> tuple[Setting, ...]:
    return tuple(Setting(body.key, body.value, body.file, body.line, body.column) for body in bodies)


def _answer(state: State) -> ConfigurationAnswer:
    rows = []
    for key in KEYS:
        if key.owner is Owner.FLAG:
            continue
        value = written_value(key, state.site, state.policy, rules_of(state))
        rows.append(
            SettingView(
                key=key.name,
                value=shown_default_pool(state) if key.field == "default_pool" else value,
                default=written_value(key, DEFAULT_SITE, DEFAULT_POLICY),
                slurm=key.is_slurm,
                about=key.about,
            )
        )
    return ConfigurationAnswer(
        revision=state.revision,
        changed_revision=state.site.revision,
        settings=tuple(rows),
        text=file_text(state),
        burst_buffer_conf=file_text(state, slurm_only=True),
    )
