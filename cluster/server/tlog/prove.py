"""Proof of what a ledger has of a job, as a file that others can check: `verify_proof.py` of security.proofs does.

It holds the commands that concern the job as they are in the ledger, whole: a pass of the scheduler names the other
jobs that it was about as well. Of the other commands that were settled together with them it holds hashes only.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

from cluster.security.proofs import (
    Leaf,
    command_path,
    command_salt,
    history_leaf,
    history_salt,
    leaf_hash,
    verify_inclusion,
)
from cluster.server.tlog.counting import last_recorded
from cluster.server.tlog.derive import LedgerTree
from wal import Ledger, LedgerBroken, LedgerEntry, commands_of

PROOF_FORMAT: Final = "forebay-proof/1"

ENTRY_BYTES_MAX: Final = 1
"""One entry is read at a time, however small."""


def records_proven(ledger: Ledger, tree: LedgerTree, revisions: Sequence[int], size: int) -> bytes:
    """Return those of the commands of these revisions that are in the first `size` entries, each with its proof.

    Empty where none is. JSON, for `proof_file`. LedgerBroken; NotInTree. Nothing is given away that does not verify.
    """
    root, found, last = tree.root(size), list[Any](), None
    for revision in revisions:
        index = ledger.index_of_revision(revision)
        if index > size:
            break
        if last is None or last.index != index:
            last = _entry(ledger, index)
            leaf, path = tree.leaf(index), tree.inclusion(index, size)
            verify_inclusion(index - 1, size, leaf_hash(leaf.encoded()), path, root)
        found.append(_record(tree.disclosure_key, last, leaf, path, revision))
    return json.dumps(found).encode() if found else b""


class CountLeaf(NamedTuple):
    """The leaf of a job in the tree of counts: its place, how many records there are, and the path to the root."""

    position: int
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not needed here
    path: list[bytes]


def history_proven(
    ledger: Ledger, tree: LedgerTree, job: int, size: int, leaf: Callable[[int, int], CountLeaf | None]
) -> bytes:
    """Return what shows how many records of a job there are, by the last count in the first `size` entries.

    `leaf` gives the leaf of a job in the tree of the counts of so many entries, None where it has none. JSON, for
    `proof_file`; empty where nothing was counted, or nothing of this job. LedgerBroken; NotInTree; what `leaf` raises.
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
    """Return the file of a proof: the checkpoint's note, what `records_proven` gave for its size, and that they are all
    of them, where `history_proven` gave something.
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
        raise LedgerBroken(entry.index, f"revision {revision} is not one that it settled")
    return {
        "leaf": _text(leaf.encoded()),
        "path": [*map(_text, path)],
        "position": position,
        "command_path": [*map(_text, command_path(key, entry.base, settled.encoded, position))],
        "salt": _text(command_salt(key, revision)),
        "command": _text(settled.encoded[position]),
    }


def _entry(ledger: Ledger, index: int) -> LedgerEntry:
    found = ledger.read_some(index, entries_max=1, bytes_max=ENTRY_BYTES_MAX)
    if not found or found[0].index != index:
        raise LedgerBroken(index, "it is not held here")
    return found[0]


def _text(held: bytes) -> str:
    return base64.b64encode(held).decode()
