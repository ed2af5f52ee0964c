"""Audits of what a replica keeps, offline: replaying and verifying the ledger, printing it, inspecting snapshots.

Nothing here writes to a replica's directory but what prunes its ledger or brings back its tree (`archive`). `python -m
cluster.audit` is what `forebay audit` and `forebay backup inspect` run: a process of its own, because the command
line itself never imports `wal` or `snapshots`.
"""
