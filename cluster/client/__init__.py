"""The client of a Forebay cluster: how tools, the CLI and the agents talk to whichever replica answers."""

from cluster.client.client import Client, run
from cluster.client.errors import NO_ANSWER, UNTRUSTED, ApiError, error_of_view
