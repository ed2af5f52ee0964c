"""From a script and the command line to one submit: the command line wins, and every mistake has a place."""

import datetime
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from cluster.cli.exits import BBF_LINE, Failure, T, bad_input, converted
from cluster.cli.submission.sbatch import Setting, check_script, read_options
from cluster.cli.text import parse_begin, parse_duration
from replica.model import DependencyKind, parse_array
from replica.values import (
    CPUS_MAX,
    DEPENDENCIES_MAX,
    DIRECTIVE_TEXT_BYTES_MAX,
    ENVIRONMENT_BYTES_MAX,
    ENVIRONMENT_VARIABLES_MAX,
    NICE_MAX,
    PRIORITY_MAX,
    Instant,
)

TIME_LIMIT_S_DEFAULT: Final = 3_600
"""Seconds a job may run where neither script nor command line says: an hour is enough to try something out."""

NAME_OF_STDIN: Final = "sbatch"
"""Name of a job whose script came from standard input, as Slurm calls it."""

JOB_ID_DIGITS_MAX: Final = 18
"""Digits of a job id in a dependency: what a signed 64-bit number holds."""

_JOB: Final = re.compile(rf"[0-9]{{1,{JOB_ID_DIGITS_MAX}}}(?:_[0-9]{{1,9}})?", re.ASCII)
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DEPENDENCY_WORDS: Final = tuple(dict.fromkeys(kind.word for kind in DependencyKind))
_SINGLETON: Final = "singleton"
_LATER_WORDS: Final = frozenset({"aftercorr", "expand"})


class Submission(NamedTuple):
    """What is sent, without the command id; the field names are those of the request."""

    script: str
    name: str
    time_limit_s: int
    workdir: str
    cpus: int
    hold: bool
    bb: str | None
    bbf: str | None
    priority: int | None
    begin_at: str | None
    dependencies: tuple[str, ...]
    dependency_any: bool
    output: str | None
    environment: dict[str, str]
    deadline: str | None
    nodes: int
    array: str | None
    account: str | None
    qos: str | None
    licenses: tuple[str, ...]
    reservation: str | None
    partition: str | None
    nice: int
    requeue: bool
    mail_types: tuple[str, ...]
    mail_user: str | None
    comment: str | None


class Prepared(NamedTuple):
    """A submission, what to warn of, and where each field came from, for naming places in the server's answer."""

    submission: Submission
    warnings: tuple[str, ...]
    sources: Mapping[str, str]


class CommandLine(NamedTuple):
    """What the user gave on the command line, as text; None or empty where nothing was given."""

    name: str | None = None
    time: str | None = None
    bb: str | None = None
    bbf: str | None = None
    begin: str | None = None
    dependency: str | None = None
    chdir: str | None = None
    output: str | None = None
    priority: str | None = None
    cpus: str | None = None
    nodes: str | None = None
    array: str | None = None
    account: str | None = None
    qos: str | None = None
    licenses: str | None = None
    reservation: str | None = None
    partition: str | None = None
    nice: str | None = None
    requeue: str | None = None
    """`yes` or `no`."""
    mail_type: str | None = None
    mail_user: str | None = None
    comment: str | None = None
    deadline: str | None = None
    hold: bool = False
    export: tuple[str, ...] = ()


_FLAGS: Final = {
    "name": "--name",
    "time": "--time-limit",
    "bb": "--bb",
    "bbf": "--bbf",
    "begin": "--begin",
    "dependency": "--dependency",
    "chdir": "--chdir",
    "output": "--output",
    "priority": "--priority",
    "cpus": "--cpus",
    "nodes": "--nodes",
    "array": "--array",
    "account": "--account",
    "qos": "--qos",
    "licenses": "--licenses",
    "reservation": "--reservation",
    "partition": "--partition",
    "nice": "--nice",
    "requeue": "--requeue",
    "mail_type": "--mail-type",
    "mail_user": "--mail-user",
    "comment": "--comment",
    "deadline": "--deadline",
}

_REQUEST_FIELDS: Final = {
    "name": "name",
    "time": "time_limit_s",
    "begin": "begin_at",
    "dependency": "dependencies",
    "chdir": "workdir",
    "output": "output",
    "priority": "priority",
    "cpus": "cpus",
    "nodes": "nodes",
    "array": "array",
    "account": "account",
    "qos": "qos",
    "licenses": "licenses",
    "reservation": "reservation",
    "partition": "partition",
    "nice": "nice",
    "requeue": "requeue",
    "mail_type": "mail_types",
    "mail_user": "mail_user",
    "comment": "comment",
    "deadline": "deadline",
}
"""Option -> the field of the request that the server names in a refusal."""


