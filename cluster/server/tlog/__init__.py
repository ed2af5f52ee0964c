"""Ledger as a transparency log: its tree, derived beside the commit, signed checkpoints, and proofs."""

from forebay.cluster.server.tlog.cosigning import Cosigning, NoAnswer, Witness
from forebay.cluster.server.tlog.counting import TooFar, jobs_concerned, last_recorded, recorded_in, records_between
from forebay.cluster.server.tlog.derive import (
    LOG_DIRECTORY,
    LedgerTree,
    NoDisclosureKey,
    NotInTree,
    disclosure_key_in,
    disclosure_key_of,
    leaf_of_entry,
)
from forebay.cluster.server.tlog.prove import CountLeaf, history_proven, proof_file, records_proven
from forebay.cluster.server.tlog.publish import (
    CHECKPOINT_NAME,
    NOBODY,
    CountedHistories,
    Counting,
    LogPeers,
    NoteNotTaken,
    Publisher,
    SignedCheckpoint,
)
from forebay.cluster.server.tlog.signing import (
    SIGNED_NAME,
    SIGNING_DIRECTORY,
    LedgerAltered,
    Signer,
    SignRefused,
    origin_of,
    parse_origin,
    private_key,
)
