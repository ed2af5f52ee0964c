"""Proof of a job's records in a ledger, as a file that third parties check with `verify_proof.py` of security.proofs.

The proof contains the complete commands that concern the job, so a scheduling cycle also names other jobs. Other
commands of the same batches appear only as hashes.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from forebay.cluster.security.proofs import (
    Leaf,
    command_path,
    command_salt,
    history_leaf,
    history_salt,
    leaf_hash,
    verify_inclusion,
)
from forebay.cluster.server.tlog.counting import last_recorded
from forebay.cluster.server.tlog.derive import LedgerTree
from forebay.wal import Ledger, LedgerBroken, LedgerEntry, commands_of

PROOF_FORMAT: Final = "forebay-proof/1"

ENTRY_BYTES_MAX: Final = 1
"""One entry is read at a time, regardless of its size."""


def records_proven(ledger: Ledger, tree: LedgerTree, revisions: Sequence[int], size: int) -> bytes:
    """Return the commands of these revisions in the first `size` entries, each with its proof.

    The result is JSON for `proof_file`; empty if there are no such revisions. Only verified records are returned.

    Raises:
        LedgerBroken: An entry is damaged or missing.
        NotInTree: The tree has fewer entries.
    """
    root, found, last = tree.root(size), list[Any](), None
    for revision in revisions:
        index = ledger.index_of_revision(revision)
        if index > size:
            break
        if last is None or last[0].index != index:
            last = (_entry(ledger, index), tree.leaf(index), tree.inclusion(index, size))
            verify_inclusion(index - 1, size, leaf_hash(last[1].encode()), last[2], root)
        found.append(_record(tree.disclosure_key, *last, revision))
    return json.dumps(found).encode() if found else b""


class CountLeaf(NamedTuple):
    """Leaf of a job in the tree of counts: its position, the number of records, and the path to the root."""

    position: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    path: list[bytes]


def history_proven(
    ledger: Ledger, tree: LedgerTree, job: int, size: int, leaf: Callable[[int, int], CountLeaf | None]
) -> bytes:
    """Return the proof of a job's record count, by the last count recorded in the first `size` entries.

    `leaf` returns the job's leaf in the tree of counts of so many entries, or None. The result is JSON for
    `proof_file`; empty without a recorded count or without records of this job. Exceptions of `leaf` also propagate.

    Raises:
        LedgerBroken: An entry is damaged or missing.
        NotInTree: The tree has fewer entries.
    """
    found = last_recorded(ledger, size)
    shown = None if found is None else leaf(job, found.event.index)
    if found is None or shown is None:
        return b""
    position, count, path = shown
    salt, root = history_salt(tree.disclosure_key, job), found.event.root
    verify_inclusion(position, found.event.jobs, history_leaf(salt, job, count), path, root)
    (record,) = json.loads(records_proven(ledger, tree, [found.revision], size))
    proof = {
        "record": record,
        "position": position,
        "count": count,
        "salt": _text(salt),
        "path": [*map(_text, path)],
    }
    return json.dumps(proof).encode()


def proof_file(note: str, job: int, records: bytes, history: bytes = b"") -> bytes:
    """Return the proof file: the checkpoint's note, the records, and the proof of completeness if `history` has one.

    `records` and `history` are results of `records_proven` and `history_proven` for the checkpoint's size.
    """
    proof = {
        "format": PROOF_FORMAT,
        "job": job,
        "checkpoint": note,
        "records": json.loads(records),
        "history": json.loads(history) if history else None,
    }
    return (json.dumps(proof, ensure_ascii=False, indent=1) + "\n").encode()


def _record(key: bytes, entry: LedgerEntry, leaf: Leaf, path: Iterable[bytes], revision: int) -> Any:
    settled, position = commands_of(entry.data), revision - entry.base - 1
    if settled is None or not 0 <= position < leaf.commands:
        raise LedgerBroken(entry.index, f"the entry did not settle revision {revision}")
    return {
        "leaf": _text(leaf.encode()),
        "path": [*map(_text, path)],
        "position": position,
        "command_path": [*map(_text, command_path(key, entry.base, settled.encoded, position))],
        "salt": _text(command_salt(key, revision)),
        "command": _text(settled.encoded[position]),
    }


def _entry(ledger: Ledger, index: int) -> LedgerEntry:
    found = ledger.read_some(index, entries_max=1, bytes_max=ENTRY_BYTES_MAX)
    if not found or found[0].index != index:
        raise LedgerBroken(index, "the entry is not available on this replica")
    return found[0]


def _text(held: bytes) -> str:
    return base64.b64encode(held).decode()
