"""Parsers for the values of job fields, from `#SBATCH` lines or from the command line."""

import datetime
import os
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.cluster.cli.exits import BBF_LINE, Failure, bad_input, convert_input
from forebay.cluster.cli.submission.sbatch import Setting
from forebay.cluster.cli.submission.sbatch_options import UNNAMED_FIELDS
from forebay.cluster.cli.text import parse_begin, parse_duration
from forebay.cluster.schemas import JOB_FIELDS, JobField, Reads
from forebay.replica.model import DependencyKind, parse_array, parse_signal
from forebay.replica.values import CPUS_MAX, DEPENDENCIES_MAX, DIRECTIVE_TEXT_BYTES_MAX, NICE_MAX, PRIORITY_MAX, Instant

JOB_ID_DIGITS_MAX: Final = 18
"""Digits of a job ID in a dependency: a signed 64-bit number holds them."""

_JOB: Final = re.compile(rf"[0-9]{{1,{JOB_ID_DIGITS_MAX}}}(?:_[0-9]{{1,9}})?", re.ASCII)
_DEPENDENCY_WORDS: Final = tuple(dict.fromkeys(kind.word for kind in DependencyKind))
_SINGLETON: Final = "singleton"
_LATER_WORDS: Final = frozenset({"aftercorr", "expand"})

SHARERS: Final = ("user", "mcs", "topo")
"""Values of --exclusive that allow sharing the node with some jobs; Forebay gives the job the whole node instead."""

TypedFields = Mapping[str, str | bool | None]
"""Values from the command line by job field; None if the option is not given."""


class Context(NamedTuple):
    """Context of parsing: the user's directory, the wall clock in µs, and the zone of times without one."""

    directory: Path
    now: Instant
    zone: datetime.tzinfo | None = None
    in_script: bool = False
    """True if the text is from a script, which may be written for a Slurm site."""


def typed_settings(given: TypedFields) -> dict[str, Setting]:
    """Return the values from the command line by field, each with its option as the place."""
    found = {field: Setting(str(given[field]), "command line") for field in UNNAMED_FIELDS if field in given}
    for row in JOB_FIELDS:
        value = given.get(row.field)
        if value is not None:
            text = value if isinstance(value, str) else "yes" if value else "no"
            found[row.field] = Setting(text, next(option for option in row.options if option.startswith("--")))
    return found


def read_field(row: JobField, setting: Setting, context: Context) -> dict[str, Any]:
    """Return the request's fields for a setting.

    Raises:
        Failure: bad input at the setting's place, if the value is invalid.
    """
    if row.reads == "directives":
        return {row.field: read_bbf(context.directory / setting.value, setting.place)}
    fields = {row.field: convert_input(setting.value, partial(_READERS[row.reads], context=context), setting.place)}
    if row.reads == "dependencies":
        fields["dependency_any"] = is_any(setting.value)
    return fields


def read_change(row: JobField, setting: Setting, context: Context) -> dict[str, Any]:
    """Return an update's fields for a setting; an empty value resets the field.

    Raises:
        Failure: as `read_field`.
    """
    if setting.value == "" and row.reads in ("names", "dependencies"):
        return {row.field: ()} | ({"dependency_any": False} if row.reads == "dependencies" else {})
    if row.reads == "moment":
        text = setting.value and convert_input(
            setting.value, partial(_READERS["moment"], context=context), setting.place
        )
        return {row.field: text or ""}
    return read_field(row, setting, context)


def split_names(text: str) -> tuple[str, ...]:
    """Return comma-separated names.

    Raises:
        ValueError: if a part is empty.
    """
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError(f"{text[:48]!r} has an empty name; separate names with single commas")
    return parts


def parse_nodes(text: str) -> int:
    """Return the number of nodes of `--nodes=N` or `--nodes=MIN-MAX`, 0 or 1.

    Raises:
        ValueError: sentence and remedy, if the text is invalid or requests several nodes.
    """
    least, dash, most = text.partition("-")
    for part in (least, most) if dash else (least,):
        if not (part.isascii() and part.isdigit()) or len(part) > 9:
            raise ValueError(f"the number of nodes {text[:24]!r} is invalid; write 1, or 0 for persistent buffers only")
    first, last = int(least), int(most) if dash else int(least)
    if last < first:
        raise ValueError(f"the maximum of nodes in {text[:24]!r} is below the minimum; write --nodes=1")
    if first > 1:
        raise ValueError(f"the job requests {first} nodes, and jobs run on one; write --nodes=1")
    return min(last, 1)


def parse_nice(text: str) -> int:
    """Return the adjustment of `--nice`.

    Raises:
        ValueError: sentence and remedy, if the text is invalid.
    """
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 10 or int(digits) > NICE_MAX:
        raise ValueError(f"the adjustment {text[:24]!r} is invalid; write a whole number up to {NICE_MAX}")
    return int(text)


