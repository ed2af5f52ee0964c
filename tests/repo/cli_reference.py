"""What docs/cli.md says, generated from the commands themselves, so that it cannot say something else.

`scripts/generate` writes it there, and a test of the repository compares.
"""

from collections.abc import Iterator

import click

from cluster.cli.app import cli
from cluster.cli.exits import MEANINGS, SERVE_MEANINGS
from cluster.cli.submission.sbatch import OPTIONS


def render() -> str:
    """Return the reference as Markdown; it depends on nothing but the commands."""
    parts = [_exit_codes(), _sbatch_options(), "## Commands\n"]
    context = click.Context(cli, info_name="forebay")
    parts.append(_section(cli, context, 3))
    parts += _sections(cli, context, 3)
    return "\n".join(parts).rstrip("\n") + "\n"


def _exit_codes() -> str:
    rows = "\n".join(f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items())
    serve = "\n".join(f"| {code} | {meaning} |" for code, meaning in SERVE_MEANINGS.items())
    return (
        f"## Exit codes\n\n| code | meaning |\n|---|---|\n{rows}\n\n"
        "`forebay serve` becomes the process of the replica once it has read the configuration, and ends with its own:"
        "\n\n"
        f"| code | meaning |\n|---|---|\n{serve}\n"
    )


def _sbatch_options() -> str:
    rows = "\n".join(
        f"| `{option.long}` | {option.short and f'`{option.short}`'} | {_value(option.takes_value, option.only)} |"
        for option in OPTIONS
    )
    return (
        "## `#SBATCH` lines\n\n"
        "`forebay submit` reads them as sbatch does: at the top of the script, before the first command. An option\n"
        "that is not in this table is refused with its line and column; `##SBATCH` keeps a line as a comment.\n\n"
        f"| long | short | value |\n|---|---|---|\n{rows}\n"
    )


def _value(takes_value: bool, only: str) -> str:
    if not takes_value:
        return "none"
    return f"`{only}` only" if only else "any"


def _sections(group: click.Group, context: click.Context, level: int) -> Iterator[str]:
    for name, command in sorted(group.commands.items()):
        inner = click.Context(command, info_name=name, parent=context)
        yield _section(command, inner, level)
        if isinstance(command, click.Group):
            yield from _sections(command, inner, level)


def _section(command: click.Command, context: click.Context, level: int) -> str:
    help_text = " ".join(line.strip() for line in (command.help or "").split("\n\n")[0].splitlines())
    more = [" ".join(part.split()) for part in (command.help or "").split("\n\n")[1:]]
    lines = [f"{'#' * level} `{context.command_path}`", "", help_text, ""]
    for part in more:
        lines += [part, ""]
    usage = " ".join(command.collect_usage_pieces(context))
    lines += [f"    {context.command_path} {usage}".rstrip(), ""]
    rows = [
        record
        for parameter in command.get_params(context)
        if not _is_help(parameter) and (record := parameter.get_help_record(context)) is not None
    ]
    if rows:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| `{_cell(option)}` | {_cell(meaning)} |" for option, meaning in rows]
        lines.append("")
    return "\n".join(lines)


def _is_help(parameter: click.Parameter) -> bool:
    return "--help" in parameter.opts


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
