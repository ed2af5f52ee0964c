"""A cluster with a site's own provider: its configuration, its programs, and what makes it the provider."""

from __future__ import annotations

from pathlib import Path

import msgspec

from forebay.cluster.config.config import Config
from forebay.cluster.providers.calls import PoolWatch
from forebay.replica.grammar.burst_buffer_conf import ConfSetting
from forebay.replica.messages.commands import CONTROLLER, ConfigureSite, Request
from tests.cluster.harness import Harness, until
from tests.cluster.providers.conftest import Programs


def script(*actions: str) -> str:
    """Return a job's script with these actions."""
    return f"#!/bin/sh\n#BB_LUA pool=fast capacity=2K {' '.join(f'do={action}' for action in actions)}\ntrue\n"


def provided(config: Config, directory: Path) -> tuple[Config, Programs]:
    """Return the configuration with a site's programs, and those."""
    directory.mkdir()
    programs = Programs(directory)
    return msgspec.structs.replace(config, provider=programs.local), programs


async def configure(harness: Harness, programs: Programs, *, validate_s: int = 60, directive: str = "BB_LUA") -> None:
    """Make the Lua script the cluster's provider, and look at its pools until they are known.

    `validate_s` is ValidateTimeout: short only where something is to pass it, since each call starts a process.
    """
    await until(lambda: harness.controller.leads and harness.controller.state.feature_level >= 1)
    settings = (
        ConfSetting("BurstBufferType", "burst_buffer/lua"),
        ConfSetting("LuaScript", str(programs.script)),
        ConfSetting("ValidateTimeout", str(validate_s)),
        ConfSetting("Directive", directive),
    )
    actor = msgspec.structs.replace(CONTROLLER, role=type(CONTROLLER.role).OPERATOR)
    settled = await harness.controller.submit(Request(b"", actor, ConfigureSite(settings, partial=True)))
    assert settled.rejection is None, settled.rejection
    service = harness.service
    watch = PoolWatch(
        service.providing.calls,
        programs.local,
        state=lambda: harness.controller.state,
        leads=lambda: harness.controller.leads,
        submit=harness.controller.submit,
        clock=harness.controller.clock,
    )
    harness.controller.register(watch)
    watch.poll()
    await until(lambda: harness.controller.state.pools["fast"].quantity_bytes == 5 * 1024**2)
