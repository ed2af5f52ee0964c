"""Log in memory, signed by its replicas in any state: intact, set back or forked."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from forebay.cluster.security.proofs import (
    AddCheckpoint,
    Checkpoint,
    RightEdge,
    VerifierKey,
    consistency_proof,
    leaf_hash,
    root_of,
    sign,
    verifier_of,
    write_note,
)

ORIGIN = "forebay/c1"
PRIVATE = [Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in range(5)]


def keys_of(count: int, origin: str = ORIGIN) -> list[VerifierKey]:
    """Return the keys of the first replicas."""
    return [verifier_of(origin, one) for one in PRIVATE[:count]]


class MemoryLog:
    """Tree of `size` leaves, whose leaves differ from the common log from `forked_from` on."""

    def __init__(self, size: int, forked_from: int = 1_000_000, origin: str = ORIGIN) -> None:
        self.origin = origin
        self.size = size
        self._nodes: dict[tuple[int, int], bytes] = {}
        edge = RightEdge()
        for number in range(size):
            completed = edge.append(leaf_hash(f"{number}{'!' * (number >= forked_from)}".encode()))
            self._nodes.update({(level, number >> level): one for level, one in enumerate(completed)})

    def read(self, level: int, index: int) -> bytes:
        return self._nodes[level, index]

    def checkpoint(self, size: int) -> Checkpoint:
        return Checkpoint(self.origin, size, root_of(size, self.read))

    def note(self, size: int, signers: int = 3, text: str = "") -> bytes:
        text = text or self.checkpoint(size).text()
        return write_note(text, [sign(text, self.origin, one) for one in PRIVATE[:signers]]).encode()

    def asked(self, old_size: int, size: int, signers: int = 3) -> bytes:
        proof = consistency_proof(old_size, size, self.read) if 0 < old_size <= size else []
        return AddCheckpoint(old_size, tuple(proof), self.note(size, signers)).encode()
