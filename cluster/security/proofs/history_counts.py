"""How many records the ledger has of each job, and a tree over that: what shows that records of a job are all of them.

Leaf j - 1 is that of job j. Jobs are numbered from 1 on and never anew, so the leaves only grow in number, and a count
only grows: also of a job that was purged from the state. A record of a job is a command of whose events one is about
it. Leaves are salted, so that who is shown that of one job learns nothing of the jobs beside it.
"""

import hmac
import struct
from array import array
from bisect import bisect_left
from collections.abc import Mapping

from cluster.security.proofs.leaves import SALT_BYTES
from cluster.security.proofs.tree import HASH_BYTES, ReadNode, inclusion_proof, leaf_hash, node_hash, root_of

HISTORY_HEAD = b"forebay-history/1\n"

_TILE_LEVELS = 8
_TILE = 1 << _TILE_LEVELS
_LEAF = struct.Struct(">QQ")
_NUMBER = struct.Struct(">Q")
_SALT = b"forebay audit history salt/1\n"

NOTHING_LESS: Mapping[int, int] = {}


def history_salt(disclosure_key: bytes, job: int) -> bytes:
    """The salt of a job's leaf: given away with that leaf, and with no other."""
    return hmac.digest(disclosure_key, _SALT + _NUMBER.pack(job), "sha256")[:SALT_BYTES]


def history_leaf(salt: bytes, job: int, count: int) -> bytes:
    """The hash of the leaf that says that there are so many records of a job; the salt has SALT_BYTES."""
    return leaf_hash(HISTORY_HEAD + salt + _LEAF.pack(job, count))


class HistoryCounts:
    """The counts as they are now, and the tree over them, now or as it was when there were fewer.

    A leaf for each job that there are records of, in the order of their numbers: these have gaps, since each
    incarnation of a cluster begins far above the one before. A job's first record comes after those of all lower ones.
    """

    def __init__(self, disclosure_key: bytes) -> None:
        self._key = disclosure_key
        self._jobs = array("Q")
        """Ascending."""
        self._counts = array("Q")
        """Of each of them."""
        self._tiles: dict[int, bytes] = {}
        """Roots over 256 leaves each, of those in which nothing has changed since they were computed."""

    def add(self, job: int, records: int = 1) -> None:
        """Count more records of a job."""
        position = bisect_left(self._jobs, job)
        if position == len(self._jobs) or self._jobs[position] != job:
            for number in range(position // _TILE, len(self._jobs) // _TILE + 1):
                self._tiles.pop(number, None)
            self._jobs.insert(position, job)
            self._counts.insert(position, 0)
        self._counts[position] += records
        self._tiles.pop(position // _TILE, None)

    def position(self, job: int) -> int | None:
        """Return which leaf a job has, from 0; None where nothing is counted of it."""
        position = bisect_left(self._jobs, job)
        return position if position < len(self._jobs) and self._jobs[position] == job else None

    def count(self, job: int, less: Mapping[int, int] = NOTHING_LESS) -> int:
        """Return how many records there are of a job; `less`: without so many of some jobs, the last ones."""
        position = self.position(job)
        return 0 if position is None else self._counts[position] - less.get(job, 0)

    def jobs(self, less: Mapping[int, int] = NOTHING_LESS) -> int:
        """Return how many jobs there are records of: as many leaves has the tree."""
        jobs = len(self._jobs)
        while jobs and not self._counts[jobs - 1] - less.get(self._jobs[jobs - 1], 0):
            jobs -= 1
        return jobs

    def prepare(self, tiles_max: int) -> bool:
        """Compute so many roots of tiles that are not known; return whether some are left."""
        read = self._reader(NOTHING_LESS)
        for number in range(len(self._jobs) // _TILE):
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
        """Return the inclusion proof of a job's leaf; LookupError where it has none."""
        position = self.position(job)
        if position is None:
            raise LookupError(f"nothing is counted of job {job}")
        return inclusion_proof(position, self.jobs(less), self._reader(less))

    def _reader(self, less: Mapping[int, int]) -> ReadNode:
        changed = {position // _TILE for job in less if (position := self.position(job)) is not None}
        computed: dict[int, bytes] = {}

        def leaves(first: int, count: int) -> list[bytes]:
            numbers = self._jobs[first : first + count]
            return [history_leaf(history_salt(self._key, job), job, self.count(job, less)) for job in numbers]

        def tile(number: int) -> bytes:
            kept = computed if number in changed else self._tiles
            if number not in kept:
                kept[number] = _full_tree_root(leaves(number * _TILE, _TILE))
            return kept[number]

        def read(level: int, index: int) -> bytes:
            if level < _TILE_LEVELS:
                return _full_tree_root(leaves(index << level, 1 << level))
            tiles = 1 << (level - _TILE_LEVELS)
            return _full_tree_root([tile(number) for number in range(index * tiles, (index + 1) * tiles)])

        return read


def _full_tree_root(hashes: list[bytes]) -> bytes:
    """The root over so many hashes, a power of two."""
    assert all(len(one) == HASH_BYTES for one in hashes[:1])
    while len(hashes) > 1:
        hashes = [node_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
    return hashes[0]
