"""Submit request from a script and the command line, which takes precedence; every error has a place."""

import contextlib
import datetime
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from forebay.cluster.cli.exits import Failure, bad_input, convert_input, join_failures
from forebay.cluster.cli.submission.readers import Context, TypedFields, parse_count, read_field, typed_settings
from forebay.cluster.cli.submission.sbatch import IgnoredOption, Setting, check_script, ignore_value, read_options
from forebay.cluster.cli.submission.sbatch_options import (
    CPUS_LEAST,
    EXPORT,
    PARSABLE,
    TASKS_PER_NODE,
    WAITS,
)
from forebay.cluster.schemas import IF_DEFINED, IGNORED_OPTIONS_MAX, JOB_FIELDS, OPTION_SHOWN_MAX
from forebay.replica.grammar import PACKED_MARK
from forebay.replica.values import (
    CPUS_MAX,
    ENVIRONMENT_BYTES_MAX,
    ENVIRONMENT_VARIABLES_MAX,
    PACKED_HEAD_BYTES_MAX,
    PACKED_SCRIPT_BYTES_MAX,
    PATH_BYTES_MAX,
    PATH_VARIABLES_MAX,
    SCRIPT_BYTES_MAX,
    Instant,
    is_mail_address,
)

TIME_LIMIT_S_DEFAULT: Final = 3_600
"""Default time limit of a job, seconds: an hour is enough for a first try."""

NAME_OF_STDIN: Final = "sbatch"
"""Name of a job whose script came from standard input, as in Slurm."""

_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


_MAYBE_DIRECTIVE: Final = re.compile(r"#[A-Za-z!]")
"""Beginning of a comment line that may be a directive: a packed script keeps such lines unchanged."""

_PLAIN_LICENSE: Final = re.compile(r"[A-Za-z0-9_.+-]+(?:[:=][0-9]+)?", re.ASCII)
"""Licence that Forebay can count: neither from a remote database nor a list of alternatives."""


class PreparedSubmit(NamedTuple):
    """Prepared request for a script: its fields, warnings, and the origin of each field, for places in errors."""

    fields: dict[str, Any]
    """Fields of a SubmitRequest without its command ID."""
    warnings: tuple[str, ...]
    sources: Mapping[str, str]
    ignored: tuple[IgnoredOption, ...] = ()
    """Ignored options: the controller warns about them, or rejects the job."""
    waits: bool = False
    """True if the script has --wait."""
    parsable: bool = False
    """True if the script has --parsable."""


def prepare(
    data: bytes,
    script_name: str,
    given: TypedFields,
    exports: Sequence[str] = (),
    *,
    ignored: Sequence[IgnoredOption] = (),
    arguments: tuple[str, ...] = (),
    directory: Path,
    environment: Mapping[str, str],
    home: str | None = None,
    now: Instant,
    zone: datetime.tzinfo | None = None,
) -> PreparedSubmit:
    """Return the prepared request for a script.

    `directory` is the user's current directory, `now` the wall clock in µs. `home` replaces $HOME in paths if the job
    is for another user; empty: unknown.

    Raises:
        Failure: bad input, with every error and its place: line and column of the script, or the option.
    """
    label = "script" if script_name == "-" else script_name
    script = check_script(data, label)
    options = read_options(script, label)
    faults = list(options.faults)
    if not all(map(_is_text, arguments)):
        faults.append(bad_input("an argument of the script is not UTF-8 text", "use UTF-8 text", place="--"))
    from_script, typed = dict(options.settings), typed_settings(given)
    notes, ignored = list(options.warnings), [*options.ignored, *ignored]
    chosen = from_script | typed
    fields: dict[str, Any] = {
        "script": script,
        "name": NAME_OF_STDIN if script_name == "-" else Path(script_name).name,
        "time_limit_s": TIME_LIMIT_S_DEFAULT,
        "workdir": str(directory),
        "arguments": arguments,
    }
    if len(data) > SCRIPT_BYTES_MAX:
        with _collect_failure(faults):
            fields["script"] = pack_script(script, label)
    with _collect_failure(faults):
        written = from_script.get(EXPORT)
        by_script = {} if written is None else _script_exports(written, environment, notes)
        fields["environment"] = parse_exports(exports, environment, by_script)
        if written is not None and ALL_EXPORTED in written.value.split(","):
            ignored.append(ignore_value("--export", ALL_EXPORTED, written.place))
        if ALL_EXPORTED in exports:
            ignored.append(ignore_value("--export", ALL_EXPORTED, "--export"))
    for row in JOB_FIELDS:
        if row.field in chosen:
            with _collect_failure(faults):
                context = Context(directory, now, zone, in_script=row.field not in typed)
                fields |= read_field(row, chosen[row.field], context)
    with _collect_failure(faults):
        fields |= _cpus(fields, chosen, ignored)
    fields["variables"] = path_variables(fields, environment, home)
    if faults:
        raise join_failures(faults + _directive_faults(fields, _sources(chosen, label)))
    by_script_alone = {field: setting for field, setting in from_script.items() if field not in typed}
    fields["if_defined"] = tuple(field for field in IF_DEFINED if field in by_script_alone)
    _leave_out(fields, by_script_alone, ignored)
    names = dict.fromkeys(_ignored_view(one) for one in ignored)
    fields["ignored_options"] = tuple(names)[:IGNORED_OPTIONS_MAX]
    sources = _sources(chosen, label)
    if TASKS_PER_NODE in chosen:
        sources.setdefault("tasks", chosen[TASKS_PER_NODE].place)
    if "tasks" in sources:
        sources.setdefault("cpus", sources["tasks"])
    sources.setdefault("workdir", "--chdir (the present directory)")
    return PreparedSubmit(
        fields, tuple(notes), sources, tuple(ignored), waits=WAITS in from_script, parsable=PARSABLE in from_script
    )


