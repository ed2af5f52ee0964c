"""Rewrites the history of a stopped replica and all its hashes, as an insider could.

Afterwards each checksum and each digest holds, the marks are in order and no snapshot contradicts: storage that a
replica accepts at its start, since nothing on its own disk says that it was another one. Only its peers can tell.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from forebay.cluster.config.config import Config
from forebay.cluster.consensus.seals import Seal, Seals
from forebay.cluster.server.tlog import SIGNING_DIRECTORY, private_key
from forebay.replica.messages.commands import Actor
from forebay.wal import Environment, Journal, name_of
from forebay.wal.codec import EntryKind, decode_batch, encode_batch, kind_of
from forebay.wal.journal import Entry
from forebay.wal.ledger import Ledger

Rewrite = Callable[[Entry], Entry]
"""Returns what is to stand in the place of an entry: itself, or another one of the same index and term."""


def blamed(entry: Entry, actor: Actor) -> Entry:
    """Return the entry with somebody else as who asked for everything in it: what it led to stays the same."""
    if kind_of(entry.data) is not EntryKind.BATCH:
        return entry
    batch = decode_batch(entry.data)
    entries = tuple(replace(one, actor=actor) for one in batch.entries)
    return entry._replace(data=encode_batch(replace(batch, entries=entries)))


def sealed_again(config: Config, entries: list[Entry]) -> list[Entry]:
    """Return entries with new signatures, by the keys of the replicas that signed them: who has all disks has these."""
    found, term_before = list[Entry](), 0
    for entry in entries:
        if entry.seal:
            seal = msgspec.msgpack.decode(entry.seal, type=Seal)
            private = private_key(config.storage.directory / name_of(seal.leader) / SIGNING_DIRECTORY)
            signed = Seals(config.cluster.id, seal.leader, private).sealed(entry, term_before, dict(seal.votes))
            entry = signed
        found.append(entry)
        term_before = entry.term
    return found


def rewrite(config: Config, name: str, change: Rewrite, *, has_all_keys: bool = False) -> list[int]:
    """Rewrite the history of a replica that does not run; return the indexes of the entries that are another now.

    With `has_all_keys` they are signed anew, as by one who has the disks of all replicas.

    Its snapshots are removed, since they know the digest of what was. ValueError where the ledger does not begin with
    entry 1, or has a gap: then more than this replica's own disk would have to be forged.
    """
    directory, size_bytes = config.wal_directory(name), config.storage.map_size_bytes
    identity = {"cluster_id": config.cluster.id, "replica": name, "map_size_bytes": size_bytes}
    environment = Environment.open(directory, **identity, create=False)  # type: ignore[arg-type]
    journal, ledger = Journal(environment), Ledger(environment)
    applied = journal.applied_index
    if ledger.first_index != 1 or ledger.gaps() or not applied:
        raise ValueError(f"the ledger of {name} does not hold everything from entry 1 on")
    held = [Entry(one.index, one.term, one.data, one.seal) for one in ledger.read(1, limit=applied)]
    if journal.last_index > applied:
        held += journal.entries(applied + 1, max_bytes=1 << 30, max_entries=1 << 20)
    revisions = [row.revision for row in ledger.rows_before(2, applied)] if applied > 1 else []
    revisions.append(ledger.applied_revision)
    hard, commit = (journal.term, journal.voted_for), journal.commit_index
    environment.close()

    forged = [change(entry) for entry in held]
    if has_all_keys:
        forged = sealed_again(config, forged)
    shutil.rmtree(directory)
    shutil.rmtree(config.snapshot_directory(name), ignore_errors=True)
    environment = Environment.open(directory, **identity, create=True)  # type: ignore[arg-type]
    journal = Journal(environment)
    journal.set_term(*hard)
    journal.append(forged)
    journal.set_commit(commit)
    for entry, revision in zip(forged, revisions, strict=False):
        journal.record_applied(entry, revision)
    journal.sync()
    journal.flush_hints()
    environment.close()
    return [before.index for before, after in zip(held, forged, strict=True) if before != after]
