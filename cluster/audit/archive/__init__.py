"""Ledger archives: written from a replica's directory, verified alone or with it, and pruning of archived entries."""

from cluster.audit.archive.pruning import PruneRefused, prune, prune_plan
from cluster.audit.archive.restoring import restore
from cluster.audit.archive.verifying import Keys, VerifiedArchive, read_keys, verify_archive
from cluster.audit.archive.writing import NotArchived, archive_ledger, checkpoint_in
