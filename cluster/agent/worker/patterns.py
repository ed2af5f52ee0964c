"""Patterns of transfers (`source=/data/*/run-?.h5`): find the files or directories that match.

Names are read from open directories as the job's user, and no link is followed on the way, so a match lies below the
directory before the pattern. As in a shell, `*` and `?` do not match a slash, nor a dot at the beginning of a name.
Matches are sorted by their names' bytes, so each attempt has the same order.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
from collections.abc import Callable, Iterator
from typing import Final

from forebay.cluster.agent.files import FileIdentity, PathRefused, Target, identity_of, join, open_target, split
from forebay.cluster.system import closing, names_in, open_directory
from forebay.replica.grammar import is_pattern

MATCHES_MAX: Final = 100_000
"""Matches of one pattern, count: as many as a list may have lines, and each costs as much memory."""

NAMES_READ_MAX: Final = 1_000_000
"""Names compared with one pattern, count: about a second. Stage more as a directory."""

Match = tuple[str, ...]
"""Path of a match below the directory before the pattern."""


def find_matches(top: Target, pattern: str, *, directories: bool, barred: FileIdentity | None = None) -> list[Match]:
    """Return the files, or with `directories` the directories, below `top` that match; `top` stays open.

    A link matches if it leads to such a file or directory.

    Raises:
        PathRefused: A directory cannot be read, there are too many matches, or two have the same last name.
    """
    search = _Search(join(top.shown, top.parts), split(pattern, pattern), barred, directories=directories)
    with open_target(top._replace(anchor=os.dup(top.anchor)), forbidden=barred) as directory:
        found = list(search.below(directory, (), 0))
    named: dict[str, Match] = {}
    for match in found:
        other = named.setdefault(match[-1], match)
        if other is not match:
            raise PathRefused(
                f"{'/'.join(other)} and {'/'.join(match)} would both become {match[-1]!r}; "
                "write a directive with its own destination for each directory"
            )
    return found


class _Search:
    """Search below one directory."""

    def __init__(self, shown: str, parts: Match, barred: FileIdentity | None, *, directories: bool) -> None:
        self._shown = shown
        self._tests = [_test_of(part) for part in parts]
        self._parts = parts
        self._barred = barred
        self._directories = directories
        self._names = self._matches = 0

    def below(self, directory: int, path: Match, depth: int) -> Iterator[Match]:
        """Yield the matches in an open directory, whose names are compared with the part `depth` of the pattern."""
        test, is_last = self._tests[depth], depth == len(self._tests) - 1
        for name in [self._parts[depth]] if test is None else self._matching(directory, path, test):
            found = (*path, name)
            if is_last:
                if self._is_wanted(directory, name):
                    self._count_match()
                    yield found
                continue
            try:
                inner = open_directory(name, dir_fd=directory)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:
                if _is_link(directory, name):
                    continue
                raise PathRefused(f"{join(self._shown, found)} cannot be opened: {error.strerror}") from error
            with closing(inner):
                if identity_of(inner) != self._barred:
                    yield from self.below(inner, found, depth + 1)

    def _matching(self, directory: int, path: Match, test: Callable[[str], object]) -> list[str]:
        try:
            names = names_in(directory)
        except OSError as error:
            raise PathRefused(f"{join(self._shown, path)} cannot be read: {error.strerror}") from error
        self._names += len(names)
        if self._names > NAMES_READ_MAX:
            raise PathRefused(
                f"the pattern is compared with more than {NAMES_READ_MAX} names below {self._shown}; "
                "stage a directory instead"
            )
        return sorted(filter(test, names), key=os.fsencode)

    def _is_wanted(self, directory: int, name: str) -> bool:
        try:
            mode = os.stat(name, dir_fd=directory).st_mode
        except OSError:
            # It is gone, or a link that leads nowhere.
            return False
        return stat.S_ISDIR(mode) if self._directories else stat.S_ISREG(mode)

    def _count_match(self) -> None:
        self._matches += 1
        if self._matches > MATCHES_MAX:
            raise PathRefused(
                f"more than {MATCHES_MAX} names match below {self._shown}; stage a directory, or use several directives"
            )


def _test_of(part: str) -> Callable[[str], object] | None:
    """Return a test of names for a part of a pattern, or None if only the part itself matches."""
    if not is_pattern(part):
        return None
    # The expression is of atomic groups, so a match never takes more than the product of both lengths.
    matches = re.compile(fnmatch.translate(part)).match
    if part.startswith("."):
        return matches
    return lambda name: not name.startswith(".") and matches(name)


def _is_link(directory: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)
    except OSError:
        return False
