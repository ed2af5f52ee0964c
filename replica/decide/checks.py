"""Validation of job requests. A submit runs all checks, an update those of the changed fields.

A check raises RejectionError. The command handler catches it once, and returns the rejection it carries.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import TypeVar

from forebay.replica.grammar import path_fault, split_inside
from forebay.replica.model import (
    MAIL_TYPES,
    OPEN_MODES,
    Dependency,
    JobOptions,
    JobRequest,
    expand_job_symbols,
    expand_roots,
    parse_signal,
)
from forebay.replica.state import Facts
from forebay.replica.values import (
    FILE_SYMBOLS,
    MAIL_USER_CHARACTERS_MAX,
    MESSAGE_CHARACTERS_MAX,
    SYMBOLS,
    Rejection,
    RejectionCode,
    UnknownSymbol,
    has_control_character,
    is_mail_address,
    job_name_fault,
    limits,
    name_fault,
)

Checked = TypeVar("Checked")

NODE_COUNT_INVALID = "Node count specification invalid"
"""Slurm's message for a job without nodes that requests no persistent buffers, or is an array."""


class RejectionError(Exception):
    """A check failed; carries the rejection to the command handler."""

    def __init__(self, code: RejectionCode, sentence: str, remedy: str, place: str) -> None:
        super().__init__(sentence)
        self.rejection = Rejection(code, sentence, remedy, place)


def require(found: Checked | Rejection) -> Checked:
    """Return the result of a check from another package.

    Raises:
        RejectionError: The result is a Rejection.
    """
    if isinstance(found, Rejection):
        raise RejectionError(found.code, found.sentence, found.remedy, found.place)
    return found


def check_name(field: str, name: str) -> None:
    """Check the name of a job (`field` is `name`) or of a user.

    Raises:
        RejectionError: The name is not valid.
    """
    fault = job_name_fault(name) if field == "name" else name_fault(name)
    if fault is not None:
        raise RejectionError(RejectionCode.INVALID_FIELD, f"the {field} {fault}", "choose another", field)


_RANGES = {
    "time_limit_s": (1, limits.TIME_LIMIT_S_MAX),
    "cpus": (1, limits.CPUS_MAX),
    "tasks": (1, limits.CPUS_MAX),
    "priority": (0, limits.PRIORITY_MAX),
}
"""Field -> smallest and largest permitted value."""


def check_number(field: str, number: int) -> None:
    """Check that a field's value is in its range (`_RANGES`).

    Raises:
        RejectionError: It is not.
    """
    least, most = _RANGES[field]
    if not least <= number <= most:
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"{field} {number} is out of range",
            f"use a number from {least} to {most}",
            field,
        )


def permission_denied(place: str, sentence: str) -> RejectionError:
    """Return the exception for a request that only an operator may make."""
    return RejectionError(RejectionCode.PERMISSION_DENIED, sentence, "ask an operator", place)


def check_unprivileged(priority: int, priority_before: int, nice: int, nice_before: int) -> None:
    """Check that a user does not raise a job's priority or set a negative nice value (sbatch: --priority, --nice).

    Raises:
        RejectionError: The user does.
    """
    if priority > priority_before:
        raise permission_denied("priority", "raising a job's priority requires the operator role")
    if nice < min(0, nice_before):
        raise permission_denied("nice", "setting a negative nice value requires the operator role")


def check_options(options: JobOptions) -> None:
    """Check the form of option values. Existence of accounts, QOS and partitions is checked elsewhere.

    Raises:
        RejectionError: A value is not valid.
    """
    for name in options.partition.split(",") if options.partition else ():
        fault = name_fault(name)
        if fault is not None:
            raise RejectionError(
                RejectionCode.INVALID_FIELD,
                f"the partition name {fault}",
                "write partition names separated by commas",
                "partition",
            )
    check_number("tasks", options.tasks)
    if options.signal:
        try:
            parse_signal(options.signal)
        except ValueError as error:
            sentence, _, remedy = str(error).partition("; ")
            raise RejectionError(RejectionCode.INVALID_FIELD, sentence, remedy, "signal") from None
    if options.open_mode and options.open_mode not in OPEN_MODES:
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"open mode {options.open_mode[:48]!r} is unknown",
            f"write {' or '.join(OPEN_MODES)}",
            "open_mode",
        )
    _check_arguments(options.arguments)
    unknown = [word for word in options.mail_types if word.strip().lower() not in MAIL_TYPES]
    if unknown:
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"mail type {unknown[0][:48]!r} is unknown",
            f"use some of {', '.join(MAIL_TYPES)}",
            "mail_types",
        )
    for field, text, most in (
        ("mail_user", options.mail_user, MAIL_USER_CHARACTERS_MAX),
        ("comment", options.comment, MESSAGE_CHARACTERS_MAX),
    ):
        if len(text) > most:
            raise RejectionError(
                RejectionCode.LIMIT_EXCEEDED, f"{field} has {len(text)} characters", f"write at most {most}", field
            )
        if has_control_character(text):
            raise RejectionError(
                RejectionCode.INVALID_FIELD, f"{field} has a control character", "write one line of text", field
            )
    if options.mail_user and not is_mail_address(options.mail_user):
        raise RejectionError(
            RejectionCode.INVALID_FIELD,
            f"{options.mail_user[:48]!r} is not a mail address",
            "write a user name or an address",
            "mail_user",
        )


