"""Client of a Forebay cluster, used by the CLI, agents and other programs; finds a replica that answers."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.client.access_methods import GatewayAccess, connect_gateway
    from forebay.cluster.client.calls import ATTEMPT_S, UNREACHABLE_S, finish, is_definite
    from forebay.cluster.client.client import Client, run
    from forebay.cluster.client.errors import NO_ANSWER, UNTRUSTED, ApiError, error_of_view
    from forebay.cluster.client.event_pages import read_event_pages
    from forebay.cluster.client.witnesses import WitnessClient, WitnessReply, WitnessUnreachable
else:
    __getattr__ = export_lazily(__name__)
