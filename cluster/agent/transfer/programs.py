"""programs."""

from __future__ import annotations

import os
import signal
from typing import Final

from cluster.agent.limits import KILL_PAUSE_S, KILL_ROUNDS_MAX
from cluster.agent.transfer.errors import TransferFailed
from cluster.providers import guard
from cluster.system import descendants, send

NO_LIMIT_S: Final = 10.0 * 366 * 86_400
"""In place of a time limit, seconds: the agent ends the worker, and with it the command, when it is late."""

MESSAGE_CHARACTERS: Final = 400
"""Characters of a program's last line that a failure repeats."""


class ProgramFailed(TransferFailed):
    """A program that ended with something else than 0; trying again may help."""


def last_words(ran: guard.Finished) -> str:
    """Return the last line that a program complained with, or else printed, in words that follow how it ended."""
    for said in (ran.complained, ran.printed):
        lines = said.decode("utf-8", "backslashreplace").strip().splitlines()
        if lines:
            line = "".join(character if character.isprintable() else "�" for character in lines[-1].strip())
            return f": {line[-MESSAGE_CHARACTERS:]}"
    return ", and said nothing"


def end_descendants() -> list[int]:
    """Kill every process that this one has started and adopted; return the ids of what cannot be killed.

    This process is their subreaper.
    """
    left: list[int] = []
    for _ in range(KILL_ROUNDS_MAX):
        left = descendants(os.getpid())
        for pid in left:
            send(pid, signal.SIGKILL)
        _reap()
        if not left:
            return []
        guard.pause(KILL_PAUSE_S)
    return left


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass
