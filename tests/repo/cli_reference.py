"""Reference pages of the command line, generated from the commands: exit codes, `#SBATCH` options, all commands.

`scripts/generate` writes them into docs/reference, and a test of the repository compares.
"""

import re
import textwrap
from collections.abc import Iterator

import click

from forebay.cluster.cli.app import cli
from forebay.cluster.cli.exits import MEANINGS, SERVE_MEANINGS
from forebay.cluster.cli.submission.sbatch_options import OPTIONS, Treatment
from forebay.cluster.cli.tree import TREE
from forebay.replica.values.limits import (
    JOB_NAME_CHARACTERS_MAX,
    PACKED_SCRIPT_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    SUBMITTED_SCRIPT_BYTES_MAX,
)
from forebay.replica.values.names import FILE_SYMBOLS


def overview() -> str:
    """Return the list of commands by section, each with its page."""
    parts = []
    for section, entries in TREE.items():
        page = f"commands/{section.lower()}.md"
        parts.append(f"### {section}\n\n| command | task |\n|---|---|")
        parts[-1] += "".join(
            f"\n| [`forebay {name}`]({page}#forebay-{name}) | {entry.summary} |" for name, entry in entries.items()
        )
    return "\n\n".join(parts)


def everyday() -> str:
    """Return the reference of the everyday commands."""
    return _commands("Everyday")


def operators() -> str:
    """Return the reference of the operators' commands."""
    return _commands("Operators")


def audit() -> str:
    """Return the reference of the audit commands."""
    return _commands("Audit")


def services() -> str:
    """Return the reference of the services."""
    return _commands("Services")


def options() -> str:
    """Return the reference of the options of `forebay` itself."""
    return "\n".join(_options(cli, click.Context(cli, info_name="forebay")))


def exit_codes() -> str:
    """Return the exit codes of commands and of a replica."""
    rows = "\n".join(f"| {int(code)} | {meaning} |" for code, meaning in MEANINGS.items())
    serve = "\n".join(f"| {code} | {meaning} |" for code, meaning in SERVE_MEANINGS.items())
    return (
        f"## Commands\n\n| code | meaning |\n|---|---|\n{rows}\n\n"
        "## Replicas\n\n"
        "`forebay run replica` becomes the process of the replica once it has read the configuration, and\n"
        "ends with its own code:\n\n"
        f"| code | meaning |\n|---|---|\n{serve}\n"
    )


def sbatch_options() -> str:
    """Return the options that `#SBATCH` lines may have, by their treatment."""
    return "\n\n".join(
        [
            _filled(
                "`forebay submit` reads `#SBATCH` lines as sbatch does: at the top of the script, before the first "
                "command, several options on one line if you like. `##SBATCH` keeps a line as a comment. Every option "
                "of sbatch of Slurm 22.05 to 26.05 is in one of these three tables; any other name is rejected with "
                "its line and column. All errors of a script are reported at once."
            ),
            "## Options that are carried out",
            _options_of(Treatment.CARRIED_OUT),
            "\n".join(map(_item, _NOTES)),
            _filled(
                f"A job's name may have up to {JOB_NAME_CHARACTERS_MAX} printable characters, blanks and brackets "
                f"included. A script may have up to {SUBMITTED_SCRIPT_BYTES_MAX >> 20} MiB. One over "
                f"{SCRIPT_BYTES_MAX >> 10} KiB is sent compressed, and may then have at most "
                f"{PACKED_SCRIPT_BYTES_MAX >> 10} KiB."
            ),
            "## Options without effect",
            _filled(
                "One warning lists those of a script. With `UnknownSbatchOptions=reject` in the site's configuration "
                "they are rejected. An account, QOS, licence or reservation that the script names and the site has not "
                "defined is treated in the same way; an account, only where the site has defined none."
            ),
            _options_of(Treatment.IGNORED),
            "## Options that are rejected",
            "They say where data goes, or what runs. A job of several nodes, by `-N` or `-w`, is rejected too.",
            _options_of(Treatment.REJECTED) + "\n",
        ]
    )


_NOTES = (
    "`--ntasks=N` and `--ntasks-per-node=N` request N times `--cpus-per-task` CPUs on the one node of the job; the "
    "script finds N in `$SLURM_NTASKS`.",
    "`--exclusive` requests all CPUs of the largest node of the partition, also with `=user` or `=mcs`.",
    "`--signal` without `B:` is sent to what the script has started, and with it to the script alone.",
    "`--export=ALL` has no effect: a job gets only named variables.",
    f"Names of files may have {FILE_SYMBOLS}. A width such as `%4j` pads a number.",
    "Of several partitions, the first that accepts the job is used.",
    "Other forms: `--part` for `--partition` as in getopt, and `--requeue=expedite` for `--requeue`.",
)


def _filled(text: str) -> str:
    lines = textwrap.fill(text, 99, break_long_words=False, break_on_hyphens=False)
    # A line of prose that begins like a list or a heading is none.
    return re.sub(r"(?m)^([-+*#])", r"\\\1", lines)


def _item(text: str) -> str:
    return textwrap.fill(
        text, 100, initial_indent="- ", subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def _options_of(treatment: Treatment) -> str:
    shown = [option for option in OPTIONS if option.treatment is treatment]
    if treatment is Treatment.CARRIED_OUT:
        rows = [f"| `{one.long}` | {one.short and f'`{one.short}`'} | {one.value} |" for one in shown]
        return "\n".join(["| long | short | value |", "|---|---|---|", *rows])
    rows = [f"| `{one.long}` | {one.short and f'`{one.short}`'} | {one.reason} |" for one in shown]
    return "\n".join(["| long | short | reason |", "|---|---|---|", *rows])


def _commands(section: str) -> str:
    """Return the reference of a section's commands, groups with their commands."""
    context = click.Context(cli, info_name="forebay")
    parts: list[str] = []
    for name in TREE[section]:
        parts += _sections(name, cli.commands[name], context, 2)
    return "\n".join(parts).rstrip("\n") + "\n"


def _sections(name: str, command: click.Command, context: click.Context, level: int) -> Iterator[str]:
    inner = click.Context(command, info_name=name, parent=context)
    yield _section(command, inner, level)
    if isinstance(command, click.Group):
        for child, one in command.commands.items():
            yield from _sections(child, one, inner, min(level + 1, 4))


def _section(command: click.Command, context: click.Context, level: int) -> str:
    lines = [f"{'#' * level} `{context.command_path}`", ""]
    for part in (command.help or "").split("\n\n"):
        lines += [_filled(" ".join(part.split())), ""]
    usage = " ".join(command.collect_usage_pieces(context))
    lines += [f"    {context.command_path} {usage}".rstrip(), ""]
    if not isinstance(command, click.Group):
        lines += [*_options(command, context), ""]
    return "\n".join(lines).rstrip("\n") + "\n"


def _options(command: click.Command, context: click.Context) -> list[str]:
    """Return a list of a command's options, each with its help."""
    found = [
        record
        for parameter in command.get_params(context)
        if not _is_help(parameter) and (record := parameter.get_help_record(context)) is not None
    ]
    return [_item(f"`{' '.join(option.split())}`: {' '.join(text.split())}") for option, text in found if text]


def _is_help(parameter: click.Parameter) -> bool:
    return "--help" in parameter.opts
