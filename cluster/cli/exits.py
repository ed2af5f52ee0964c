"""How a command ends: the exit codes, and the errors that carry them.

An error that a person sees is one sentence that says what is wrong, and one that says what to do. `Failure` holds
both; only the outermost function prints it, so nothing below can end in a traceback.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import Final, TypeVar

T = TypeVar("T")


class ExitCode(IntEnum):
    """The exit codes of `forebay`: part of its interface, never renumbered."""

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
        ExitCode.REFUSED: "the present state does not allow it, it has no effect yet, or the queue is full",
        ExitCode.BAD_INPUT: "bad input: the command line, the configuration, the script or the request is wrong",
        ExitCode.NOT_FOUND: "what was named does not exist",
        ExitCode.UNREACHABLE: "no replica answered, or none could lead, within the deadline; nothing was changed",
        ExitCode.OUTCOME_UNKNOWN: "sent, but no answer came within the deadline: it may or may not have happened",
        ExitCode.PERMISSION_DENIED: "the certificate, or the file permissions, do not allow it",
        ExitCode.VERIFICATION_FAILED: "a ledger, snapshot, digest or decision is not what it must be",
        ExitCode.FAULT: "a fault of Forebay itself, please report it",
        ExitCode.INTERRUPTED: "ended from the keyboard",
    }
)
"""One phrase for each exit code, as shown in docs/reference/cli.md."""

SERVE_MEANINGS: Final = MappingProxyType(
    {
        0: "stopped on request",
        64: "wrong usage",
        66: "its storage is refused: damaged, of another replica or cluster, or empty where it must not be",
        69: "an address of it cannot be used",
        70: "it stopped itself rather than guess on: what it said last on stderr is why",
        76: "it met what only a later release knows: start the release that it names, on the same directory",
        77: "it is no member any more: removed, replaced, or of an incarnation of the cluster that is over",
        78: "the configuration or a certificate is refused",
    }
)
"""One phrase for each code with which the process of `forebay run replica` ends, numbered as in sysexits.h."""

INVALID_REQUEST_LINE: Final = "Burst Buffer request invalid"
"""Slurm's one sentence for every refused burst-buffer request: printed last, for scripts that look for it."""


PERMISSION_LINE: Final = "Burst Buffer permission denied"
"""The last line where a user may not have a burst buffer, as in Slurm."""

NODE_COUNT_LINE: Final = "Node count specification invalid"
"""The last line where a job of no nodes asks for more than persistent buffers, or for nothing; as in Slurm."""

BBF_LINE: Final = "Invalid --bbf specification"
"""The last line where the file of --bbf cannot be read, as in Slurm."""


FAILURES_SHOWN_MAX: Final = 64
"""Failures of one command that are printed, count: a screen or two."""


class Failure(Exception):
    """A command that cannot go on: `sentence` says what is wrong, `remedy` what to do, `place` where."""

    def __init__(
        self, code: ExitCode, sentence: str, remedy: str = "", *, place: str = "", last: str = "", kind: str = ""
    ) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence
        self.remedy = remedy
        self.place = place
        self.last = last
        """The last line, byte for byte as Slurm prints it; empty: none."""
        self.kind = kind
        """The code that the API gave; empty: it did not come from there."""
        self.others: tuple[Failure, ...] = ()
        """Further failures that were found at the same time."""

    def lines(self) -> list[str]:
        """Return what is printed on stderr, one element a line."""
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
    """Return one failure for several, with the exit code of the first and the first last line that any of them has."""
    first, *others = failures
    first.others = (*first.others, *others)
    first.last = next((one.last for one in failures if one.last), "")
    return first


def bad_input(sentence: str, remedy: str, *, place: str = "") -> Failure:
    """Return the failure for something that the user wrote wrongly."""
    return Failure(ExitCode.BAD_INPUT, sentence, remedy, place=place)


def convert_input(text: str, convert: Callable[[str], T], place: str) -> T:
    """Return what a text that the user wrote says; bad input at `place` where `convert` raises ValueError.

    The error's text is a sentence and a remedy, with "; " between them.
    """
    try:
        return convert(text)
    except ValueError as error:
        sentence, _, remedy = str(error).partition("; ")
        raise bad_input(sentence, remedy, place=place) from None
