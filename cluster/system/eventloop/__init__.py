"""Event-loop services: listeners, HTTP servers, background tasks, time slices, user lookups, and the watchdog."""

from typing import TYPE_CHECKING

from replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from cluster.system.eventloop.background import Background, end_within, failure_logged, stop_on_signals
    from cluster.system.eventloop.http_server import HttpConnection, HttpServer, MalformedRequest
    from cluster.system.eventloop.listener import Acceptor, ReadingProtocol, listen, read_buffer
    from cluster.system.eventloop.name_service import NameService, NotKnownNow
    from cluster.system.eventloop.slices import BYTES_PER_SLICE, RECORDS_PER_SLICE, SlicedWork, Slices, iterate_paced
    from cluster.system.eventloop.users import Identities
    from cluster.system.eventloop.watchdog import Watchdog
else:
    __getattr__ = export_lazily(
        __name__,
        """
        background: Background end_within failure_logged stop_on_signals
        http_server: HttpConnection HttpServer MalformedRequest
        listener: Acceptor ReadingProtocol listen read_buffer
        name_service: NameService NotKnownNow
        slices: BYTES_PER_SLICE RECORDS_PER_SLICE Slices SlicedWork iterate_paced
        users: Identities
        watchdog: Watchdog
        """,
    )
