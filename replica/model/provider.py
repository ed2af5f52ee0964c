"""What agents and workers need to know of a provider that is not Forebay's own: a query over the configuration."""

from __future__ import annotations

from typing import Protocol

import msgspec

from replica.model.configuration import Policy, Site, get_sys_state_of, get_sys_status_of

NATIVE = "native"


class Provision(msgspec.Struct, frozen=True, kw_only=True):
    """Who performs operations and how long each may take (JSON object in orders). Durations are seconds."""

    provider: str
    """lua, datawarp or generic."""
    lua_script: str = ""
    get_sys_state: str = ""
    get_sys_status: str = ""
    create_buffer: str = ""
    destroy_buffer: str = ""
    start_stage_in: str = ""
    stop_stage_in: str = ""
    start_stage_out: str = ""
    stop_stage_out: str = ""
    directive: str = "BB_LUA"
    validate_timeout_s: int = 5
    stage_in_timeout_s: int = 86_400
    stage_out_timeout_s: int = 86_400
    other_timeout_s: int = 300
    poll_interval_s: int = 15


class Provided(Protocol):
    """Whatever has the site's configuration and policy: a State."""

    @property
    def site(self) -> Site: ...
    @property
    def policy(self) -> Policy: ...


def provision_of(state: Provided) -> Provision | None:
    """Return the cluster's provider; None where its own agents move the data."""
    site, policy = state.site, state.policy
    if site.provider == NATIVE:
        return None
    return Provision(
        provider=site.provider,
        lua_script=site.lua_script,
        get_sys_state=get_sys_state_of(site),
        get_sys_status=get_sys_status_of(site),
        create_buffer=site.create_buffer,
        destroy_buffer=site.destroy_buffer,
        start_stage_in=site.start_stage_in,
        stop_stage_in=site.stop_stage_in,
        start_stage_out=site.start_stage_out,
        stop_stage_out=site.stop_stage_out,
        directive=site.directive,
        validate_timeout_s=site.validate_timeout_s,
        stage_in_timeout_s=policy.stage_in_timeout_s,
        stage_out_timeout_s=policy.stage_out_timeout_s,
        other_timeout_s=policy.other_timeout_s,
        poll_interval_s=site.poll_interval_s,
    )
