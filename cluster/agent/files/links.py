"""Resolution of symbolic links on the way to a source, never leaving the directory that a path begins in.

The kernel follows no link: each component is opened with O_NOFOLLOW, a link's text is walked in its place, and `..`
returns to the previous directory. A link swapped meanwhile therefore leads at most elsewhere beneath the anchor.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from typing import Final

from forebay.cluster.agent.files.paths import Target, split

LINKS_MAX: Final = 40
"""Links followed for one path, count: the kernel's own limit."""

_LOOK: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC


class _LeadsOut(Exception):
    """A link leaves the anchor, forms a loop, or has no target."""


def leads_to(target: Target) -> Target | None:
    """Resolve all links of a path; return None if one leaves the anchor, forms a loop or has no target."""
    try:
        return target._replace(parts=_Walk(target).run())
    except (_LeadsOut, OSError):
        return None


def names_of(target: Target) -> tuple[tuple[str, ...], ...]:
    """Return the names, as components, by which an absolute link may refer to the anchor."""
    names = [os.readlink(f"/proc/self/fd/{target.anchor}")]
    if target.shown.startswith("/"):
        names.append(target.shown)
    return tuple(split(name, name) for name in names)


def beneath(text: str, names: Sequence[Sequence[str]]) -> tuple[str, ...] | None:
    """Return the components of an absolute path below a directory with one of these names, or None."""
    parts = tuple(part for part in text.split("/") if part not in ("", "."))
    for name in sorted(names, key=len, reverse=True):
        if parts[: len(name)] == tuple(name):
            return parts[len(name) :]
    return None


class _Walk:
    """Walk from an anchor along a path."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._todo = list(reversed(target.parts))
        self._way: list[tuple[str, int]] = []
        self._links = 0

    def run(self) -> tuple[str, ...]:
        """Return the names along the resolved path.

        Raises:
            _LeadsOut: A link cannot be followed.
            OSError: A component cannot be opened.
        """
        try:
            while self._todo:
                self._step(self._todo.pop())
            return tuple(name for name, _ in self._way)
        finally:
            self._back(0)

    def _step(self, name: str) -> None:
        if name in ("", "."):
            return
        if name == "..":
            if not self._way:
                raise _LeadsOut
            self._back(len(self._way) - 1)
            return
        found = os.open(name, _LOOK, dir_fd=self._way[-1][1] if self._way else self._target.anchor)
        if not stat.S_ISLNK(os.fstat(found).st_mode):
            self._way.append((name, found))
            return
        try:
            text = os.readlink("", dir_fd=found)
        finally:
            os.close(found)
        self._links += 1
        if self._links > LINKS_MAX:
            raise _LeadsOut
        parts: Sequence[str] | None = text.split("/")
        if text.startswith("/"):
            parts = beneath(text, names_of(self._target))
            if parts is None:
                raise _LeadsOut
            self._back(0)
        assert parts is not None
        self._todo.extend(reversed(parts))

    def _back(self, count: int) -> None:
        while len(self._way) > count:
            os.close(self._way.pop()[1])
