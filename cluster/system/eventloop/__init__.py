"""Event-loop services: listeners, HTTP servers, background tasks, time slices, user lookups, and the watchdog."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.system.eventloop.background import Background, end_within, failure_logged, stop_on_signals
    from forebay.cluster.system.eventloop.http_server import HttpConnection, HttpServer, MalformedRequest
    from forebay.cluster.system.eventloop.listener import Acceptor, ReadingProtocol, listen, read_buffer
    from forebay.cluster.system.eventloop.name_service import NameService, NotKnownNow
    from forebay.cluster.system.eventloop.shares import ProcessorShares, ShareExceeded
    from forebay.cluster.system.eventloop.slices import (
        BYTES_PER_SLICE,
        RECORDS_PER_SLICE,
        SlicedWork,
        Slices,
        iterate_paced,
    )
    from forebay.cluster.system.eventloop.turns import Turns
    from forebay.cluster.system.eventloop.users import Identities
    from forebay.cluster.system.eventloop.watchdog import Watchdog
else:
    __getattr__ = export_lazily(__name__)
