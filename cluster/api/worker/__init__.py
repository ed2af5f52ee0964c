"""The front door: ends TLS, reads HTTP and the channel, checks what needs no state; mostly a process of its own."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.worker.channel import ChannelServer
    from cluster.api.worker.server import Server
else:
    __getattr__ = shown(
        __name__,
        """
        channel: ChannelServer
        server: Server
        """,
    )
