"""Which configuration is in force at which entry of the journal (thesis 4.1): from when it is appended (H13).

What is kept: the last configuration that is known to be committed, and those after it, which a truncation may undo. At
a start they are read again: the caller gives what snapshot and ledger say as of the applied index, the rest is in the
journal.
"""

from collections.abc import Iterable
from itertools import pairwise

from wal import BrokenInvariant, Configuration, Entry, Placed, decode_configuration, incarnation_of, is_configuration


class Configurations:
    """The configurations of one replica's journal, oldest first; the last one is in force."""

    def __init__(self, base: Placed) -> None:
        """Begin with `base`, which nothing in the journal can undo."""
        self._placed = [base]

    @property
    def in_force(self) -> Configuration:
        """The newest in the journal, committed or not: whoever counts, counts by this one."""
        return self._placed[-1].configuration

    @property
    def index(self) -> int:
        """Index of the entry that brought the one in force; 0 if no entry did."""
        return self._placed[-1].index

    def committed(self, commit_index: int) -> Configuration:
        """The newest that is known to be committed."""
        return next(known.configuration for known in reversed(self._placed) if self._is_settled(known, commit_index))

    def known(self) -> Iterable[Configuration]:
        """From the newest committed one on: a truncation may bring any of these into force."""
        return [placed.configuration for placed in self._placed]

    def appended(self, entries: Iterable[Entry], *, read_back: bool = False) -> bool:
        """Take note of entries that were appended; say whether another configuration is in force now.

        `read_back`: they were accepted before this replica started, so what its file says does not matter any more.
        CodecError for one that this release cannot read, BrokenInvariant for what no leader may append.
        """
        before = len(self._placed)
        for entry in entries:
            if is_configuration(entry.data):
                self._placed.append(Placed(entry.index, decode_configuration(entry.data)))
        for one, two in pairwise(self._placed[before - 1 :]):
            if one.configuration.version == 0:
                if not read_back:
                    _check_founders(one.configuration, two.configuration)
            else:
                _check_step(one.configuration, two)
        return len(self._placed) != before

    def truncated_from(self, index: int) -> bool:
        """Take note that the entries from `index` on are gone; say whether another configuration is in force now."""
        kept = [placed for placed in self._placed[1:] if placed.index < index]
        changed = len(kept) + 1 != len(self._placed)
        self._placed[1:] = kept
        return changed

    def installed(self, index: int, placed: Placed | None, last_index: int) -> bool:
        """Take note of a snapshot at `index` with the configuration `placed`, after which the journal has `last_index`.

        Say whether another configuration is in force now.
        """
        before = self._placed[-1]
        if placed is None:  # a machine that does not keep them: what was there up to the snapshot is all that is known
            placed = next((one for one in reversed(self._placed) if one.index <= index), self._placed[0])
        self._placed = [placed, *(one for one in self._placed if index < one.index <= last_index)]
        return self._placed[-1] != before

    def forget_before(self, commit_index: int) -> None:
        """Drop those that a newer committed one has replaced."""
        settled = [at for at, known in enumerate(self._placed) if self._is_settled(known, commit_index)]
        del self._placed[: settled[-1]]

    def _is_settled(self, placed: Placed, commit_index: int) -> bool:
        return placed is self._placed[0] or placed.index <= commit_index


def may_be_later(identity: str, committed: Configuration) -> bool:
    """Whether a member that `committed` does not have may have been added since: then it must be listened to."""
    return incarnation_of(identity) > committed.version


def _check_founders(file: Configuration, founded: Configuration) -> None:
    """Refuse to be one of other founders than the file says: two clusters could come of one."""
    if file.voters and founded.version == 1 and file.voter_ids != founded.voter_ids:
        raise BrokenInvariant(
            f"the cluster was founded with the replicas {', '.join(founded.voter_ids)}, but this replica's "
            f"configuration file says {', '.join(file.voter_ids)}; make the files equal, or let this replica join"
        )


def _check_step(one: Configuration, two: Placed) -> None:
    """Refuse what would break the rule that majorities of neighbours meet (thesis 4.1), whoever appended it."""
    new = two.configuration
    if new.version != one.version + 1 or len(set(one.voter_ids) ^ set(new.voter_ids)) > 1:
        raise BrokenInvariant(
            f"entry {two.index} has version {new.version} of the configuration with the voters "
            f"{', '.join(new.voter_ids)}; before it is version {one.version} with {', '.join(one.voter_ids)}"
        )
