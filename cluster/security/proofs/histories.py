"""How many records the ledger has of each job, and a tree over that: what shows that records of a job are all of them.

Leaf j - 1 is that of job j. Jobs are numbered from 1 on and never anew, so the leaves only grow in number, and a count
only grows: also of a job that was purged from the state. A record of a job is a command of whose events one is about
it. Leaves are salted, so that who is shown that of one job learns nothing of the jobs beside it.
"""

import hmac
import struct
from array import array
from collections.abc import Mapping

from cluster.security.proofs.leaves import SALT_BYTES
from cluster.security.proofs.tree import HASH_BYTES, ReadNode, inclusion_proof, leaf_hash, node_hash, root_of

HISTORY_HEAD = b"forebay-history/1\n"

_TILE_LEVELS = 8
_TILE = 1 << _TILE_LEVELS
_LEAF = struct.Struct(">QQ")
_NUMBER = struct.Struct(">Q")
_SALT = b"forebay history salt/1\n"

NOTHING_LESS: Mapping[int, int] = {}


def history_salt(disclosure_key: bytes, job: int) -> bytes:
    """The salt of a job's leaf: given away with that leaf, and with no other."""
    return hmac.digest(disclosure_key, _SALT + _NUMBER.pack(job), "sha256")[:SALT_BYTES]


def history_leaf(salt: bytes, job: int, count: int) -> bytes:
    """The hash of the leaf that says that there are so many records of a job; the salt has SALT_BYTES."""
    return leaf_hash(HISTORY_HEAD + salt + _LEAF.pack(job, count))


class HistoryCounts:
    """The counts as they are now, and the tree over them, now or as it was when there were fewer."""

    def __init__(self, disclosure_key: bytes) -> None:
        self._key = disclosure_key
        self._counts = array("Q")
        """Of job j at j - 1."""
        self._tiles: dict[int, bytes] = {}
        """Roots over 256 leaves each, of those in which nothing has changed since they were computed."""

    def add(self, job: int, records: int = 1) -> None:
        """Count more records of a job."""
        if job > len(self._counts):
            self._counts.extend([0] * (job - len(self._counts)))
        self._counts[job - 1] += records
        self._tiles.pop((job - 1) // _TILE, None)

    def count(self, job: int, less: Mapping[int, int] = NOTHING_LESS) -> int:
        """Return how many records there are of a job; `less`: without so many of some jobs, the last ones."""
        return self._counts[job - 1] - less.get(job, 0) if 0 < job <= len(self._counts) else 0

    def jobs(self, less: Mapping[int, int] = NOTHING_LESS) -> int:
        """Return the highest number of a job that there are records of: as many leaves has the tree."""
        jobs = len(self._counts)
        while jobs and not self.count(jobs, less):
            jobs -= 1
        return jobs

    def prepare(self, tiles_max: int) -> bool:
        """Compute so many roots of tiles that are not known; return whether some are left."""
        read = self._reader(NOTHING_LESS)
        for number in range(len(self._counts) // _TILE):
            if number not in self._tiles:
                if not tiles_max:
                    return True
                read(_TILE_LEVELS, number)
                tiles_max -= 1
        return False

    def root(self, less: Mapping[int, int] = NOTHING_LESS) -> bytes:
        """Return the root of the tree."""
        return root_of(self.jobs(less), self._reader(less))

    def path(self, job: int, less: Mapping[int, int] = NOTHING_LESS) -> list[bytes]:
        """Return the inclusion proof of a job's leaf."""
        return inclusion_proof(job - 1, self.jobs(less), self._reader(less))

    def _reader(self, less: Mapping[int, int]) -> ReadNode:
        changed = {(job - 1) // _TILE for job in less}
        computed: dict[int, bytes] = {}

        def leaves(first: int, count: int) -> list[bytes]:
            numbers = range(first + 1, first + count + 1)
            return [history_leaf(history_salt(self._key, job), job, self.count(job, less)) for job in numbers]

        def tile(number: int) -> bytes:
            kept = computed if number in changed else self._tiles
            if number not in kept:
                kept[number] = _folded(leaves(number * _TILE, _TILE))
            return kept[number]

        def read(level: int, index: int) -> bytes:
            if level < _TILE_LEVELS:
                return _folded(leaves(index << level, 1 << level))
            tiles = 1 << (level - _TILE_LEVELS)
            return _folded([tile(number) for number in range(index * tiles, (index + 1) * tiles)])

        return read


def _folded(hashes: list[bytes]) -> bytes:
    """The root over so many hashes, a power of two."""
    assert all(len(one) == HASH_BYTES for one in hashes[:1])
    while len(hashes) > 1:
        hashes = [node_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
    return hashes[0]
