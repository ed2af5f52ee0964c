"""External providers of burst-buffer operations, for clusters where Forebay does not perform them itself.

A provider has a row in replica.model.provider and a module of the same name here. Heavy imports are avoided in this
public API, because workers must start fast.
"""

from __future__ import annotations

import importlib

from forebay.cluster.providers.interface import NO_LOCAL, Local, OperationError, PoolReport, Provider, Subject, log_for
from forebay.cluster.providers.limits import (
    CALLS_MAX,
    LOCAL_PROGRAMS_MAX,
    LOCAL_VARIABLES_MAX,
    STATUS_ARGUMENT_BYTES_MAX,
    STATUS_ARGUMENTS_MAX,
)
from forebay.cluster.providers.trusted_programs import ProgramRefused, check_command
from forebay.cluster.system import Clock
from forebay.replica.model import NATIVE, PROVIDERS, Provision


def provider_for(provision: Provision, local: Local, clock: Clock) -> Provider:
    """Return the provider named in the site's configuration.

    Raises:
        OperationError: There is no such provider.
    """
    if provision.provider == NATIVE or provision.provider not in PROVIDERS:
        raise OperationError("process", f"the provider {provision.provider!r} does not exist", final=True)
    made: Provider = importlib.import_module(f"{__name__}.{provision.provider}").PROVIDER(provision, local, clock)
    return made
