"""The client of a Forebay cluster: how tools, the CLI and the agents talk to whichever replica answers."""

from cluster.client.client import Client
from cluster.client.errors import ApiError
from cluster.client.synchronous import run
from cluster.schemas.command_ids import instant_of, new_command_id

__all__ = ["ApiError", "Client", "instant_of", "new_command_id", "run"]
