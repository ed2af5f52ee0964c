"""What runs on an event loop: listeners, buffered reading, background tasks, long work in slices, look-ups of users."""

from cluster.eventloop.background import Background
from cluster.eventloop.listener import Acceptor, ReadingProtocol, read_buffer
from cluster.eventloop.slices import BYTES_PER_SLICE, RECORDS_PER_SLICE, Slices, Work, paced
from cluster.eventloop.users import Identities, group_name, uid_of