def prepare(
    data: bytes,
    script_name: str,
    given: CommandLine,
    *,
    directory: Path,
    environment: Mapping[str, str],
    now: Instant,
    zone: datetime.tzinfo | None = None,
) -> Prepared:
    """Return what to send for a script; `directory` is where the user is, `now` the wall clock in µs.

    Failure (bad input) names the place: line and column of the script, or the option of the command line.
    """
    script = check_script(data, "script" if script_name == "-" else script_name)
    label = "script" if script_name == "-" else script_name
    options = read_options(script, label)
    chosen = _chosen(given, options.settings)
    default_name = NAME_OF_STDIN if script_name == "-" else Path(script_name).name
    name, bb, bbf = chosen.get("name"), chosen.get("bb"), chosen.get("bbf")
    chdir, output = chosen.get("chdir"), chosen.get("output")
    submission = Submission(
        script=script,
        name=default_name if name is None else name.value,
        time_limit_s=_converted(chosen, "time", parse_duration, TIME_LIMIT_S_DEFAULT),
        workdir=os.path.normpath(directory / chdir.value) if chdir is not None else str(directory),
        cpus=_converted(chosen, "cpus", lambda text: parse_count(text, "the number of CPUs", 1, CPUS_MAX), 1),
        hold=given.hold or "hold" in options.settings,
        bb=None if bb is None else bb.value,
        bbf=None if bbf is None else read_bbf(directory / bbf.value, bbf.place),
        priority=_converted(chosen, "priority", lambda text: parse_count(text, "the priority", 0, PRIORITY_MAX), None),
        begin_at=_converted(chosen, "begin", lambda text: parse_begin(text, now, zone), None),
        dependencies=_converted(chosen, "dependency", parse_dependencies, ()),
        dependency_any=_converted(chosen, "dependency", is_any, False),
        output=None if output is None else output.value,
        environment=parse_exports(given.export, environment),
        deadline=_converted(chosen, "deadline", lambda text: parse_begin(text, now, zone), None),
        nodes=_converted(chosen, "nodes", parse_nodes, 1),
        array=_converted(chosen, "array", _checked_array, None),
        account=_text(chosen, "account"),
        qos=_text(chosen, "qos"),
        licenses=_converted(chosen, "licenses", listed, ()),
        reservation=_text(chosen, "reservation"),
        partition=_text(chosen, "partition"),
        nice=_converted(chosen, "nice", parse_nice, 0),
        requeue=_text(chosen, "requeue") != "no",
        mail_types=_converted(chosen, "mail_type", listed, ()),
        mail_user=_text(chosen, "mail_user"),
        comment=_text(chosen, "comment"),
    )
    sources = {_REQUEST_FIELDS[field]: setting.place for field, setting in chosen.items() if field in _REQUEST_FIELDS}
    sources.setdefault("workdir", "--chdir (the present directory)")
    sources["script"] = label
    if bb is not None:
        sources["--bb"] = bb.place if bb.place == "--bb" else f"{bb.place}, --bb"
    if bbf is not None:
        sources["--bbf"] = bbf.value
    return Prepared(submission, options.warnings, sources)


def _chosen(given: CommandLine, settings: Mapping[str, Setting]) -> dict[str, Setting]:
    chosen = {field: setting for field, setting in settings.items() if field in _FLAGS}
    for field, flag in _FLAGS.items():
        value = getattr(given, field)
        if value is not None:
            chosen[field] = Setting(value, flag)
    return chosen


def _text(chosen: Mapping[str, Setting], field: str) -> str | None:
    setting = chosen.get(field)
    return None if setting is None else setting.value


def listed(text: str) -> tuple[str, ...]:
    """Return what commas separate; ValueError for an empty part."""
    parts = tuple(part.strip() for part in text.split(","))
    if not all(parts):
        raise ValueError(f"{text[:48]!r} has an empty part; separate the names with one comma each")
    return parts


def _checked_array(text: str) -> str:
    parse_array(text)
    return text


def parse_nodes(text: str) -> int:
    """Return the nodes of `--nodes=N` or `--nodes=MIN-MAX`; ValueError is a sentence with the remedy."""
    least, dash, most = text.partition("-")
    for part in (least, most) if dash else (least,):
        if not (part.isascii() and part.isdigit()) or len(part) > 9:
            raise ValueError(
                f"the number of nodes {text[:24]!r} cannot be used; write 1, or 0 for persistent buffers only"
            )
    first, last = int(least), int(most) if dash else int(least)
    if last < first:
        raise ValueError(f"the number of nodes {text[:24]!r} ends before it starts; write --nodes=1")
    if first > 1:
        raise ValueError(f"the job asks for {first} nodes; a job of Forebay runs on one: write --nodes=1")
    return min(last, 1)


