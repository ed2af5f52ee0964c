"""Exit codes of commands, and the errors that carry them.

An error has a sentence with the cause and a sentence with the remedy. `Failure` holds both; only the outermost
function prints it, so no command ends in a traceback.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")


class ExitCode(IntEnum):
    """Exit code of `forebay`: part of its interface, never renumbered."""

    OK = 0
    REFUSED = 1
    BAD_INPUT = 2
    NOT_FOUND = 3
    UNREACHABLE = 4
    OUTCOME_UNKNOWN = 5
    PERMISSION_DENIED = 6
    VERIFICATION_FAILED = 7
    FAULT = 70
    INTERRUPTED = 130


MEANINGS: Final = MappingProxyType(
    {
        ExitCode.OK: "done",
        ExitCode.REFUSED: "rejected: the present state forbids the change, its effect is delayed, or a queue is full",
        ExitCode.BAD_INPUT: "bad input: an error in the command line, the configuration, the script or the request",
        ExitCode.NOT_FOUND: "the named object does not exist",
        ExitCode.UNREACHABLE: "no replica answered, or there was no leader, within the deadline; nothing was changed",
        ExitCode.OUTCOME_UNKNOWN: "no answer within the deadline: the change may or may not have happened",
        ExitCode.PERMISSION_DENIED: "permission denied by the certificate's role or by file permissions",
        ExitCode.VERIFICATION_FAILED: "verification failed: a ledger, snapshot, digest or decision differs",
        ExitCode.FAULT: "internal error of Forebay; please report it",
        ExitCode.INTERRUPTED: "interrupted from the keyboard, or not confirmed",
    }
)
"""One phrase for each exit code, as shown in docs/reference/exit-codes.md."""

SERVE_MEANINGS: Final = MappingProxyType(
    {
        0: "stopped on request",
        64: "usage error",
        66: "storage rejected: damaged, of another replica or cluster, or empty although it must not be",
        69: "an address cannot be used",
        70: "internal error: the last line on stderr has the cause",
        76: "the ledger needs a later release: start the release that stderr names, on the same directory",
        77: "no longer a member: removed, replaced, or of an earlier incarnation of the cluster",
        78: "invalid configuration or certificate",
    }
)
"""One phrase for each code with which the process of `forebay run replica` ends, numbered as in sysexits.h."""

INVALID_REQUEST_LINE: Final = "Burst Buffer request invalid"
"""Slurm's sentence for every rejected burst-buffer request: printed last, for scripts that search for it."""


PERMISSION_LINE: Final = "Burst Buffer permission denied"
"""Last line if the user is not allowed burst buffers, as in Slurm."""

NODE_COUNT_LINE: Final = "Node count specification invalid"
"""Last line if a job without nodes requests more than persistent buffers, or nothing; as in Slurm."""

BBF_LINE: Final = "Invalid --bbf specification"
"""Last line if the file of --bbf cannot be read, as in Slurm."""


FAILURES_SHOWN_MAX: Final = 64
"""Maximum number of failures of one command that are printed: a screen or two."""


class Failure(Exception):
    """Error that ends a command: `sentence` has the cause, `remedy` the action to take, `place` the position."""

    def __init__(
        self, code: ExitCode, sentence: str, remedy: str = "", *, place: str = "", last: str = "", kind: str = ""
    ) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.remedy = remedy
        self.place = place
        self.last = last
        """Last line, byte for byte as Slurm prints it, or empty."""
        self.kind = kind
        """Error code of the API; empty if the error is not from there."""
        self.others: tuple[Failure, ...] = ()
        """Further failures found at the same time."""

    def lines(self) -> list[str]:
        """Return the lines to print on stderr."""
        lines = [line for one in (self, *self.others[: FAILURES_SHOWN_MAX - 1]) for line in one._own_lines()]
        more = len(self.others) + 1 - FAILURES_SHOWN_MAX
        if more > 0:
            lines.append(f"forebay: {more} more errors are not shown")
        if self.last:
            lines.append(self.last)
        return lines

    def _own_lines(self) -> list[str]:
        where = f"{self.place}: " if self.place else ""
        lines = [f"forebay: {where}{self.sentence}"]
        if self.remedy:
            lines.append(f"  what to do: {self.remedy}")
        return lines


def join_failures(failures: Sequence[Failure]) -> Failure:
    """Return one failure for several, with the first exit code and the first `last` line among them."""
    first, *others = failures
    first.others = (*first.others, *others)
    first.last = next((one.last for one in failures if one.last), "")
    return first


def bad_input(sentence: str, remedy: str, *, place: str = "") -> Failure:
    """Return the failure for invalid user input."""
    return Failure(ExitCode.BAD_INPUT, sentence, remedy, place=place)


def convert_input(text: str, convert: Callable[[str], T], place: str) -> T:
    """Return the converted user input.

    The text of a ValueError from `convert` is a sentence and a remedy, with "; " between them.

    Raises:
        Failure: bad input at `place`, if `convert` raises ValueError.
    """
    try:
        return convert(text)
    except ValueError as error:
        sentence, _, remedy = str(error).partition("; ")
        raise bad_input(sentence, remedy, place=place) from None
