"""A cluster with a site's own provider: its configuration, its programs, and what makes it the provider."""

from __future__ import annotations

from pathlib import Path

import msgspec

from cluster.config.config import Config
from cluster.providers.calls import PoolWatch
from replica.grammar.burst_buffer_conf import Setting
from replica.messages.commands import CONTROLLER, ConfigureSite, Request
from tests.cluster.providers.conftest import Programs
from tests.cluster.rig import Rig, until


def script(*actions: str) -> str:
    """Return a job's script with these actions."""
    return f"#!/bin/sh\n#BB_LUA pool=fast capacity=2K {' '.join(f'do={action}' for action in actions)}\ntrue\n"


def provided(config: Config, directory: Path) -> tuple[Config, Programs]:
    """Return the configuration with a site's programs, and those."""
    directory.mkdir()
    programs = Programs(directory)
    return msgspec.structs.replace(config, provider=programs.local), programs


async def configure(rig: Rig, programs: Programs) -> None:
    """Make the Lua script the cluster's provider, and look at its pools until they are known."""
    await until(lambda: rig.controller.leads and rig.controller.state.feature_level >= 1)
    settings = (
        Setting("BurstBufferType", "burst_buffer/lua"),
        Setting("LuaScript", str(programs.script)),
        Setting("ValidateTimeout", "2"),
    )
    actor = msgspec.structs.replace(CONTROLLER, role=type(CONTROLLER.role).OPERATOR)
    settled = await rig.controller.submit(Request(b"", actor, ConfigureSite(settings, partial=True)))
    assert settled.refusal is None, settled.refusal
    service = rig.service
    watch = PoolWatch(
        service.providing.calls,
        programs.local,
        state=lambda: rig.controller.state,
        leads=lambda: rig.controller.leads,
        submit=rig.controller.submit,
        clock=rig.controller.clock,
    )
    rig.controller.register(watch)
    watch.poll()
    await until(lambda: rig.controller.state.pools["fast"].quantity_bytes == 5 * 1024**2)
