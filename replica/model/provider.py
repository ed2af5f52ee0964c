"""Providers of a cluster's operations: what replicas know of each, a row a provider, and what its workers are told.

How a provider is called is in the module of its name in `cluster.providers`: those two are what a new one takes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

NATIVE = "native"
"""The provider that is Forebay's own agents."""


class ProviderFacts(msgspec.Struct, frozen=True, gc=False):
    """What decisions, texts and the grammar of requests depend on."""

    site_directive: bool = False
    """Whether its directives begin with the site's own word (`#BB_LUA`), and most of each is for the site to read."""
    short_bb: bool = True
    """Whether `#BB capacity=…` of the older guide is read."""
    names_pools: bool = False
    """Whether it tells which pools there are, so that the default pool may be named before it is there."""
    first_pool_is_default: bool = False
    """Whether the first pool that it tells of is the default where nobody named another."""
    needs_pool: bool = False
    """Whether it is told the default pool for a job that asked for none and reserves nothing."""
    shows_allocated: bool = False
    """Whether `show burst` lists its buffers as allocated from the reservation to the end, as Slurm's plugin does."""
    get_sys_state: str = ""
    get_sys_status: str = ""
    """Where Slurm's plugin looks for its two programs when burst_buffer.conf does not say."""
    status_command: str = "the status command"
    """What answers `bbstat`, as a failure names it."""
    function_prefix: str = "slurm_bb_"
    bare_functions: tuple[str, ...] = ("teardown",)
    """How reasons name an operation: with the prefix, but for these."""
    long_comments: bool = True
    """Whether the SystemComment of an operation after the run names it as the reason does (transcripts)."""


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
"""What may perform a cluster's operations, one for the whole cluster (Slurm: BurstBufferType)."""

PROVIDERS = tuple(PROVIDER_FACTS)


def provider_facts(name: str) -> ProviderFacts:
    """Return the row of a provider; that of one with no peculiarities where the name is unknown."""
    return PROVIDER_FACTS.get(name, PROVIDER_FACTS[NATIVE])


class Provision(msgspec.Struct, frozen=True, kw_only=True):
    """Who performs operations and how long each may take (JSON object in orders). Durations are seconds."""

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
