"""What docs/reference/cli.md says, generated from the commands themselves, so that it cannot say something else.

`scripts/generate` writes it there, and a test of the repository compares.
"""

import textwrap
from collections.abc import Iterator

import click

from cluster.cli.app import cli
from cluster.cli.exits import MEANINGS, SERVE_MEANINGS
from cluster.cli.submission.sbatch_options import OPTIONS, Treatment
from replica.values.limits import (
    JOB_NAME_CHARACTERS_MAX,
    PACKED_SCRIPT_BYTES_MAX,
    SCRIPT_BYTES_MAX,
    SUBMITTED_SCRIPT_BYTES_MAX,
)
from replica.values.names import FILE_SYMBOLS


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
        "`forebay run replica` becomes the process of the replica once it has read the configuration, and ends with "
        "its own:"
        "\n\n"
        f"| code | meaning |\n|---|---|\n{serve}\n"
    )


def _sbatch_options() -> str:
    return "\n\n".join(
        [
            "## `#SBATCH` lines",
            _filled(
                "`forebay submit` reads them as sbatch does: at the top of the script, before the first command, "
                "several options on one line if you like. `##SBATCH` keeps a line as a comment. Every option of sbatch "
                "of Slurm 22.05 to 26.05 is in one of these three tables; any other name is rejected with its line and "
                "column. All errors of a script are reported at once."
            ),
            "### Options that are carried out",
            _options_of(Treatment.CARRIED_OUT),
            "\n".join(map(_item, _NOTES)),
            _filled(
                f"A job's name may have up to {JOB_NAME_CHARACTERS_MAX} printable characters, blanks and brackets "
                f"included. A script may have up to {SUBMITTED_SCRIPT_BYTES_MAX >> 20} MiB. One over "
                f"{SCRIPT_BYTES_MAX >> 10} KiB is sent compressed, and may then have at most "
                f"{PACKED_SCRIPT_BYTES_MAX >> 10} KiB."
            ),
            "### Options without effect",
            _filled(
                "One warning lists those of a script. With `UnknownSbatchOptions=reject` in the site's configuration "
                "they are rejected. An account, QOS, licence or reservation that the script names and the site has not "
                "defined is treated in the same way; an account, only where the site has defined none."
            ),
            _options_of(Treatment.IGNORED),
            "### Options that are rejected",
            "They say where data goes, or what runs. A job of several nodes, by `-N` or `-w`, is rejected too.",
            _options_of(Treatment.REJECTED) + "\n",
        ]
    )


_NOTES = (
    "`--ntasks=N` and `--ntasks-per-node=N` request N times `--cpus-per-task` CPUs on the one node of the job; the "
    "script finds N in `$SLURM_NTASKS`.",
    "`--exclusive` requests all CPUs of the largest node of the partition, also with `=user` or `=mcs`.",
    "`--signal` without `B:` is sent to what the script has started, and with it to the script alone.",
    "`--export=ALL` has no effect: a job has the variables that are named.",
    f"Names of files may have {FILE_SYMBOLS}. A width such as `%4j` pads a number.",
    "Of several partitions, the first that accepts the job is used.",
    "Other forms: `--part` for `--partition` as in getopt, and `--requeue=expedite` for `--requeue`.",
)


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


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
