"""What runs on an event loop: listeners, buffered reading, background tasks, long work in slices, look-ups of users."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.eventloop.background import Background
    from cluster.eventloop.listener import Acceptor, ReadingProtocol, listen, read_buffer
    from cluster.eventloop.slices import BYTES_PER_SLICE, RECORDS_PER_SLICE, Slices, Work, paced
    from cluster.eventloop.users import Identities
else:
    __getattr__ = shown(
        __name__,
        """
        background: Background
        listener: Acceptor ReadingProtocol listen read_buffer
        slices: BYTES_PER_SLICE RECORDS_PER_SLICE Slices Work paced
        users: Identities
        """,
    )
