"""What docs/cli.md says, generated from the commands themselves, so that it cannot say something else.

`scripts/generate` writes it there, and a test of the repository compares.
"""

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
        "`forebay serve` becomes the process of the replica once it has read the configuration, and ends with its own:"
        "\n\n"
        f"| code | meaning |\n|---|---|\n{serve}\n"
    )


def _sbatch_options() -> str:
    return (
        "## `#SBATCH` lines\n\n"
        "`forebay submit` reads them as sbatch does: at the top of the script, before the first command, with as many\n"
        "options on one line as you like. `##SBATCH` keeps a line as a comment. Every option of sbatch of Slurm 22.05\n"
        "to 26.05 is in one of these three tables; any other name is rejected with its line and column. All errors of\n"
        "a script are reported at once.\n\n"
        "### Options that are carried out\n\n"
        f"{_options_of(Treatment.CARRIED_OUT)}\n\n"
        "- `--ntasks=N` and `--ntasks-per-node=N` request N times `--cpus-per-task` CPUs on the one node of the job;\n"
        "  the script finds N in `$SLURM_NTASKS`.\n"
        "- `--exclusive` requests all CPUs of the largest node of the partition, also with `=user` or `=mcs`.\n"
        "- `--signal` without `B:` is sent to what the script has started, and with it to the script alone.\n"
        "- `--export=ALL` has no effect: a job has the variables that are named.\n"
        f"- Names of files may have {FILE_SYMBOLS}.\n"
        "  A width such as `%4j` pads a number.\n"
        "- Of several partitions, the first that accepts the job is used.\n"
        "- Other forms: `--part` for `--partition` as in getopt, and `--requeue=expedite` for `--requeue`.\n\n"
        f"A job's name may have up to {JOB_NAME_CHARACTERS_MAX} printable characters, blanks and brackets included.\n"
        f"A script may have up to {SUBMITTED_SCRIPT_BYTES_MAX >> 20} MiB. One over {SCRIPT_BYTES_MAX >> 10} KiB is "
        f"sent compressed,\nand may then have at most {PACKED_SCRIPT_BYTES_MAX >> 10} KiB.\n\n"
        "### Options without effect\n\n"
        "One warning lists those of a script. With `UnknownSbatchOptions=reject` in the site's configuration they are\n"
        "rejected. An account, QOS, licence or reservation that the script names and the site has not defined is\n"
        "treated in the same way; an account, only where the site has defined none.\n\n"
        f"{_options_of(Treatment.IGNORED)}\n\n"
        "### Options that are rejected\n\n"
        "They say where data goes, or what runs. So does a number of nodes above 1.\n\n"
        f"{_options_of(Treatment.REJECTED)}\n"
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
