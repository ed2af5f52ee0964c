"""Drill helper on a machine: causes faults that the machine's configuration allows, under a renewed lease."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.drills.helper.channel import HelperChannel
    from forebay.cluster.drills.helper.messages import (
        AGENTS,
        DURATION_S_MAX,
        LEASE_S,
        NEEDS,
        NOT_DONE,
        PROTOCOL,
        RENEW_EVERY_S,
        BeginRequest,
        EndRequest,
        HelperAnswer,
        HelperRefused,
        LookRequest,
        RenewRequest,
    )
else:
    __getattr__ = export_lazily(__name__)
