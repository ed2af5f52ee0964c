"""Transparency-log witness: verifies, independently of the cluster, that a ledger only grows."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.witness.checkpoint_store import CheckpointStore, Evidence, SeenCheckpoint
    from forebay.cluster.witness.keys import WitnessError, make_key, read_key
    from forebay.cluster.witness.server import WitnessServer
    from forebay.cluster.witness.witness import (
        CheckpointWitness,
        WitnessedLog,
        WitnessResponse,
        log_of,
        logs_in,
    )
else:
    __getattr__ = export_lazily(__name__)
