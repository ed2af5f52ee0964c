"""Lists of files to move (`type=list`): a file outside with one path a line.

    stage_in    each line is an absolute path outside
    stage_out   each line is a path in a buffer, such as $DW_JOB_STRIPED/out
    both        the file goes into the directory that is the transfer's destination, under the last part of its path

A line is the whole path, blanks in it and around it included. Empty lines and lines that begin with `#` are skipped: no
path begins so. Two lines that would become one file are refused, since one would replace the other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from cluster.agent.files import Identity, PathRefused, kind_of, opened_parent, outside_target, split
from cluster.system import closing

LIST_BYTES_MAX: Final = 32 * 1024 * 1024
"""A file that lists what to move, bytes: a third of a kilobyte for each of the lines that may be."""

LIST_LINES_MAX: Final = 100_000
"""Files that one list may name, count: each costs about a kilobyte of memory; more of them are a directory."""

_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Listed(NamedTuple):
    """One line: which it is (from 1), the path as it stands there, and its last part."""

    line: int
    path: str
    name: str


def read_list(roots: tuple[str, ...], path: str, barred: Identity) -> list[Listed]:
    """Return what the file at `path`, which must lie beneath one of `roots`, lists.

    PathRefused names the file, and the line, of what cannot be; OSError as the file system has it.
    """
    return list(_lines(_content(roots, path, barred), path))


def _content(roots: tuple[str, ...], path: str, barred: Identity) -> bytes:
    with opened_parent(outside_target(roots, path, "a list"), forbidden=barred) as (directory, name):
        try:
            # A look first: opening a device or a pipe can do something.
            _check_kind(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode, path)
            descriptor = os.open(name, _READ, dir_fd=directory)
        except FileNotFoundError as error:
            raise PathRefused(f"the list {path} does not exist") from error
    with closing(descriptor):
        _check_kind(os.fstat(descriptor).st_mode, path)
        with os.fdopen(os.dup(descriptor), "rb") as file:
            data = file.read(LIST_BYTES_MAX + 1)
    if len(data) > LIST_BYTES_MAX:
        raise PathRefused(f"the list {path} is longer than {LIST_BYTES_MAX} bytes; stage a directory instead")
    return data


def _check_kind(mode: int, path: str) -> None:
    if kind_of(mode) != "regular file":
        raise PathRefused(f"the list {path} is a {kind_of(mode)}; name a regular file")


def _lines(data: bytes, path: str) -> Iterator[Listed]:
    seen: dict[str, int] = {}
    for number, line in enumerate(data.split(b"\n"), start=1):
        text = os.fsdecode(line.removesuffix(b"\r"))
        if not text or text.startswith("#"):
            continue
        try:
            parts = split(text, text)
        except PathRefused as error:
            raise PathRefused(f"the list {path}, line {number}: {error}") from error
        if not parts or text.endswith("/"):
            raise PathRefused(f"the list {path}, line {number}: {text!r} names no file; write one file a line")
        if parts[-1] in seen:
            raise PathRefused(
                f"the list {path}, lines {seen[parts[-1]]} and {number}: both would become {parts[-1]!r}; "
                "stage one of them with type=file and another destination"
            )
        if len(seen) >= LIST_LINES_MAX:
            raise PathRefused(f"the list {path} names more than {LIST_LINES_MAX} files; stage a directory instead")
        seen[parts[-1]] = number
        yield Listed(number, text, parts[-1])
