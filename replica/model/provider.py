"""Properties of providers that replicas need, and the settings that provider workers receive.

A new provider takes a row here and a module of its name in `cluster.providers`, which calls it.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

NATIVE = "native"
"""The native provider: Forebay's own agents."""


class ProviderFacts(msgspec.Struct, frozen=True, gc=False):
    """Properties of a provider that affect decisions, texts and the grammar of requests."""

    site_directive: bool = False
    """True if directives begin with the site's own word (`#BB_LUA`) and are mostly read by the site's script."""
    short_bb: bool = True
    """True if `#BB capacity=…` of the older guide is supported."""
    names_pools: bool = False
    """True if it reports pools, so that the default pool may be named before it exists."""
    first_pool_is_default: bool = False
    """True if the first reported pool is the default if none is configured."""
    needs_pool: bool = False
    """True if it receives the default pool for jobs that name none and reserve nothing."""
    shows_allocated: bool = False
    """True if `show burst` lists its buffers as allocated from the reservation to the end, as Slurm's plugin does."""
    get_sys_state: str = ""
    get_sys_status: str = ""
    """Default paths of the two programs in Slurm's plugin, if burst_buffer.conf sets none."""
    status_command: str = "the status command"
    """Name of the command behind `bbstat`, for error messages."""
    function_prefix: str = "slurm_bb_"
    bare_functions: tuple[str, ...] = ("teardown",)
    """Operations that reasons name without `function_prefix`."""
    long_comments: bool = True
    """True if the SystemComment of an operation after the run uses the reason's name for it (transcripts)."""


PROVIDER_FACTS: Mapping[str, ProviderFacts] = {
    NATIVE: ProviderFacts(),
    "lua": ProviderFacts(
        site_directive=True, names_pools=True, shows_allocated=True, status_command="slurm_bb_get_status"
    ),
    "datawarp": ProviderFacts(
        short_bb=False,
        names_pools=True,
        first_pool_is_default=True,
        needs_pool=True,
        get_sys_state="/opt/cray/dw_wlm/default/bin/dw_wlm_cli",
        get_sys_status="/opt/cray/dws/default/bin/dwstat",
        function_prefix="dws_",
        bare_functions=("setup", "teardown"),
        long_comments=False,
    ),
    "generic": ProviderFacts(first_pool_is_default=True),
}
"""Providers; a cluster has one (Slurm: BurstBufferType)."""

PROVIDERS = tuple(PROVIDER_FACTS)


def provider_facts(name: str) -> ProviderFacts:
    """Return the properties of a provider; those of the native one if the name is unknown."""
    return PROVIDER_FACTS.get(name, PROVIDER_FACTS[NATIVE])


class Provision(msgspec.Struct, frozen=True, kw_only=True):
    """A provider with its programs and time limits (JSON object in orders). Durations are seconds."""

    provider: str
    """One of PROVIDERS, but not NATIVE."""
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
