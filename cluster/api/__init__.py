"""The public face of a replica: HTTP and JSON under `/v1`, over mutual TLS. DESIGN.md beside this file explains it."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.core import LocalCore
    from cluster.api.door import ChannelServer, Server
    from cluster.api.doors import Doors
    from cluster.api.service import Service
else:
    # A door is made of some of its modules, and has no business with the others.
    __getattr__ = shown(
        __name__,
        """
        core: LocalCore
        door: ChannelServer Server
        doors: Doors
        service: Service
        """,
    )
