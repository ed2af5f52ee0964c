"""Programs that move data, and how each is called: rsync, rclone, and a site's own.

rsync and rclone work between two directories of this machine: no remote is configured and no configuration is read.

A site's own program (`template`) is a command line in which {source} and {destination} stand for paths. No shell reads
it. For a directory both paths end in `/`, and everything beneath the one goes into the other, which is there (and
empty, or has what an interrupted try left). For a single file both are paths of files. `rsync -a {source}
{destination}` and `cp -aT {source} {destination}` are such command lines; {kind} is `file` or `directory` for programs
that need to know."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from cluster.agent.transfer.records.errors import TransferFailed
from replica.model import template_fault, template_words


class Job(NamedTuple):
    """What a program is to copy at once."""

    source: int
    """An open directory."""
    scratch: int
    """The open directory that it copies to; files keep their names and the directories that they are in."""
    names: Sequence[bytes]
    """Regular files beneath `source`."""
    whole: bool
    """Whether `names` is everything beneath `source`."""


class Call(NamedTuple):
    """Call of a program: its arguments and its standard input."""

    argv: tuple[bytes, ...]
    """Without a shell; the first word is looked up in the standard places."""
    stdin: bytes = b""
    """What it reads on its standard input."""


class Backend(Protocol):
    """Such a program."""

    @property
    def name(self) -> str:
        """As it is configured, and as receipts name it."""
        ...

    @property
    def at_once(self) -> bool:
        """Whether it copies a whole item at once: a directory with all that is in it, instead of files that are
        named."""
        ...

    def fault(self, name: bytes) -> str | None:
        """Return why it cannot be told of a file, in words that follow `its name `; None if it can."""
        ...

    def call(self, job: Job) -> Call:
        """Return what is to be run; its working directory is `job.source`. TransferFailed if it cannot be."""
        ...


class Rsync:
    """Tells rsync every name, ended by a zero byte, so that any name goes."""

    name = "rsync"
    at_once = False

    def __init__(self, *, sparse: bool = True) -> None:
        """`sparse`: holes stay holes."""
        self._sparse = sparse

    def fault(self, name: bytes) -> str | None:
        """Return None: every name can be told."""
        return None

    def call(self, job: Job) -> Call:
        """Return how rsync is run."""
        options = [
            b"--from0",
            b"--files-from=-",
            b"--no-implied-dirs",
            # What a name leads to is copied only if it is a regular file: no links, devices or pipes.
            b"--no-links",
            b"--no-devices",
            b"--no-specials",
            # The permissions are ours to give; until then the files are their owner's.
            b"--chmod=D700,F600",
            b"--times",
            b"--whole-file",
            b"--inplace",
            b"--no-motd",
        ]
        if self._sparse:
            options.append(b"--sparse")
        # The prefix keeps names that begin with - # or ; from being anything but names.
        stdin = b"".join(b"./" + name + b"\0" for name in job.names)
        return Call((b"rsync", *options, b"./", b"/proc/self/fd/%d/" % job.scratch), stdin)


class Rclone:
    """Tells rclone the names, one a line."""

    name = "rclone"
    at_once = False

    def fault(self, name: bytes) -> str | None:
        """Return why rclone cannot be told of a file: it reads names by lines, and as UTF-8."""
        if b"\n" in name or b"\r" in name:
            return "has a line break"
        try:
            name.decode("utf-8")
        except UnicodeDecodeError:
            return "is not UTF-8"
        return None

    def call(self, job: Job) -> Call:
        """Return how rclone is run."""
        return Call(
            (
                b"rclone",
                b"copy",
                b".",
                b"/proc/self/fd/%d" % job.scratch,
                b"--files-from-raw=-",
                b"--no-traverse",
                b"--config=",
                b"--retries=1",
                b"--low-level-retries=1",
                b"--log-level=ERROR",
                b"--stats=0",
                b"--local-no-check-updated",
            ),
            b"".join(name + b"\n" for name in job.names),
        )


class Template:
    """Runs what the site configured."""

    name = "template"
    at_once = True

    def __init__(self, template: str) -> None:
        """TransferFailed if it is no command line."""
        fault = template_fault(template)
        if fault is not None:
            raise TransferFailed(
                f"the site's program for transfers cannot be run: its command line {fault}; set TransferTemplate"
            )
        self._words = [os.fsencode(word) for word in template_words(template)]

    def fault(self, name: bytes) -> str | None:
        """Return None: the program finds the names itself."""
        return None

    def call(self, job: Job) -> Call:
        """Return what is to be run for one item."""
        name = b"" if job.whole else job.names[0]
        paths = {
            b"{source}": _path(job.source) + b"/" + name,
            b"{destination}": _path(job.scratch) + b"/" + name,
            b"{kind}": b"directory" if job.whole else b"file",
        }
        words = []
        for word in self._words:
            for place, text in paths.items():
                if place in word:
                    word = word.replace(place, text)
                    break
            words.append(word)
        return Call(tuple(words))


def _path(descriptor: int) -> bytes:
    return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).rstrip(b"/")
