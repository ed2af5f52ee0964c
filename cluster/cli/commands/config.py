"""Commands `forebay config …`: show, compare and change the site's configuration, which is replicated state.

A configuration file is parsed here, on the operator's machine, with its includes and user IDs. The command sends the
resulting settings; a replica never reads such a file.
"""

import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from forebay.cluster.cli.commands.options import AT_OPTION
from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import JSON_OPTION
from forebay.cluster.cli.session import session
from forebay.cluster.cli.text import note, show_json
from forebay.cluster.client import Client
from forebay.cluster.schemas import CompareAnswer, made_of
from forebay.cluster.schemas import configuration as v
from forebay.cluster.schemas import operations as ops
from forebay.replica.grammar import (
    ConfFault,
    ConfLine,
    ConfSetting,
    ValueKind,
    find_key,
    included_file,
    parse_lines,
    split_lines,
)
from forebay.replica.values import SITE_USERS_MAX, plain

FILE_BYTES_MAX: Final = 1024 * 1024
"""Largest size of all files of one configuration, bytes: every key with its largest value needs less."""

INCLUDES_MAX: Final = 16
"""Maximum depth of nested includes: Slurm sites use one or two."""

FAULTS_SHOWN_MAX: Final = 20
"""Maximum number of faults of one file that are printed."""


def read_settings(path: Path) -> tuple[ConfSetting, ...]:
    """Return the settings of a file.

    Raises:
        Failure: bad input, with file, line and column of every fault.
    """
    reader = _Reader()
    parsed = parse_lines(reader.lines(path, depth=0, included_at=""))
    if parsed.faults:
        raise _failure(parsed.faults)
    return tuple(_replace_ids(setting) for setting in parsed.settings)


def parse_settings(pairs: tuple[str, ...]) -> tuple[ConfSetting, ...]:
    """Return the settings in Key=Value arguments.

    Raises:
        Failure: bad input, if an argument has no equals sign.
    """
    found: list[ConfSetting] = []
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise bad_input(f"{pair!r} has no equals sign", "write KEY=VALUE, for example StageInTimeout=600")
        found.append(_replace_ids(ConfSetting(key.strip(), value.strip())))
    return tuple(found)


class _Reader:
    def __init__(self) -> None:
        self._bytes = 0

    def lines(self, path: Path, *, depth: int, included_at: str) -> Iterator[ConfLine]:
        for line in split_lines(self._text(path, included_at), str(path)):
            included = included_file(line)
            if included is None:
                yield line
                continue
            place = f"{line.file} line {line.number}"
            if depth >= INCLUDES_MAX:
                raise bad_input(
                    f"more than {INCLUDES_MAX} levels of include", "check for a file that includes itself", place=place
                )
            # As in Slurm, a relative name is relative to the including file.
            yield from self.lines(path.parent / included, depth=depth + 1, included_at=place)

    def _text(self, path: Path, included_at: str) -> str:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            with open(descriptor, "rb") as file:
                if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                    raise bad_input(f"{str(path)!r} is not a regular file", "give a file", place=included_at)
                data = file.read(FILE_BYTES_MAX + 1)
        except OSError as error:
            code = ExitCode.NOT_FOUND if isinstance(error, FileNotFoundError) else ExitCode.BAD_INPUT
            sentence = f"{str(path)!r} cannot be read ({error.strerror})"
            raise Failure(code, sentence, "correct the path or the permissions", place=included_at) from error
        self._bytes += len(data)
        if self._bytes > FILE_BYTES_MAX:
            sentence = f"the configuration has more than {FILE_BYTES_MAX} bytes"
            raise bad_input(sentence, "give a burst_buffer.conf", place=included_at or str(path))
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            line = data[: error.start].count(b"\n") + 1
            sentence = "the line is not UTF-8 text"
            raise bad_input(sentence, "save the file as UTF-8", place=f"{path} line {line}") from error


def _failure(faults: tuple[ConfFault, ...]) -> Failure:
    first, others = faults[0], faults[1:]
    shown = [f"{fault.place}: {fault.sentence}; {fault.remedy}" for fault in others[: FAULTS_SHOWN_MAX - 1]]
    for text in shown:
        note(f"forebay: {text}")
    if len(others) >= FAULTS_SHOWN_MAX:
        note(f"forebay: and {len(others) - FAULTS_SHOWN_MAX + 1} more")
    return bad_input(first.sentence, first.remedy, place=first.place)


def _replace_ids(setting: ConfSetting) -> ConfSetting:
    """Return the setting with user IDs replaced by names, because replicas know users by name."""
    key = find_key(setting.key)
    if key is None or key.kind not in (ValueKind.USERS, ValueKind.DENIED):
        return setting
    users = setting.value.replace(":", ",").split(",") if key.kind is ValueKind.DENIED else setting.value.split(",")
    if not any(user.isascii() and user.isdigit() for user in users[: SITE_USERS_MAX + 1]):
        return setting
    named: list[str] = []
    for user in users:
        named.append(_user_name(key.name, user) if user.isascii() and user.isdigit() and len(user) < 11 else user)
    return ConfSetting(setting.key, ",".join(named), setting.file, setting.line, setting.column)


