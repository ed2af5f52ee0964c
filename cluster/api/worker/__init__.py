"""API worker: ends TLS, speaks HTTP and the channel, makes state-independent checks; usually a separate process."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.api.worker.channel import ChannelServer
    from forebay.cluster.api.worker.server import Server
else:
    __getattr__ = export_lazily(__name__)
