"""Execution of a site's commands: checked, without a shell, with a minimal environment, and logged line by line."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final, NamedTuple

from forebay.cluster.providers import guard
from forebay.cluster.providers.interface import Local, OperationError, Provider
from forebay.cluster.providers.limits import LOGGED_BYTES_MAX, OUTPUT_BYTES_MAX
from forebay.cluster.providers.private_directory import MARK
from forebay.cluster.providers.trusted_programs import ProgramRefused, check_command
from forebay.cluster.system import Clock
from forebay.replica.model import Provision
from forebay.replica.values import plain

logger = logging.getLogger(__name__)

_PASSED_ON: Final = ("PATH", "LANG", "LC_ALL", "TMPDIR", MARK)


class CommandOutput(NamedTuple):
    """Result of a command: exit code, and standard output, or standard error if that is empty."""

    code: int
    text: str
    printed: bytes


class CommandRunner:
    """Runs commands with the site's environment."""

    def __init__(self, local: Local, clock: Clock) -> None:
        """Create a runner with the permitted programs and variables of `local`.

        PATH, LANG, LC_ALL and TMPDIR come from this process.
        """
        self._local = local
        self._environment = environment_for(local.environment)
        self._clock = clock

    def run(self, operation: str, path: str, arguments: Sequence[str], timeout_s: float) -> CommandOutput:
        """Run a command to its end.

        Raises:
            OperationError: It cannot be run or exceeds its time.
        """
        if not path:
            raise OperationError(
                operation,
                "the site's configuration names no program for this operation; see forebay config show",
                final=True,
            )
        try:
            program = check_command(path, self._local)
        except ProgramRefused as error:
            raise OperationError(operation, str(error), final=True) from error
        argv = (os.path.basename(path), *arguments)
        if any("\0" in argument for argument in argv):
            raise OperationError(operation, "an argument contains a NUL character", final=True)
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
        """Run a command.

        Raises:
            OperationError: Its exit code is not 0; the message has its output.
        """
        output = self.run(operation, path, arguments, timeout_s)
        if output.code != 0:
            raise failure(operation, path, output)
        return output


class CommandProvider(Provider):
    """Provider that runs a site's commands: GetSysState for most operations, GetSysStatus for the status."""

    def __init__(self, provision: Provision, local: Local, clock: Clock) -> None:
        """Prepare without running anything."""
        super().__init__(provision, local, clock)
        self._state = local.get_sys_state or provision.get_sys_state
        self._status = local.get_sys_status or provision.get_sys_status
        self._commands = CommandRunner(local, clock)


def failure(operation: str, path: str, output: CommandOutput) -> OperationError:
    """Return the error for a failed command."""
    return OperationError(operation, output.text or f"{path} {guard.describe_exit(output.code)} without output")


def environment_for(site: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return the complete environment of a call; `site` is `[provider] environment`."""
    return {name: os.environ[name] for name in _PASSED_ON if name in os.environ} | dict(site)


def timed_out(timeout_s: float, finished: guard.CallResult) -> str:
    """Return the message for a call that timed out, worded as in Slurm, with the IDs of unkillable processes."""
    message = f"Timeout @ {round(timeout_s * 1000)} msec"
    if finished.unkillable:
        message += f"; processes {', '.join(map(str, finished.unkillable[:20]))} cannot be killed"
    return message


def log_output(what: str, finished: guard.CallResult) -> None:
    """Log the beginning of a call's output, line by line."""
    for stream in (finished.printed, finished.complained):
        for line in stream[:LOGGED_BYTES_MAX].decode("utf-8", "replace").splitlines():
            if line.strip():
                logger.info("%s: %s", plain(what), plain(line.rstrip()))
