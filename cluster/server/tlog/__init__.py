"""The ledger as a transparency log: its tree, derived beside the commit, and proofs of what is in it."""

from cluster.server.tlog.derive import LOG_DIRECTORY, LedgerTree, NoDisclosureKey, NotInTree, disclosure_key_of
from cluster.server.tlog.prove import proof_file, records_proven