def _sources(chosen: Mapping[str, Setting], label: str) -> dict[str, str]:
    """Return the origin of each field, and the labels of the script and of the texts of --bb and --bbf."""
    sources = {field: setting.place for field, setting in chosen.items()}
    sources["script"] = label
    if "bb" in chosen:
        place = sources.pop("bb")
        sources["--bb"] = place if place == "--bb" else f"{place}, --bb"
    if "bbf" in chosen:
        del sources["bbf"]
        sources["--bbf"] = chosen["bbf"].value
    return sources


def _directive_faults(fields: Mapping[str, Any], sources: Mapping[str, str]) -> list[Failure]:
    """Check the directives of a request that will not be sent because of other errors, without a provider's grammar.

    The controller, which knows the site's grammar, checks the directives of a request that is sent.
    """
    from forebay.replica.grammar import UNKNOWN_VARIABLES, DirectiveRejected, read_request

    try:
        read_request(
            fields["script"],
            fields.get("bb") or "",
            fields.get("bbf") or "",
            directive="",
            variables=UNKNOWN_VARIABLES,
        )
    except DirectiveRejected as error:
        rejections = (error.rejection, *error.others)
        return [bad_input(one.sentence, one.remedy, place=locate(one.place, sources)) for one in rejections]
    return []


def path_variables(
    fields: Mapping[str, Any], environment: Mapping[str, str], home: str | None = None
) -> dict[str, str]:
    """Return the values of the variables in a request's directives, as far as they are set here.

    The controller knows which variables the site permits. Only those that a directive names are sent.
    """
    head = itertools.takewhile(
        lambda line: line.startswith("#") or not line.strip(), fields.get("script", "").split("\n")
    )
    text = "\n".join([*head, fields.get("bb") or "", fields.get("bbf") or ""])
    if "$" not in text:
        return {}
    from forebay.replica.grammar import variable_names

    found = {name: environment[name] for name in variable_names(text) if name in environment}
    if home is not None and "HOME" in found:
        found["HOME"] = home
    fits = {name: value for name, value in found.items() if value and _is_text(value) and len(value) <= PATH_BYTES_MAX}
    return dict(itertools.islice(fits.items(), PATH_VARIABLES_MAX))


def _ignored_view(one: IgnoredOption) -> str:
    """Return an ignored option in the form that the controller lists."""
    is_plain = one.written.isascii() and one.written.isprintable() and " " not in one.written
    return one.written[:OPTION_SHOWN_MAX] if is_plain else one.written.partition("=")[0]


@contextlib.contextmanager
def _collect_failure(faults: list[Failure]) -> Iterator[None]:
    """Append a failure of the block to `faults` instead of raising it."""
    try:
        yield
    except Failure as failure:
        faults.append(failure)


def pack_script(script: str, label: str) -> str:
    """Return a long script in packed form (`replica.grammar`).

    Raises:
        Failure: bad input, if the packed form is too long.
    """
    end = _end_of_head(script)
    head, rest = script[:end], script[end:]
    if not rest or len(head.encode()) > PACKED_HEAD_BYTES_MAX:
        raise bad_input(
            f"the comment lines at the top of the script have more than {PACKED_HEAD_BYTES_MAX} bytes",
            "begin them with '# ', or move them below the first command",
            place=label,
        )
    import base64
    import lzma

    found = f"{head.removesuffix(chr(10))}{PACKED_MARK}{base64.b85encode(lzma.compress(rest.encode())).decode()}\n"
    if len(found.encode()) > PACKED_SCRIPT_BYTES_MAX:
        raise bad_input(
            f"the script has more than {SCRIPT_BYTES_MAX} bytes, and more than {PACKED_SCRIPT_BYTES_MAX} compressed",
            "move data and programs to files that the script uses",
            place=label,
        )
    return found


def _end_of_head(script: str) -> int:
    """Return the end of the last line that may be a directive, among the comment lines at the top."""
    at = end = 0
    while at < len(script):
        following = script.find("\n", at) + 1 or len(script)
        line = script[at:following]
        if line.strip() and not line.startswith("#"):
            break
        if _MAYBE_DIRECTIVE.match(line):
            end = following
        at = following
    return end


