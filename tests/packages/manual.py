"""Pages for man(1): one for `forebay` and one for each of its commands, generated as docs/reference/commands is."""

from collections.abc import Iterator

import click

from forebay.cluster.cli.app import cli
from forebay.cluster.cli.exits import MEANINGS, SERVE_MEANINGS


def pages(version: str, date: str) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of each page, such as forebay-job, in the language of man(7); `date` is YYYY-MM-DD."""
    context = click.Context(cli, info_name="forebay")
    names = sorted(cli.commands)
    head = [
        *_head("forebay", cli, version, date),
        *_synopsis(cli, context),
        *_description(cli),
        *_options(cli, context),
    ]
    head += [".SH COMMANDS"]
    for name in names:
        head += [".TP", f".BR forebay\\-{_plain(name)} (1)", _plain(_first(cli.commands[name]))]
    head += [".SH EXIT STATUS"]
    for code, meaning in MEANINGS.items():
        head += [".TP", f".B {int(code)}", _plain(meaning)]
    head += [
        ".SH FILES",
        ".TP",
        ".I /etc/forebay/forebay.toml",
        "where it is looked for last; the first is this directory",
    ]
    yield "forebay", "\n".join(head) + "\n"
    for name in names:
        command = cli.commands[name]
        inner = click.Context(command, info_name=name, parent=context)
        lines = [*_head(f"forebay-{name}", command, version, date), *_whole(command, inner)]
        if name == "run":
            lines += [".SH EXIT STATUS"]
            for number, meaning in SERVE_MEANINGS.items():
                lines += [".TP", f".B {number}", _plain(meaning)]
        lines += [".SH SEE ALSO", ".BR forebay (1)"]
        yield f"forebay-{name}", "\n".join(lines) + "\n"


def _head(title: str, command: click.Command, version: str, date: str) -> list[str]:
    return [
        f'.TH "{_plain(title.upper())}" 1 "{date}" "forebay {version}" "Forebay"',
        ".SH NAME",
        f"{_plain(title)} \\- {_plain(_first(command).rstrip('.'))}",
    ]


def _whole(command: click.Command, context: click.Context) -> Iterator[str]:
    """Yield synopsis, description and options of a command, then of those below it, each under its own heading."""
    yield from (*_synopsis(command, context), *_description(command), *_options(command, context))
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            inner = click.Context(command.commands[name], info_name=name, parent=context)
            yield from _below(command.commands[name], inner)


def _below(command: click.Command, context: click.Context) -> Iterator[str]:
    yield f'.SH "{_plain(context.command_path.upper())}"'
    yield from _usage(command, context)
    for part in _parts(command):
        yield from (".PP", _plain(part))
    yield from _rows(command, context)
    if isinstance(command, click.Group):
        for name in sorted(command.commands):
            inner = click.Context(command.commands[name], info_name=name, parent=context)
            yield from _below(command.commands[name], inner)


def _synopsis(command: click.Command, context: click.Context) -> list[str]:
    return [".SH SYNOPSIS", *_usage(command, context)]


def _usage(command: click.Command, context: click.Context) -> list[str]:
    pieces = " ".join(command.collect_usage_pieces(context))
    return [f".B {_plain(context.command_path)}", _plain(pieces)] if pieces else [f".B {_plain(context.command_path)}"]


def _description(command: click.Command) -> list[str]:
    lines = [".SH DESCRIPTION"]
    for part in _parts(command):
        lines += [_plain(part), ".PP"]
    return lines[:-1] if len(lines) > 1 else []


def _options(command: click.Command, context: click.Context) -> list[str]:
    rows = [*_rows(command, context)]
    return [".SH OPTIONS", *rows] if rows else []


def _rows(command: click.Command, context: click.Context) -> Iterator[str]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and parameter.name != "help":
            yield from (".TP", f".B {_plain(record[0])}", _plain(record[1]) or "\\&")


def _first(command: click.Command) -> str:
    parts = _parts(command)
    return parts[0] if parts else ""


def _parts(command: click.Command) -> list[str]:
    return [" ".join(part.split()) for part in (command.help or "").split("\n\n") if part.strip()]


def _plain(text: str) -> str:
    """Return text that man(7) shows as it is: no line is taken for a request, and a hyphen can be copied."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped[:1] in (".", "'") else escaped
