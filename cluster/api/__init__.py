"""HTTP and JSON API of a replica under `/v1`, over mutual TLS. See DESIGN.md in this directory."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.local_backend import LocalBackend
    from forebay.cluster.api.service import ApiService
    from forebay.cluster.api.worker import ChannelServer, Server
    from forebay.cluster.api.workers import ApiWorkers
else:
    # An API worker loads only some of the modules.
    __getattr__ = export_lazily(__name__)