def parse_nice(text: str) -> int:
    """Return the adjustment of `--nice`; ValueError is a sentence with the remedy."""
    digits = text.removeprefix("-")
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 10 or int(digits) > NICE_MAX:
        raise ValueError(f"the adjustment {text[:24]!r} cannot be used; write a whole number up to {NICE_MAX}")
    return int(text)


def _converted(chosen: Mapping[str, Setting], field: str, convert: Callable[[str], T], default: T) -> T:
    setting = chosen.get(field)
    return default if setting is None else converted(setting.value, convert, setting.place)


def located(place: str, sources: Mapping[str, str]) -> str:
    """Return a place of the server's answer in the user's terms: the names of the files, the line that set a field."""
    if place in sources:
        return sources[place]
    for source in ("--bbf", "--bb", "script"):
        if place == source or place.startswith(source + " "):
            return sources.get(source, source) + place[len(source) :]
    return place


def parse_count(text: str, what: str, least: int, most: int) -> int:
    """Return a whole number within bounds; ValueError is a sentence with the remedy."""
    if not (text.isascii() and text.isdigit()) or len(text) > JOB_ID_DIGITS_MAX or not least <= int(text) <= most:
        raise ValueError(f"{what} {text[:24]!r} cannot be used; write a whole number from {least} to {most}")
    return int(text)


def parse_dependencies(text: str) -> tuple[str, ...]:
    """Return each condition as `kind:id`. All must hold, or with `?` between them (`is_any`) one. ValueError is a
    sentence with the remedy.
    """
    form = f"write KIND:JOB[:JOB…][,KIND:JOB…] with the kinds {', '.join(_DEPENDENCY_WORDS)}, or singleton"
    if "?" in text and "," in text:
        raise ValueError(f"{text!r} has both , and ?; write , where all must hold, or ? where one is enough")
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
            raise ValueError(f"{part!r} names no job; write {word}:42")
        for job in jobs:
            if _JOB.fullmatch(job) is None or int(job.partition("_")[0]) == 0:
                raise ValueError(f"{job!r} in {part!r} is not a job id; write {word}:42")
            if (condition := f"{word}:{_plain(job)}") not in found:
                found.append(condition)
    if len(found) > DEPENDENCIES_MAX:
        raise ValueError(f"there are {len(found)} dependencies; a job can wait for at most {DEPENDENCIES_MAX}")
    return tuple(found)


def is_any(text: str) -> bool:
    """Whether one of the dependencies is enough."""
    return "?" in text


def _plain(job: str) -> str:
    """Return a job id, or that of a task of an array, without leading zeros."""
    return "_".join(str(int(part)) for part in job.split("_"))


def parse_exports(exports: Sequence[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--export NAME=VALUE` and `--export NAME` (its present value), or raise Failure."""
    found: dict[str, str] = {}
    for export in exports:
        name, equals, value = export.partition("=")
        if _VARIABLE.fullmatch(name) is None:
            raise bad_input(f"{name!r} is not the name of a variable", "write --export NAME=VALUE", place="--export")
        if not equals:
            if name not in environment:
                raise bad_input(
                    f"the variable {name} is not set here", f"write --export {name}=VALUE", place="--export"
                )
            value = environment[name]
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise bad_input(f"the value of {name} is not UTF-8", "export text only", place="--export") from None
        found[name] = value
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in found.items())
    if len(found) > ENVIRONMENT_VARIABLES_MAX or size_bytes > ENVIRONMENT_BYTES_MAX:
        raise bad_input(
            f"the exported variables are {len(found)} with {size_bytes} bytes",
            f"export at most {ENVIRONMENT_VARIABLES_MAX} with {ENVIRONMENT_BYTES_MAX} bytes, the rest in a file",
            place="--export",
        )
    return found


def read_bbf(path: Path, place: str) -> str:
    """Return the directives of a --bbf file; Failure where it cannot be read."""
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
    """Return a file's bytes; Failure where it cannot be read or has more than `most_bytes`."""
    try:
        with path.open("rb") as file:
            data = file.read(most_bytes + 1)
    except OSError as error:
        raise _unreadable(path, what, place, error) from error
    if len(data) > most_bytes:
        raise bad_input(f"{what} {path} has more than {most_bytes} bytes", "name the right file", place=place)
    return data


def _unreadable(path: Path, what: str, place: str, error: OSError) -> Failure:
    return bad_input(
        f"{what} {path} cannot be read ({error.strerror})", "name a file that exists and that you may read", place=place
    )
