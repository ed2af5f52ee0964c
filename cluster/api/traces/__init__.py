"""OpenTelemetry traces of finished jobs, exported by a separate process beside the leader."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.traces.link import Tracer
else:
    __getattr__ = shown(__name__, "link: Tracer")
