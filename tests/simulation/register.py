"""Membership register: the configurations of the history, and their invariants (thesis 4)."""

from __future__ import annotations

from collections.abc import Callable

from forebay.wal.configuration import ChangeKind, Configuration, ConfigurationAt, incarnation_of

BY_OPERATORS = (ChangeKind.ADD, ChangeKind.REMOVE, ChangeKind.REPLACE)


class Register:
    """The agreed configurations, and those that some journal has after them."""

    def __init__(self, violate: Callable[[str], None]) -> None:
        self._violate = violate
        self.placed: list[ConfigurationAt] = []
        """Agreed, oldest first: the entry is committed and somebody has applied it."""
        self._seen: dict[tuple[int, tuple[str, ...], tuple[str, ...]], Configuration] = {}
        self._ids: set[str] = set()
        self._commands: dict[bytes, int] = {}

    @property
    def newest(self) -> Configuration | None:
        """The last one that was agreed on; None before the cluster was founded."""
        return self.placed[-1].configuration if self.placed else None

    def at(self, index: int) -> ConfigurationAt | None:
        """Return the one that is in force for whoever has applied everything up to `index`, and no more."""
        return next((placed for placed in reversed(self.placed) if placed.index <= index), None)

    def seen(self, configuration: Configuration) -> None:
        """Somebody has this one in the journal: it may be agreed on."""
        learners = tuple(member.id for member in configuration.learners)
        self._seen[configuration.version, configuration.voter_ids, learners] = configuration

    def possible(self) -> list[Configuration]:
        """Return those by which somebody may count now or later: the newest agreed one, and what follows it."""
        newest = self.newest
        if newest is None:
            return list(self._seen.values())
        for key in [key for key in self._seen if key[0] <= newest.version]:
            del self._seen[key]
        return [newest, *self._seen.values()]

    def agreed(self, index: int, configuration: Configuration) -> None:
        """The next configuration of the history: one member apart, under an id that nobody had, asked for once."""
        before = self.newest
        said = f"version {configuration.version} of the configuration (entry {index})"
        if before is None:
            if configuration.version != 1:
                self._violate(f"the cluster begins with {said}")
            self._ids.update(member.id for member in configuration.members())
        else:
            if configuration.version != before.version + 1:
                self._violate(f"{said} follows version {before.version}")
            if len(set(before.voter_ids) ^ set(configuration.voter_ids)) > 1:
                self._violate(f"{said} has the voters {configuration.voter_ids}; before it {before.voter_ids} voted")
            known = {member.id for member in before.members()}
            for member in configuration.members():
                if member.id in known:
                    continue
                if member.id in self._ids or incarnation_of(member.id) != configuration.version:
                    self._violate(f"{said} adds a member under the id {member.id}, which is not new")
                if configuration.votes(member.id):
                    self._violate(f"{said} lets {member.id} vote, who has learned nothing yet")
                self._ids.add(member.id)
            change = configuration.change
            if change.id and change.action in BY_OPERATORS:
                earlier = self._commands.setdefault(change.id, configuration.version)
                if earlier != configuration.version:
                    self._violate(f"exactly once: {said} carries out a command again; version {earlier} had done it")
        self.placed.append(ConfigurationAt(index, configuration))

    def holds(self, name: str, index: int, placed: ConfigurationAt | None) -> None:
        """What a replica takes for the members, after an entry, is what the history says."""
        known = self.at(index)
        if placed != known:
            self._violate(
                f"{name} takes version {_version(placed)} of the configuration for the one of entry {index}; it is "
                f"version {_version(known)}"
            )

    def removed(self, name: str, identity: str, version: int) -> None:
        """A replica was told that it is no member from `version` on: that must have been agreed, and be so."""
        agreed = next((one.configuration for one in self.placed if one.configuration.version == version), None)
        if agreed is None:  # committed somewhere, and not applied yet
            agreed = next((one for one in self._seen.values() if one.version == version), None)
        if agreed is None:
            self._violate(f"{name} is told that version {version} removed it, which is not agreed")
        elif agreed.holds(identity) or incarnation_of(identity) > version:
            self._violate(f"{name} is told that version {version} removed it; {identity} is a member there, or later")


def _version(placed: ConfigurationAt | None) -> int:
    return 0 if placed is None else placed.configuration.version
