"""Leaf of a ledger entry: the part shown to auditors, with commands that can be disclosed one by one.

Leaves reveal nothing about the content of an entry, even if the content is easy to guess, because the digest of its
bytes and the leaf of each command are salted. Salts are derived from the cluster's disclosure key and the position of
entry or command. They are therefore the same on every replica, can be recomputed for any entry, and disclose only their
own command.
"""

import hmac
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from forebay.cluster.security.proofs.tree import EMPTY_ROOT, HASH_BYTES, RightEdge, inclusion_proof, leaf_hash

LEAF_HEAD = b"forebay-leaf/1\n"
SALT_BYTES = 16

_FIELDS = struct.Struct(f">QQQQQQ{HASH_BYTES}s{HASH_BYTES}s")
LEAF_BYTES = len(LEAF_HEAD) + _FIELDS.size
_NUMBER = struct.Struct(">Q")
_COMMAND = b"forebay command salt/1\n"
_ENTRY = b"forebay entry salt/1\n"


class LeafError(ValueError):
    """The bytes are not a leaf of this format."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """Contents of one entry's leaf. Numbers are u64; hashes have 32 bytes."""

    index: int
    """Index of the entry; its leaf has position index - 1 in the tree."""
    term: int
    revision: int
    """Revision after the entry."""
    at: int
    """Replicated clock, microseconds since 1970; 0 for an entry without commands."""
    size_bytes: int
    commands: int
    """Number of commands, one revision each. A proof of one command does not prove this number."""
    data_digest: bytes
    """SHA-256 of the entry's salt and data."""
    commands_root: bytes
    """Root of the tree over the commands' salted leaves (`command_leaf`)."""

    def encode(self) -> bytes:
        """Return the LEAF_BYTES that are hashed as a leaf of the tree."""
        return LEAF_HEAD + _FIELDS.pack(
            self.index,
            self.term,
            self.revision,
            self.at,
            self.size_bytes,
            self.commands,
            self.data_digest,
            self.commands_root,
        )


def parse_leaf(held: bytes) -> Leaf:
    """Parse a leaf.

    Raises:
        LeafError: The bytes are not a leaf.
    """
    if len(held) != LEAF_BYTES or not held.startswith(LEAF_HEAD):
        raise LeafError(f"{len(held)} bytes that begin with {held[: len(LEAF_HEAD)]!r} are not a leaf of a ledger")
    return Leaf(*_FIELDS.unpack_from(held, len(LEAF_HEAD)))


def command_salt(disclosure_key: bytes, revision: int) -> bytes:
    """Return the salt of the command settled as `revision`, which is disclosed with that command only."""
    return _salt(disclosure_key, _COMMAND, revision)


def entry_salt(disclosure_key: bytes, index: int) -> bytes:
    """Return the salt of the whole entry at `index`, which is disclosed with its data."""
    return _salt(disclosure_key, _ENTRY, index)


def command_leaf(salt: bytes, command: bytes) -> bytes:
    """Return the hash of a command's leaf in its entry's tree; the salt has SALT_BYTES."""
    return leaf_hash(salt + command)


def leaf_of(
    disclosure_key: bytes,
    *,
    index: int,
    term: int,
    data: bytes,
    base: int,
    revision: int,
    at: int,
    commands: Sequence[bytes],
) -> Leaf:
    """Return the leaf of an entry whose commands led from revision `base` to `revision`, one revision each."""
    return Leaf(
        index,
        term,
        revision,
        at,
        len(data),
        len(commands),
        sha256(entry_salt(disclosure_key, index) + data).digest(),
        _commands_edge(disclosure_key, base, commands).root() if commands else EMPTY_ROOT,
    )


def command_path(disclosure_key: bytes, base: int, commands: Sequence[bytes], position: int) -> list[bytes]:
    """Return the inclusion proof of the command at `position` in its entry's tree."""
    nodes: dict[tuple[int, int], bytes] = {}
    _commands_edge(disclosure_key, base, commands, nodes)
    return inclusion_proof(position, len(commands), lambda level, index: nodes[level, index])


def _commands_edge(
    disclosure_key: bytes, base: int, commands: Sequence[bytes], nodes: dict[tuple[int, int], bytes] | None = None
) -> RightEdge:
    edge = RightEdge()
    for revision, command in enumerate(commands, start=base + 1):
        completed = edge.append(command_leaf(command_salt(disclosure_key, revision), command))
        if nodes is not None:
            nodes.update({(level, (edge.size - 1) >> level): one for level, one in enumerate(completed)})
    return edge


def _salt(disclosure_key: bytes, what: bytes, number: int) -> bytes:
    return hmac.digest(disclosure_key, what + _NUMBER.pack(number), "sha256")[:SALT_BYTES]
