"""From a script and the command line to one submit: the command line wins, and every mistake has a place."""

import datetime
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from cluster.cli.exits import bad_input
from cluster.cli.submission.readers import Context, Given, read_field, settings_of
from cluster.cli.submission.sbatch import check_script, read_options
from cluster.schemas import JOB_FIELDS
from replica.values import ENVIRONMENT_BYTES_MAX, ENVIRONMENT_VARIABLES_MAX, Instant

TIME_LIMIT_S_DEFAULT: Final = 3_600
"""Seconds a job may run where neither script nor command line says: an hour is enough to try something out."""

NAME_OF_STDIN: Final = "sbatch"
"""Name of a job whose script came from standard input, as Slurm calls it."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


class Prepared(NamedTuple):
    """What is sent for a script, what to warn of, and where each field came from, for places in the server's answer."""

    fields: dict[str, Any]
    """Of a SubmitRequest, without its command id."""
    warnings: tuple[str, ...]
    sources: Mapping[str, str]


def prepare(
    data: bytes,
    script_name: str,
    given: Given,
    exports: Sequence[str] = (),
    *,
    arguments: tuple[str, ...] = (),
    directory: Path,
    environment: Mapping[str, str],
    now: Instant,
    zone: datetime.tzinfo | None = None,
) -> Prepared:
    """Return what to send for a script; `directory` is where the user is, `now` the wall clock in µs.

    Failure (bad input) names the place: line and column of the script, or the option of the command line.
    """
    label = "script" if script_name == "-" else script_name
    for argument in arguments:
        if not _is_text(argument):
            raise bad_input("an argument of the script is not UTF-8 text", "give it text", place="--")
    script = check_script(data, label)
    options = read_options(script, label)
    chosen = options.settings | settings_of(given)
    fields: dict[str, Any] = {
        "script": script,
        "name": NAME_OF_STDIN if script_name == "-" else Path(script_name).name,
        "time_limit_s": TIME_LIMIT_S_DEFAULT,
        "workdir": str(directory),
        "environment": parse_exports(exports, environment),
        "arguments": arguments,
    }
    context = Context(directory, now, zone)
    for row in JOB_FIELDS:
        if row.field in chosen:
            fields |= read_field(row, chosen[row.field], context)
    sources = {field: setting.place for field, setting in chosen.items()}
    sources.setdefault("workdir", "--chdir (the present directory)")
    sources["script"] = label
    if "bb" in chosen:
        place = sources.pop("bb")
        sources["--bb"] = place if place == "--bb" else f"{place}, --bb"
    if "bbf" in chosen:
        del sources["bbf"]
        sources["--bbf"] = chosen["bbf"].value
    return Prepared(fields, options.warnings, sources)


def _is_text(text: str) -> bool:
    """Whether a word of the command line, or of its environment, is UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def located(place: str, sources: Mapping[str, str]) -> str:
    """Return a place of the server's answer in the user's terms: the names of the files, the line that set a field."""
    if place in sources:
        return sources[place]
    for source in ("--bbf", "--bb", "script"):
        if place == source or place.startswith(source + " "):
            return sources.get(source, source) + place[len(source) :]
    return place


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
        if not _is_text(value):
            raise bad_input(f"the value of {name} is not UTF-8", "export text only", place="--export")
        found[name] = value
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in found.items())
    if len(found) > ENVIRONMENT_VARIABLES_MAX or size_bytes > ENVIRONMENT_BYTES_MAX:
        raise bad_input(
            f"the exported variables are {len(found)} with {size_bytes} bytes",
            f"export at most {ENVIRONMENT_VARIABLES_MAX} with {ENVIRONMENT_BYTES_MAX} bytes, the rest in a file",
            place="--export",
        )
    return found
