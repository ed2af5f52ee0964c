"""Run of a site's command: checked, without a shell, with little of this process's environment; and the log of a call.

The log has one line for one thing, whatever a site's program wrote in it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from cluster.providers import guard
from cluster.providers.interface import Local, OperationError, Provider
from cluster.providers.limits import LOGGED_BYTES_MAX, OUTPUT_BYTES_MAX
from cluster.providers.private_directory import MARK
from cluster.providers.trusted_programs import ProgramRefused, check_command
from cluster.system import Clock
from replica.model import Provision
from replica.values import plain

logger = logging.getLogger(__name__)

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", MARK)


class CommandOutput(NamedTuple):
    """End of a command, and what it printed: standard output, or standard error where that is empty."""

    code: int
    text: str
    printed: bytes


class Commands:
    """Runs commands with the environment that the site wants for them."""

    def __init__(self, local: Local, clock: Clock) -> None:
        """`local` says which may be run here, and what is added to PATH, LANG, LC_ALL and TMPDIR of this process."""
        self._local = local
        self._environment = environment_for(local.environment)
        self._clock = clock

    def run(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> CommandOutput:
        """Run it to its end; OperationError if it cannot be run, is over its time or prints without end."""
        if not path:
            raise OperationError(
                operation, "the site's configuration names no program for it; see forebay config show", final=True
            )
        try:
            program = check_command(path, self._local)
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
        return CommandOutput(finished.code, text, finished.printed)

    def check(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> CommandOutput:
        """Run it; OperationError with what it said if its exit code is not 0."""
        output = self.run(operation, path, arguments, timeout_s)
        if output.code != 0:
            raise failure(operation, path, output)
        return output


class CommandProvider(Provider):
    """A provider whose operations are a site's commands: GetSysState for most, GetSysStatus for the status."""

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare; nothing is run yet."""
        super().__init__(provision, local, clock)
        self._state = local.get_sys_state or provision.get_sys_state
        self._status = local.get_sys_status or provision.get_sys_status
        self._commands = Commands(local, clock)


def failure(operation: str, path: str, output: CommandOutput) -> OperationError:
    """Return the error that a command's end is."""
    return OperationError(operation, output.text or f"{path} {guard.how(output.code)} and said nothing")


def environment_for(site: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the whole environment of a call; `site` is `[provider] environment`."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | dict(site)


def timed_out(timeout_s: float, finished: guard.Finished) -> str:
    """Return what is said of a call that was over its time, in Slurm's words, and what could not be killed."""
    message = f"Timeout @ {round(timeout_s * 1000)} msec"
    if finished.unkillable:
        message += f"; processes {', '.join(map(str, finished.unkillable[:20]))} cannot be killed"
    return message


def log_output(what: str, finished: guard.Finished) -> None:
    """Log the beginning of what a call printed, a line each."""
    for stream in (finished.printed, finished.complained):
        for line in stream[:LOGGED_BYTES_MAX].decode("utf-8", "replace").splitlines():
            if line.strip():
                logger.info("%s: %s", plain(what), plain(line.rstrip()))