def _user_name(key: str, text: str) -> str:
    try:
        name = pwd.getpwuid(int(text)).pw_name
    except (KeyError, OverflowError):
        note(f"forebay: warning: {key}: no user of this machine has the ID {text}; the ID is kept unchanged")
        return text
    note(f"forebay: {key}: ID {text} is replaced by user {name}")
    return name


NOTHING = "(nothing)"

_FILE = click.argument("file", type=click.Path(path_type=Path))
_PARTIAL = click.option("--partial", is_flag=True, help="Keep the values of keys that FILE does not have.")
_EXPECT = click.option(
    "--expect-revision",
    type=click.IntRange(min=0),
    metavar="N",
    help="Reject the change if the configuration changed after revision N.  [default: the present revision]",
)


@click.command("show")
@click.option(
    "--as",
    "form",
    type=click.Choice(["burst_buffer.conf"]),
    help="Print a file for Slurm, without Forebay's own keys.",
)
@AT_OPTION
@JSON_OPTION
def show_configuration(form: str | None, at: str | None, as_json: bool) -> None:
    """Print the configuration as a file for `config apply`."""
    if form is not None and as_json:
        raise bad_input("--as and --json exclude each other", "use one of them")
    answer = session().read(ops.SHOW_CONFIGURATION, at=at)
    if as_json:
        show_json(answer)
        return
    text = answer.burst_buffer_conf if form else answer.text
    click.echo(text, nl=False)
    note(f"revision {answer.revision}, last changed at revision {answer.changed_revision}")


@click.command("diff")
@_FILE
@_PARTIAL
@JSON_OPTION
def diff(file: Path, partial: bool, as_json: bool) -> None:
    """Show what applying FILE would change."""
    request = v.CompareRequest(settings=_bodies(read_settings(file)), partial=partial)
    _print(session().ask(lambda client: client.call(ops.COMPARE_CONFIGURATION, request)), as_json)


@click.command("apply")
@_FILE
@click.option("--dry-run", is_flag=True, help="Show what would change, without changing it.")
@_PARTIAL
@_EXPECT
@JSON_OPTION
def apply(file: Path, dry_run: bool, partial: bool, expect_revision: int | None, as_json: bool) -> None:
    """Apply a burst_buffer.conf in one change (operators).

    FILE may contain Forebay's own keys. Slurm's keys that are missing from FILE get Slurm's defaults; Forebay's own
    keys keep their values.
    """
    _change(read_settings(file), partial, expect_revision, dry_run=dry_run, as_json=as_json)


@click.command("set")
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
@click.option("--dry-run", is_flag=True, help="Show what would change, without changing it.")
@_EXPECT
@JSON_OPTION
def set_keys(settings: tuple[str, ...], dry_run: bool, expect_revision: int | None, as_json: bool) -> None:
    """Set configuration keys in one change (operators).

    Other keys keep their values; KEY= resets a key to its default.
    """
    _change(parse_settings(settings), True, expect_revision, dry_run=dry_run, as_json=as_json)


def _bodies(settings: tuple[ConfSetting, ...]) -> tuple[v.SettingBody, ...]:
    """Return the settings as parts of a request."""
    return tuple(made_of(one, v.SettingBody) for one in settings)


def _change(
    settings: tuple[ConfSetting, ...], partial: bool, expected: int | None, *, dry_run: bool, as_json: bool
) -> None:
    async def change(client: Client) -> CompareAnswer:
        bodies = _bodies(settings)
        comparing = v.CompareRequest(settings=bodies, partial=partial, expect_revision=expected)
        compared = await client.call(ops.COMPARE_CONFIGURATION, comparing)
        if not dry_run:
            # Reject this change after a concurrent change, so that the change made is the change printed.
            known = compared.revision if expected is None else expected
            request = v.ConfigureRequest(
                command_id=client.new_command_id(), settings=bodies, partial=partial, expect_revision=known
            )
            await client.call(ops.CONFIGURE_SITE, request)
        return compared

    answer = session().ask(change)
    _print(answer, as_json)
    if as_json:
        return
    if dry_run:
        note("dry run: nothing was changed")
    elif answer.differences:
        note("changed")


def _print(answer: CompareAnswer, as_json: bool) -> None:
    if as_json:
        show_json(answer)
        return
    for row in answer.differences:
        click.echo(f"{row.key}: {plain(row.before) or NOTHING} -> {plain(row.after) or NOTHING}")
    if not answer.differences:
        note("no difference")
    note(f"compared at revision {answer.revision}; last changed at revision {answer.changed_revision}")
