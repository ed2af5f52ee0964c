"""A site's own program: a command line in which {source} and {destination} stand for paths. No shell reads it.

For a directory both paths end in `/`, and everything beneath the one goes into the other, which is there (and empty, or
has what an interrupted try left). For a single file both are paths of files. `rsync -a {source} {destination}` and
`cp -aT {source} {destination}` are such command lines; {kind} is `file` or `directory` for programs that need to know.
"""

from __future__ import annotations

import os

from cluster.agent.transfer.backends.interface import Call, Job
from cluster.agent.transfer.errors import TransferFailed
from replica.model import template_fault, template_words


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
        places = {
            b"{source}": _path(job.source) + b"/" + name,
            b"{destination}": _path(job.scratch) + b"/" + name,
            b"{kind}": b"directory" if job.whole else b"file",
        }
        words = []
        for word in self._words:
            for place, text in places.items():
                if place in word:
                    word = word.replace(place, text)
                    break
            words.append(word)
        return Call(tuple(words))


def _path(descriptor: int) -> bytes:
    return os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")).rstrip(b"/")