def _cpus(fields: Mapping[str, Any], chosen: Mapping[str, Setting], ignored: list[IgnoredOption]) -> dict[str, int]:
    """Return the number of tasks and the CPUs of all tasks; empty for the default."""
    found = {}
    for field, what in ((TASKS_PER_NODE, "the number of tasks"), (CPUS_LEAST, "the number of CPUs")):
        if field in chosen:
            setting = chosen[field]
            found[field] = convert_input(
                setting.value, partial(parse_count, what=what, least=1, most=CPUS_MAX), setting.place
            )
    if not found and "tasks" not in fields:
        return {}
    most = found.get(TASKS_PER_NODE)
    tasks = fields.get("tasks", most or 1)
    if most is not None and tasks > most:
        # All tasks run on the one node.
        ignored.append(ignore_value("--ntasks-per-node", "", chosen[TASKS_PER_NODE].place))
    return {"tasks": tasks, "cpus": max(tasks * fields.get("cpus", 1), found.get(CPUS_LEAST, 1))}


def _leave_out(fields: dict[str, Any], written: Mapping[str, Setting], ignored: list[IgnoredOption]) -> None:
    """Remove unsupported licences and mail options from a script's fields, and record them as ignored."""
    known = (("licenses", "--licenses", _is_plain_license), ("mail_types", "--mail-type", _is_mail_type))
    for field, long, is_known in known:
        if field in written:
            place = written[field].place
            others = [text for text in fields[field] if not is_known(text)]
            ignored += [ignore_value(long, text, place) for text in others]
            fields[field] = tuple(filter(is_known, fields[field]))
    if "mail_user" in written and not is_mail_address(fields["mail_user"]):
        del fields["mail_user"]
        ignored.append(ignore_value("--mail-user", "", written["mail_user"].place))


def _is_plain_license(text: str) -> bool:
    return _PLAIN_LICENSE.fullmatch(text) is not None


def _is_mail_type(text: str) -> bool:
    return text.lower() not in OTHER_MAIL_TYPES


OTHER_MAIL_TYPES: Final = frozenset(
    {"invalid_depend", "time_limit", "time_limit_50", "time_limit_80", "time_limit_90", "array_tasks"}
)
"""Mail types of sbatch that Forebay does not send."""


def _is_text(text: str) -> bool:
    """Return whether a word of the command line or environment is UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def locate(place: str, sources: Mapping[str, str]) -> str:
    """Translate a place in the server's answer to the user's file, line or option."""
    if place in sources:
        return sources[place]
    for source in ("--bbf", "--bb", "script"):
        if place == source or place.startswith(source + " "):
            return sources.get(source, source) + place[len(source) :]
    return place


def parse_exports(
    exports: Sequence[str], environment: Mapping[str, str], before: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the variables of `before`, of `--export NAME=VALUE` and of `--export NAME` (its present value).

    Raises:
        Failure: bad input, if a name is invalid or not set here, or there are too many variables.
    """
    found = dict(before or {})
    for text in exports:
        if text not in (*NOTHING_EXPORTED, ALL_EXPORTED):
            found |= _read_variable(text, environment, "--export")
    size_bytes = sum(len(name.encode()) + len(value.encode()) for name, value in found.items())
    if len(found) > ENVIRONMENT_VARIABLES_MAX or size_bytes > ENVIRONMENT_BYTES_MAX:
        raise bad_input(
            f"{len(found)} variables with {size_bytes} bytes are exported",
            f"export at most {ENVIRONMENT_VARIABLES_MAX} with {ENVIRONMENT_BYTES_MAX} bytes; put the rest in a file",
            place="--export",
        )
    return found


def _script_exports(written: Setting, environment: Mapping[str, str], notes: list[str]) -> dict[str, str]:
    """Return the variables of `--export` in a script: a comma-separated list, ALL or NONE.

    A variable that is not set here is left out with a warning, as in sbatch.
    """
    found: dict[str, str] = {}
    for text in filter(None, map(str.strip, written.value.split(","))):
        if text in (*NOTHING_EXPORTED, ALL_EXPORTED):
            continue
        if "=" in text or text in environment:
            found |= _read_variable(text, environment, written.place)
        else:
            notes.append(f"{written.place}: the variable {text[:48]} is not set here, so it is not exported")
    return found


ALL_EXPORTED: Final = "ALL"
"""Value that exports the whole environment. It has no effect: a job has only named variables."""

NOTHING_EXPORTED: Final = ("NONE", "NIL")
"""Words for an empty environment."""


def _read_variable(text: str, environment: Mapping[str, str], place: str) -> dict[str, str]:
    name, equals, value = text.partition("=")
    if _VARIABLE.fullmatch(name) is None:
        raise bad_input(f"{name[:48]!r} is not the name of a variable", "write --export NAME=VALUE", place=place)
    if not equals:
        if name not in environment:
            raise bad_input(f"the variable {name} is not set here", f"write --export {name}=VALUE", place=place)
        value = environment[name]
    if not _is_text(value):
        raise bad_input(f"the value of {name} is not UTF-8 text", "export UTF-8 text only", place=place)
    return {name: value}
