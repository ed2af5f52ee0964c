"""The public face of a replica: HTTP and JSON under `/v1`, over mutual TLS. DESIGN.md beside this file explains it."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.local_backend import LocalBackend
    from cluster.api.service import ApiService
    from cluster.api.worker import ChannelServer, Server
    from cluster.api.workers import ApiWorkers
else:
    # A door is made of some of its modules, and has no business with the others.
    __getattr__ = shown(
        __name__,
        """
        local_backend: LocalBackend
        worker: ChannelServer Server
        workers: ApiWorkers
        service: ApiService
        """,
    )
