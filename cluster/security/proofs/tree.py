"""Merkle tree of RFC 6962: hashes, right edge, proofs, and verification.

A hash has 32 bytes. Node (level, index) is the root of the full subtree over 2**level leaves from index * 2**level.
Proofs read nodes through a function, independent of their storage.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
# Sizes are u64, so a path has at most 64 hashes, and a consistency proof one more.
MAX_SIZE = 2**64 - 1

ReadNode = Callable[[int, int], bytes]


class ProofError(ValueError):
    """A proof is invalid; the message names the failed step."""


def leaf_hash(data: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class RightEdge:
    """Roots of the full subtrees of a growing tree, largest first: one for each bit of its size."""

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        if not 0 <= size <= MAX_SIZE or len(peaks) != size.bit_count() or any(len(one) != HASH_BYTES for one in peaks):
            raise ValueError(
                f"a tree of {size} leaves must have one peak of {HASH_BYTES} bytes for each bit of its size"
            )
        self.size = size
        self.peaks = list(peaks)

    def append(self, leaf: bytes) -> list[bytes]:
        """Append a leaf hash and return the nodes it completes: level 0 (the leaf), 1, and so on."""
        if self.size == MAX_SIZE:
            raise ValueError(f"a tree has at most {MAX_SIZE} leaves")
        completed = [leaf]
        bits = self.size
        while bits & 1:
            completed.append(node_hash(self.peaks.pop(), completed[-1]))
            bits >>= 1
        self.peaks.append(completed[-1])
        self.size += 1
        return completed

    def root(self) -> bytes:
        return _fold_peaks(self.peaks)


def root_of(size: int, read: ReadNode) -> bytes:
    """Return the root over the first `size` leaves."""
    return _span(0, size, read)


def inclusion_proof(index: int, size: int, read: ReadNode) -> list[bytes]:
    """Return the sibling hashes from leaf `index` to the root over `size` leaves, lowest first."""
    if not 0 <= index < size <= MAX_SIZE:
        raise ValueError(f"leaf {index} is not in a tree of {size} leaves")
    first, end = 0, size
    path = []
    while end - first > 1:
        middle = first + _split(end - first)
        if index < middle:
            path.append(_span(middle, end, read))
            end = middle
        else:
            path.append(_span(first, middle, read))
            first = middle
    return path[::-1]


def consistency_proof(old_size: int, size: int, read: ReadNode) -> list[bytes]:
    """Return the hashes that prove that the tree of `old_size` leaves is a prefix of the tree of `size` leaves."""
    if not 0 <= old_size <= size <= MAX_SIZE:
        raise ValueError(f"a tree of {size} leaves cannot extend one of {old_size}")
    if old_size in {0, size}:
        return []
    first, end = 0, size
    path = []
    while old_size < end:
        middle = first + _split(end - first)
        if old_size <= middle:
            path.append(_span(middle, end, read))
            end = middle
        else:
            path.append(_span(first, middle, read))
            first = middle
    if first:  # otherwise this is the old root, which the verifier has
        path.append(_span(first, end, read))
    return path[::-1]


def verify_inclusion(index: int, size: int, leaf: bytes, proof: Sequence[bytes], root: bytes) -> None:
    """Verify that leaf hash `leaf` has position `index` under `root` over `size` leaves (RFC 9162 2.1.3.2).

    Raises:
        ProofError: The proof is invalid.
    """
    _check_sizes(index, size - 1, size)
    _check_hashes([leaf, root, *proof])
    position, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            raise ProofError(f"the inclusion proof of leaf {index} of {size} has surplus hashes")
        if position & 1 or position == last:
            found = node_hash(sibling, found)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            found = node_hash(found, sibling)
        position, last = position >> 1, last >> 1
    if last != 0:
        raise ProofError(f"the inclusion proof of leaf {index} of {size} ends before the root")
    if found != root:
        raise ProofError(f"the inclusion proof of leaf {index} of {size} leads to another root")


def verify_consistency(old_size: int, size: int, old_root: bytes, root: bytes, proof: Sequence[bytes]) -> None:
    """Verify that the tree of `old_size` leaves is a prefix of the tree of `size` leaves (RFC 9162 2.1.4.2).

    Raises:
        ProofError: The proof is invalid.
    """
    _check_sizes(old_size, size, size)
    _check_hashes([old_root, root, *proof])
    what = f"the consistency proof from {old_size} to {size}"
    if old_size in {0, size}:
        if proof:
            raise ProofError(f"{what} must be empty")
        if old_root != (root if old_size == size else EMPTY_ROOT):
            raise ProofError(f"{what} begins with another root")
        return
    hashes = list(proof)
    if old_size.bit_count() == 1:
        hashes.insert(0, old_root)
    if not hashes:
        raise ProofError(f"{what} is empty")
    position, last = old_size - 1, size - 1
    while position & 1:
        position, last = position >> 1, last >> 1
    old = new = hashes[0]
    for sibling in hashes[1:]:
        if last == 0:
            raise ProofError(f"{what} has surplus hashes")
        if position & 1 or position == last:
            old, new = node_hash(sibling, old), node_hash(sibling, new)
            while position and not position & 1:
                position, last = position >> 1, last >> 1
        else:
            new = node_hash(new, sibling)
        position, last = position >> 1, last >> 1
    if last != 0:
        raise ProofError(f"{what} ends before the root")
    if old != old_root:
        raise ProofError(f"{what} leads to another old root")
    if new != root:
        raise ProofError(f"{what} leads to another root")


def _check_sizes(low: int, high: int, size: int) -> None:
    if not 0 <= low <= high or size > MAX_SIZE:
        raise ProofError(f"position {low} is outside a tree of {size} leaves")


def _check_hashes(hashes: Sequence[bytes]) -> None:
    # Otherwise a short hash and a long hash could together have the digest of two valid hashes.
    if any(len(one) != HASH_BYTES for one in hashes):
        raise ProofError(f"a hash must have {HASH_BYTES} bytes")


def _split(leaves: int) -> int:
    return 1 << ((leaves - 1).bit_length() - 1)


def _span(first: int, end: int, read: ReadNode) -> bytes:
    return _fold_peaks([read(level, index) for level, index in _full_subtrees(first, end)])


def _full_subtrees(first: int, end: int) -> Iterator[tuple[int, int]]:
    # `first` is a multiple of the largest power of two in the span, as everywhere in a tree of RFC 6962.
    while first < end:
        level = (end - first).bit_length() - 1
        yield level, first >> level
        first += 1 << level


def _fold_peaks(peaks: Sequence[bytes]) -> bytes:
    if not peaks:
        return EMPTY_ROOT
    found = peaks[-1]
    for peak in reversed(peaks[:-1]):
        found = node_hash(peak, found)
    return found
