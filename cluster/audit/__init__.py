"""Offline audits of a replica's directory: replay, verify and print the ledger, and inspect snapshots.

Only two commands of `archive` write to a replica's directory: pruning the ledger and restoring its tree. `forebay
audit` and `forebay backup inspect` run `python -m cluster.audit` as a separate process, because the command line never
imports `wal` or `snapshots`.
"""