def parse_count(text: str, what: str, least: int, most: int) -> int:
    """Return a whole number within bounds.

    Raises:
        ValueError: sentence and remedy, if the text is invalid.
    """
    if not (text.isascii() and text.isdigit()) or len(text) > JOB_ID_DIGITS_MAX or not least <= int(text) <= most:
        raise ValueError(f"{what} {text[:24]!r} is invalid; write a whole number from {least} to {most}")
    return int(text)


def parse_dependencies(text: str) -> tuple[str, ...]:
    """Return each condition as `kind:id`.

    All conditions must hold, or any one of them if `?` separates them (`is_any`).

    Raises:
        ValueError: sentence and remedy, if the text is invalid.
    """
    form = f"write KIND:JOB[:JOB…][,KIND:JOB…] with the kinds {', '.join(_DEPENDENCY_WORDS)}, or singleton"
    if "?" in text and "," in text:
        raise ValueError(f"{text!r} mixes ',' and '?'; use only ',' if all must hold, or only '?' if one suffices")
    found: list[str] = []
    for part in text.split("?" if is_any(text) else ","):
        word, *jobs = part.split(":")
        if part == _SINGLETON:
            found.append(part)
            continue
        if word in _LATER_WORDS:
            raise ValueError(f"the dependency {word!r} is not supported by this release; {form}")
        if word not in _DEPENDENCY_WORDS:
            raise ValueError(f"{part!r} does not begin with a kind of dependency; {form}")
        if not jobs:
            raise ValueError(f"{part!r} has no job; write {word}:42")
        for job in jobs:
            if _JOB.fullmatch(job) is None or int(job.partition("_")[0]) == 0:
                raise ValueError(f"{job!r} in {part!r} is not a job ID; write {word}:42")
            if (condition := f"{word}:{_plain(job)}") not in found:
                found.append(condition)
    if len(found) > DEPENDENCIES_MAX:
        raise ValueError(f"the job has {len(found)} dependencies; use at most {DEPENDENCIES_MAX}")
    return tuple(found)


def is_any(text: str) -> bool:
    """Return whether one of the dependencies suffices."""
    return "?" in text


def _plain(job: str) -> str:
    """Return the ID of a job or array task without leading zeros."""
    return "_".join(str(int(part)) for part in job.split("_"))


def read_bbf(path: Path, place: str) -> str:
    """Return the directives of a --bbf file.

    Raises:
        Failure: bad input, if the file cannot be read.
    """
    try:
        data = read_bounded(path, DIRECTIVE_TEXT_BYTES_MAX, "the burst-buffer file", place)
    except Failure as error:
        error.last = BBF_LINE
        raise
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise bad_input("the file is not UTF-8 text", "write directives only", place=f"{path} line {line}") from None


def read_bounded(path: Path, most_bytes: int, what: str, place: str) -> bytes:
    """Return the content of a file.

    Raises:
        Failure: bad input, if the file cannot be read or has more than `most_bytes`.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise _unreadable(path, what, place, error) from error
    if len(data) > most_bytes:
        raise bad_input(f"{what} {path} has more than {most_bytes} bytes", "give another file", place=place)
    return data


def _unreadable(path: Path, what: str, place: str, error: OSError) -> Failure:
    return bad_input(
        f"{what} {path} cannot be read ({error.strerror})", "correct the path or its permissions", place=place
    )


def _exclusive(text: str) -> bool:
    if text not in ("yes", "no", *SHARERS):
        raise ValueError(f"{text[:24]!r} is invalid; write --exclusive alone, which gives the job a whole node")
    return text != "no"


def _signal(text: str) -> str:
    parse_signal(text)
    return text


def _array(text: str) -> str:
    parse_array(text)
    return text


_READERS: Final[Mapping[Reads, Callable[..., Any]]] = {
    "text": lambda text, context: text,
    "switch": lambda text, context: text == "yes",
    "directory": lambda text, context: os.path.normpath(context.directory / text),
    "duration": lambda text, context: parse_duration(text, as_sbatch=context.in_script),
    "moment": lambda text, context: parse_begin(text, context.now, context.zone),
    "names": lambda text, context: split_names(text),
    "dependencies": lambda text, context: parse_dependencies(text),
    "cpus": lambda text, context: parse_count(text, "the number of CPUs", 1, CPUS_MAX),
    "priority": lambda text, context: parse_count(text, "the priority", 0, PRIORITY_MAX),
    "nice": lambda text, context: parse_nice(text),
    "nodes": lambda text, context: parse_nodes(text),
    "array": lambda text, context: _array(text),
    "tasks": lambda text, context: parse_count(text, "the number of tasks", 1, CPUS_MAX),
    "exclusive": lambda text, context: _exclusive(text),
    "signal": lambda text, context: _signal(text),
}
"""Parser by kind of value; each raises ValueError with a sentence and a remedy, "; " between them."""
