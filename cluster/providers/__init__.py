"""External providers: who performs a cluster's burst-buffer operations where that is not Forebay itself.

A provider is a row of facts (replica.model.provider) and a module of its name here. Nothing heavy is imported with
this face, because workers must start fast."""

from __future__ import annotations

import importlib

from cluster.providers.interface import NO_LOCAL, Local, OperationError, PoolReport, Provider, Subject, log_for
from cluster.providers.limits import (
    CALLS_MAX,
    LOCAL_PROGRAMS_MAX,
    LOCAL_VARIABLES_MAX,
    STATUS_ARGUMENT_BYTES_MAX,
    STATUS_ARGUMENTS_MAX,
)
from cluster.providers.trusted_programs import ProgramRefused, check_command
from cluster.system import Clock
from replica.model import NATIVE, PROVIDERS, Provision


def provider_for(provision: Provision, local: Local, clock: Clock) -> Provider:
    """Return the provider that the site's configuration names; OperationError for one that does not exist."""
    if provision.provider == NATIVE or provision.provider not in PROVIDERS:
        raise OperationError("process", f"there is no provider {provision.provider!r}", final=True)
    made: Provider = importlib.import_module(f"{__name__}.{provision.provider}").PROVIDER(provision, local, clock)
    return made
