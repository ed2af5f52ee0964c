"""Commands that stage (`stage_in:COMMAND`, `stage_out:COMMAND`): run by a shell as the job's user, each ended whole.

What a command moves is its own affair: nobody knows what it should have moved. So its exit code counts, its last words
are the failure's message, and after a stage-in what lies in the buffer is counted and held against the capacity. What a
command left running is ended with it: nothing writes to a buffer that counts as staged, or reads one that is removed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Final, NamedTuple

from cluster.agent.files import Identity, opened, outside_target
from cluster.agent.transfer import NO_LIMIT_S, POLL_S, ProgramFailed, TransferFailed, end_descendants, last_words
from cluster.providers import guard
from cluster.system import Clock, become_subreaper
from replica.model import NOTHING_SPECIAL, Order

SHELL: Final = "/bin/sh"


class Held(NamedTuple):
    """What lies in a directory."""

    files: int
    size_bytes: int


def run_command(
    command: str, environment: dict[str, str], workdir: int, *, clock: Clock, poll: Callable[[int], None], stage: str
) -> None:
    """Run one command in the open directory `workdir`; ProgramFailed has its last words. OSError if none can be run."""

    def become(returned: int) -> None:
        os.close(returned)
        os.fchdir(workdir)
        os.set_inheritable(workdir, False)
        os.umask(0o022)
        os.execve(SHELL, [SHELL, "-c", command], environment)

    ran = guard.run(become, timeout_s=NO_LIMIT_S, clock=clock, keep=(workdir,), poll=poll, poll_s=POLL_S)
    left = end_descendants()
    if ran.code:
        raise ProgramFailed(f"the command of {stage} {guard.how(ran.code)}{last_words(ran)}")
    if left:
        raise ProgramFailed(
            f"the command of {stage} left processes that cannot be ended: {', '.join(map(str, left[:20]))}"
        )


class Commands:
    """The commands of one order, ready to be run by a worker that has become the job's user."""

    def __init__(
        self,
        order: Order,
        environment: dict[str, str],
        home: Identity,
        *,
        clock: Clock,
        poll: Callable[[int], None],
    ) -> None:
        """`environment` is all that they have; `poll` is told the number of each while it runs (guard.run)."""
        self._order = order
        self._environment = environment
        self._home = home
        self._clock = clock
        self._poll = poll
        self.started_at = self.ended_at = clock.now()

    def run(self) -> None:
        """Run them, one after the other; ProgramFailed or PathRefused says why not."""
        special = self._order.special or NOTHING_SPECIAL
        become_subreaper()
        self.started_at = self._clock.now()
        workdir = open_workdir(special.workdir_roots, self._order.workdir, self._home)
        try:
            for command in special.commands:
                run_command(
                    command,
                    self._environment,
                    workdir,
                    clock=self._clock,
                    poll=self._poll,
                    stage=self._order.stage,
                )
        finally:
            os.close(workdir)
            self.ended_at = self._clock.now()


def open_workdir(roots: tuple[str, ...], path: str, home: Identity) -> int:
    """Return a descriptor of the working directory, which must lie beneath one of `roots`; PathRefused."""
    with opened(outside_target(roots, path, "the working directory"), forbidden=home) as directory:
        return os.dup(directory)


def held_in(directory: int) -> Held:
    """Return what the open directory holds: each file once, however many names it has; links count as nothing.

    Nothing is followed. A directory that this user may not look into counts as empty; one that goes while it is looked
    at, too. TransferFailed for one that is deeper than can be looked into.
    """
    try:
        return _held_in(directory)
    except (RecursionError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EMFILE, errno.ENAMETOOLONG):
            raise
        raise TransferFailed(
            "what lies in the buffer cannot be counted: directories lie too deep in each other"
        ) from None


def _held_in(directory: int) -> Held:
    files, size_bytes = 0, 0
    seen: set[tuple[int, int]] = set()
    for _, _, names, descriptor in os.fwalk(".", dir_fd=directory, follow_symlinks=False):
        for name in names:
            try:
                status = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
            except FileNotFoundError:
                continue
            if not stat.S_ISREG(status.st_mode):
                continue
            if status.st_nlink > 1:
                identity = (status.st_dev, status.st_ino)
                if identity in seen:
                    continue
                seen.add(identity)
            files += 1
            size_bytes += status.st_size
    return Held(files, size_bytes)