def _check_arguments(arguments: tuple[str, ...]) -> None:
    size_bytes = sum(len(argument.encode("utf-8", "surrogatepass")) + 1 for argument in arguments)
    if len(arguments) > limits.ARGUMENTS_MAX or size_bytes > limits.ARGUMENTS_BYTES_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the script has {len(arguments)} arguments with {size_bytes} bytes",
            f"pass at most {limits.ARGUMENTS_MAX} with {limits.ARGUMENTS_BYTES_MAX} bytes, and the rest in a file",
            "arguments",
        )
    if any("\0" in argument for argument in arguments):
        raise RejectionError(RejectionCode.INVALID_FIELD, "an argument contains a NUL byte", "pass text", "arguments")


def check_dependencies(state: Facts, dependencies: tuple[Dependency, ...]) -> None:
    """Check the number of dependencies, and that their jobs exist.

    Raises:
        RejectionError: There are too many, or a job does not exist.
    """
    if len(dependencies) > limits.DEPENDENCIES_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the job has more than {limits.DEPENDENCIES_MAX} dependencies",
            "depend on fewer jobs",
            "dependencies",
        )
    if len({dependency.job for dependency in dependencies if dependency.kind.is_for_array}) > limits.WHOLE_ARRAYS_MAX:
        raise RejectionError(
            RejectionCode.LIMIT_EXCEEDED,
            f"the job depends on more than {limits.WHOLE_ARRAYS_MAX} whole arrays",
            "depend on fewer arrays, or on some of their tasks",
            "dependencies",
        )
    for dependency in dependencies:
        if dependency.job not in state.jobs and not dependency.kind.is_for_array:
            raise RejectionError(
                RejectionCode.UNKNOWN_DEPENDENCY,
                f"{dependency.kind.word}:{dependency.job}: job {dependency.job} does not exist",
                "forebay queue shows the jobs",
                "dependencies",
            )


def expand(text: str, request: JobRequest, job_id: int | str, place: str, node: str | None = None) -> str:
    """Return `text` with the job's symbols replaced.

    With `node`, the text is a file name of the script's input or output, in which more symbols are permitted.

    Raises:
        RejectionError: A symbol is unknown.
    """
    try:
        return expand_job_symbols(text, request, job_id, node)
    except UnknownSymbol as symbol:
        raise RejectionError(
            RejectionCode.INVALID_DIRECTIVE,
            f"{text!r} has the unknown symbol {symbol}",
            f"use {SYMBOLS if node is None else FILE_SYMBOLS}",
            place,
        ) from None


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part and part != "."]


@lru_cache(maxsize=1024)
def _parts_of_roots(roots: tuple[str, ...], user: str) -> tuple[list[str], ...]:
    """Return the split paths of a site's directories for a user. Cached, since every submit needs them."""
    return tuple(_parts(root) for root in expand_roots(roots, user))


def check_path(path: str, place: str) -> None:
    """Check that a path is absolute and has no `..`.

    Raises:
        RejectionError: It is not, or has one.
    """
    fault = path_fault(path)
    if fault is not None:
        raise RejectionError(
            RejectionCode.INVALID_FIELD, f"the path {fault}", "write an absolute path without ..", place
        )


def check_beneath(roots: tuple[str, ...], user: str, path: str, key: str, place: str) -> None:
    """Check that `path` is below one of the roots. This compares text only; the agent checks by directory descriptor.

    Raises:
        RejectionError: It is not.
    """
    check_path(path, place)
    parts = _parts(path)
    for root in _parts_of_roots(roots, user):
        if parts[: len(root)] == root:
            return
    expanded = expand_roots(roots, user)
    if not expanded:
        raise RejectionError(
            RejectionCode.PATH_NOT_ALLOWED,
            f"{path!r} cannot be staged: the site has set no {key}",
            f"ask an operator to run: forebay config set {key.title()}=DIRECTORY",
            place,
        )
    raise RejectionError(
        RejectionCode.PATH_NOT_ALLOWED,
        f"{path!r} is outside the directories that user {user} may stage",
        f"use a path below one of {', '.join(expanded)}",
        place,
    )


@lru_cache(maxsize=1024)
def _buffer_path_fault(path: str) -> str | None:
    """Return the error in a path within a buffer, or None. Cached, since most jobs have the same few paths."""
    return path_fault("/" + split_inside(path)[1])


def check_inside(path: str, place: str) -> None:
    """Check that a path within a buffer does not leave the buffer.

    Raises:
        RejectionError: It does.
    """
    fault = _buffer_path_fault(path)
    if fault is not None:
        raise RejectionError(
            RejectionCode.PATH_NOT_ALLOWED, f"the path {fault}", "write a path below the variable, without ..", place
        )


def names_remedy(names: Iterable[str], otherwise: str) -> str:
    """Return the remedy for an unknown name: the first 20 known names, or `otherwise` if there are none."""
    known = sorted(names)[:20]
    return f"use one of: {', '.join(known)}" if known else otherwise
