"""OpenTelemetry traces of finished jobs, exported by a separate process beside the leader."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.traces.link import Tracer
else:
    __getattr__ = export_lazily(__name__)
