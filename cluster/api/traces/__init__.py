"""What became of each job as a trace of OpenTelemetry, from a process beside the replica that leads."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.traces.link import Tracer
else:
    __getattr__ = shown(__name__, "link: Tracer")
