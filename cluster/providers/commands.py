"""Running one of a site's commands: checked, without a shell, with an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from cluster.providers import guard
from cluster.providers.environment import environment_for
from cluster.providers.interface import OperationError
from cluster.providers.limits import OUTPUT_BYTES_MAX
from cluster.providers.saying import log_output, timed_out
from cluster.providers.trust import ProgramRefused, check_command
from cluster.system import Clock


class Said(NamedTuple):
    """How a command ended, and what it printed: standard output, or standard error where that is empty."""

    code: int
    text: str
    printed: bytes


class Commands:
    """Runs commands with the environment that the site wants for them."""

    def __init__(self, environment: tuple[tuple[str, str], ...], clock: Clock) -> None:
        """`environment` is added to PATH, LANG, LC_ALL and TMPDIR of this process."""
        self._environment = environment_for(environment)
        self._clock = clock

    def run(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> Said:
        """Run it to its end; OperationError if it cannot be run, is over its time or prints without end."""
        if not path:
            raise OperationError(
                operation, "the site's configuration names no program for it; see forebay config show", final=True
            )
        try:
            program = check_command(path)
        except ProgramRefused as error:
            raise OperationError(operation, str(error), final=True) from error
        argv = (os.path.basename(path), *arguments)
        if any("\0" in argument for argument in argv):
            raise OperationError(operation, "an argument has a NUL character in it", final=True)
        try:
            finished = guard.execute(argv, self._environment, timeout_s=timeout_s, clock=self._clock, program=program)
        except OSError as error:
            raise OperationError(operation, f"{path} cannot be run: {error.strerror}") from error
        log_output(f"{os.path.basename(path)} {' '.join(arguments[:4])}", finished)
        if finished.timed_out:
            raise OperationError(operation, timed_out(timeout_s, finished))
        text = (finished.printed.strip() or finished.complained.strip())[:OUTPUT_BYTES_MAX].decode("utf-8", "replace")
        return Said(finished.code, text, finished.printed)

    def check(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> Said:
        """Run it; OperationError with what it said if its exit code is not 0."""
        said = self.run(operation, path, arguments, timeout_s)
        if said.code != 0:
            raise failure(operation, path, said)
        return said


def failure(operation: str, path: str, said: Said) -> OperationError:
    """Return the error that a command's end is."""
    return OperationError(operation, said.text or f"{path} {guard.how(said.code)} and said nothing")
