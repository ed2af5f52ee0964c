"""Ledger archives: writing and verifying them, pruning archived entries, and restoring a pruned tree."""

from forebay.cluster.audit.archive.pruning import PruneRefused, prune, prune_plan
from forebay.cluster.audit.archive.restoring import restore
from forebay.cluster.audit.archive.verifying import Keys, VerifiedArchive, read_keys, verify_archive
from forebay.cluster.audit.archive.writing import NotArchived, archive_ledger, checkpoint_in
