"""Client of a Forebay cluster, used by the CLI, agents and other programs; finds a replica that answers."""

from typing import TYPE_CHECKING

from replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from cluster.client.access_methods import GatewayAccess, connect_gateway
    from cluster.client.calls import ATTEMPT_S, NOBODY_S, finish, is_definite
    from cluster.client.client import Client, run
    from cluster.client.errors import NO_ANSWER, UNTRUSTED, ApiError, error_of_view
    from cluster.client.event_pages import read_event_pages
    from cluster.client.witnesses import WitnessClient, WitnessReply, WitnessUnreachable
else:
    __getattr__ = export_lazily(
        __name__,
        """
        calls: ATTEMPT_S NOBODY_S finish is_definite
        client: Client run
        errors: NO_ANSWER UNTRUSTED ApiError error_of_view
        event_pages: read_event_pages
        access_methods: GatewayAccess connect_gateway
        witnesses: WitnessReply WitnessClient WitnessUnreachable
        """,
    )
