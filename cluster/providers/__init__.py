"""Who performs a cluster's burst-buffer operations where that is not Forebay itself: a site's own programs.

The public face: `provider_for`. Nothing heavy is imported here, because workers must start fast."""

from __future__ import annotations

from cluster.providers.interface import Local, OperationError, PoolReport, Provider, Subject
from cluster.system import Clock
from replica.model import Provision

__all__ = ["Local", "OperationError", "PoolReport", "Provider", "Subject", "provider_for"]


def provider_for(provision: Provision, local: Local, clock: Clock) -> Provider:
    """Return the provider that the site's configuration names; OperationError for one that does not exist."""
    match provision.provider:
        case "lua":
            from cluster.providers.lua import LuaProvider

            return LuaProvider(provision, local, clock)
        case "datawarp":
            from cluster.providers.datawarp import DatawarpProvider

            return DatawarpProvider(provision, local, clock)
        case "generic":
            from cluster.providers.generic import GenericProvider

            return GenericProvider(provision, local, clock)
    raise OperationError("process", f"there is no provider {provision.provider!r}", final=True)
