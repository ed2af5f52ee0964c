"""The real journal and controller of a replica, observed by the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from forebay.cluster.server.controller import Controller
from forebay.snapshots import Image
from forebay.wal import Journal
from forebay.wal.configuration import Configuration, ConfigurationAt, decode_configuration, is_configuration
from forebay.wal.journal import Entry

if TYPE_CHECKING:
    from tests.simulation.world import World


class WatchedJournal(Journal):
    """The real journal; what is appended and committed is shown to the oracle.

    It keeps its own account of the configurations, to be compared with that of consensus.
    """

    world: World
    name: str
    placed: list[ConfigurationAt]
    """The configuration that nothing can undo, and those after it; the last one is in force."""

    @property
    def in_force(self) -> Configuration:
        """The members that count for this journal, by the oracle's account."""
        return self.placed[-1].configuration

    def read_configurations(self, base: ConfigurationAt) -> None:
        """Take `base` for what is known as of the applied mark, and read what the journal has after it."""
        self.placed = [base]
        index = max(self.base_index, self.applied_index)
        while index < self.last_index:
            for entry in self.entries(index + 1, max_bytes=1 << 20, max_entries=1000):
                self._note(entry)
                index = entry.index

    def _note(self, entry: Entry) -> None:
        if is_configuration(entry.data):
            self.placed.append(ConfigurationAt(entry.index, decode_configuration(entry.data)))

    def append(self, entries: Sequence[Entry]) -> None:
        super().append(entries)
        oracle = self.world.oracle
        for entry in entries:
            previous = self.term_of(entry.index - 1)
            if previous is not None:
                oracle.appended(self.name, entry.index, entry.term, entry.data, previous)
            if is_configuration(entry.data):
                before = self.placed[-1]
                self._note(entry)
                if self.world.look_inside and self.world.replicas[self.name].is_leader:
                    oracle.changed(self.name, before, self.placed[-1], entry.term)
                else:
                    oracle.members.seen(self.placed[-1].configuration)

    def truncate_from(self, index: int) -> None:
        super().truncate_from(index)
        self.placed[1:] = [placed for placed in self.placed[1:] if placed.index < index]

    def installed(self, index: int, placed: ConfigurationAt | None) -> None:
        """A snapshot was adopted, in which `placed` is in force; some of the journal may have been kept."""
        if placed is not None:
            later = [one for one in self.placed if index < one.index <= self.last_index]
            self.placed = [placed, *later]

    def set_commit(self, index: int) -> None:
        before = self.commit_index
        super().set_commit(index)
        self.world.oracle.committed(self.name, before, index, self.term_of, self.term)


class WatchedController(Controller):
    """The real controller; what it has applied or installed is compared with the history."""

    world: World
    place: str
    journal: WatchedJournal

    def apply(self, index: int, term: int, data: bytes) -> bool:
        if super().apply(index, term, data):
            return True
        self.world.replicas[self.place].loop.work(self.world.decide_s)
        self.world.applied(self.place, index, term, data, self.state)
        if is_configuration(data):
            self.world.oracle.members.holds(self.place, index, self._placed)
        return False

    def installed(self, image: Image) -> None:
        super().installed(image)
        self.journal.installed(image.index, image.configuration)
        self.world.note("install", self.place, image.index)
        self.world.counts["installs"] += 1
        self.world.oracle.holds(self.place, image.index, self.state)
        self.world.oracle.members.holds(self.place, image.index, self._placed)
