"""A witness: what somebody else runs to see that a ledger only ever grows, without any state of its cluster."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.security.witness.keys import WitnessRefused, make_key, read_key
    from cluster.security.witness.seen import Evidence, Seen, SeenCheckpoint
    from cluster.security.witness.server import WitnessServer
    from cluster.security.witness.witness import Answer, Log, Witness, log_of, logs_in
else:
    __getattr__ = shown(
        __name__,
        """
        keys: WitnessRefused make_key read_key
        seen: Evidence Seen SeenCheckpoint
        server: WitnessServer
        witness: Answer Log Witness log_of logs_in
        """,
    )
