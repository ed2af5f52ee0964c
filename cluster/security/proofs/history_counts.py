"""Record counts of all jobs, and a Merkle tree over them, which proves that a job's records are complete.

Leaf j - 1 belongs to job j. Job IDs start at 1 and are never reused, so leaves are only added and counts only grow,
even for purged jobs. A record of a job is a command with at least one event about the job. Leaves are salted, so that
disclosing one job's leaf reveals nothing about other jobs.
"""

import hmac
import struct
from array import array
from bisect import bisect_left
from collections.abc import Mapping

from forebay.cluster.security.proofs.leaves import SALT_BYTES
from forebay.cluster.security.proofs.tree import HASH_BYTES, ReadNode, inclusion_proof, leaf_hash, node_hash, root_of

HISTORY_HEAD = b"forebay-history/1\n"

_TILE_LEVELS = 8
_TILE = 1 << _TILE_LEVELS
_LEAF = struct.Struct(">QQ")
_NUMBER = struct.Struct(">Q")
_SALT = b"forebay audit history salt/1\n"

NOTHING_LESS: Mapping[int, int] = {}


def history_salt(disclosure_key: bytes, job: int) -> bytes:
    """Return the salt of a job's leaf, which is disclosed with that leaf only."""
    return hmac.digest(disclosure_key, _SALT + _NUMBER.pack(job), "sha256")[:SALT_BYTES]


def history_leaf(salt: bytes, job: int, count: int) -> bytes:
    """Return the hash of a job's count leaf; the salt has SALT_BYTES."""
    return leaf_hash(HISTORY_HEAD + salt + _LEAF.pack(job, count))


class HistoryCounts:
    """Record counts of all jobs and the tree over them, for the present ledger or a prefix of it.

    Each job with records has a leaf, ordered by job ID. IDs have gaps, because each incarnation of a cluster starts far
    above the previous one. A job's first record follows those of all lower IDs.
    """

    def __init__(self, disclosure_key: bytes) -> None:
        self._key = disclosure_key
        self._jobs = array("Q")
        """Job IDs, ascending."""
        self._counts = array("Q")
        """Record count of each job."""
        self._tiles: dict[int, bytes] = {}
        """Cached roots over 256 leaves each, if unchanged."""

    def add(self, job: int, records: int = 1) -> None:
        """Add records to a job's count."""
        position = bisect_left(self._jobs, job)
        if position == len(self._jobs) or self._jobs[position] != job:
            for number in range(position // _TILE, len(self._jobs) // _TILE + 1):
                self._tiles.pop(number, None)
            self._jobs.insert(position, job)
            self._counts.insert(position, 0)
        self._counts[position] += records
        self._tiles.pop(position // _TILE, None)

    def position(self, job: int) -> int | None:
        """Return a job's leaf position, from 0; None without records."""
        position = bisect_left(self._jobs, job)
        return position if position < len(self._jobs) and self._jobs[position] == job else None

    def count(self, job: int, less: Mapping[int, int] = NOTHING_LESS) -> int:
        """Return a job's record count; `less` subtracts the latest records of some jobs."""
        position = self.position(job)
        return 0 if position is None else self._counts[position] - less.get(job, 0)

    def jobs(self, less: Mapping[int, int] = NOTHING_LESS) -> int:
        """Return the number of jobs with records, which is the size of the tree."""
        jobs = len(self._jobs)
        while jobs and not self._counts[jobs - 1] - less.get(self._jobs[jobs - 1], 0):
            jobs -= 1
        return jobs

    def prepare(self, tiles_max: int) -> bool:
        """Compute up to `tiles_max` missing tile roots; return True if more are missing."""
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
        """Return the inclusion proof of a job's leaf.

        Raises:
            LookupError: The job has no records.
        """
        position = self.position(job)
        if position is None:
            raise LookupError(f"no records of job {job} are counted")
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
    """Return the root over a power of two of hashes."""
    assert all(len(one) == HASH_BYTES for one in hashes[:1])
    while len(hashes) > 1:
        hashes = [node_hash(left, right) for left, right in zip(hashes[::2], hashes[1::2], strict=True)]
    return hashes[0]
