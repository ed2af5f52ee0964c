"""The Merkle tree of RFC 6962: hashes, its right edge while it grows, proofs, and what they are held against.

A hash has 32 bytes. A node (level, index) is the root of the full subtree over 2**level leaves from index * 2**level.
Whoever makes a proof reads nodes through a function, so that it does not matter where they lie.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence

HASH_BYTES = 32
EMPTY_ROOT = hashlib.sha256(b"").digest()
# A size is a u64, so a path has at most 64 hashes and a proof of consistency one more.
MAX_SIZE = 2**64 - 1

ReadNode = Callable[[int, int], bytes]


class ProofError(ValueError):
    """A proof that does not show what it claims; the text says where it fails."""


def leaf_hash(data: bytes) -> bytes:
    return hashlib.sha256(b"\x00" + data).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\x01" + left + right).digest()


class RightEdge:
    """The roots of the full subtrees that a growing tree is made of, largest first: one for each bit of its size."""

    def __init__(self, size: int = 0, peaks: Sequence[bytes] = ()) -> None:
        if not 0 <= size <= MAX_SIZE or len(peaks) != size.bit_count() or any(len(one) != HASH_BYTES for one in peaks):
            raise ValueError(f"a tree of {size} leaves has one peak of {HASH_BYTES} bytes for each bit of its size")
        self.size = size
        self.peaks = list(peaks)

    def append(self, leaf: bytes) -> list[bytes]:
        """The nodes that the hash of the next leaf completes: level 0 (the leaf itself), 1, and so on."""
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
    """The root over the first `size` leaves."""
    return _span(0, size, read)


def inclusion_proof(index: int, size: int, read: ReadNode) -> list[bytes]:
    """The hashes beside the way from leaf `index` to the root over `size` leaves, lowest first."""
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
    """The hashes that show the tree of `old_size` leaves to be the beginning of that of `size`; none from size 0."""
    if not 0 <= old_size <= size <= MAX_SIZE:
        raise ValueError(f"a tree of {size} leaves does not begin with one of {old_size}")
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
    """Leaf hash `leaf` is number `index` under `root` over `size` leaves, or ProofError (RFC 9162 2.1.3.2)."""
    _check_sizes(index, size - 1, size)
    _check_hashes([leaf, root, *proof])
    position, last = index, size - 1
    found = leaf
    for sibling in proof:
        if last == 0:
            raise ProofError(f"the inclusion proof of leaf {index} of {size} has hashes to spare")
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
    """The tree of `old_size` begins that of `size`, or ProofError (RFC 9162 2.1.4.2)."""
    _check_sizes(old_size, size, size)
    _check_hashes([old_root, root, *proof])
    what = f"the consistency proof from {old_size} to {size}"
    if old_size in {0, size}:
        if proof:
            raise ProofError(f"{what} must be empty")
        if old_root != (root if old_size == size else EMPTY_ROOT):
            raise ProofError(f"{what} has another root where it begins")
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
            raise ProofError(f"{what} has hashes to spare")
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
        raise ProofError(f"{low} is not within a tree of {size} leaves")


def _check_hashes(hashes: Sequence[bytes]) -> None:
    # Without this a short hash and a long one beside it would have the digest of two right ones.
    if any(len(one) != HASH_BYTES for one in hashes):
        raise ProofError(f"a hash has {HASH_BYTES} bytes")


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
