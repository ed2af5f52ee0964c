"""The client of a Forebay cluster: how tools, the CLI and the agents talk to whichever replica answers."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.client.calls import ATTEMPT_S, NOBODY_S, finish, tells
    from cluster.client.client import Client, run
    from cluster.client.errors import NO_ANSWER, UNTRUSTED, ApiError, error_of_view
    from cluster.client.stories import stretches
    from cluster.client.ways import GatewayWay, connected
    from cluster.client.witnesses import WitnessAnswer, WitnessClient, WitnessUnreachable
else:
    __getattr__ = shown(
        __name__,
        """
        calls: ATTEMPT_S NOBODY_S finish tells
        client: Client run
        errors: NO_ANSWER UNTRUSTED ApiError error_of_view
        stories: stretches
        ways: GatewayWay connected
        witnesses: WitnessAnswer WitnessClient WitnessUnreachable
        """,
    )
