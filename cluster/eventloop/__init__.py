"""What runs on an event loop: listeners, buffered reading, background tasks, look-ups of users."""

from cluster.eventloop.background import Background
from cluster.eventloop.listener import Acceptor, ReadingProtocol, read_buffer
from cluster.eventloop.users import Identities, group_name, uid_of
