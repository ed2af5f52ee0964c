"""rsync, between two directories of this machine."""

from __future__ import annotations

from cluster.agent.transfer.backends.interface import Call, Job


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
        told = b"".join(b"./" + name + b"\0" for name in job.names)
        return Call((b"rsync", *options, b"./", b"/proc/self/fd/%d/" % job.scratch), told)
