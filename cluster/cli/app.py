"""Outermost command `forebay`: its global options, and the commands of `cluster.cli.tree`."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
import threading
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.global_options import JSON_ANYWHERE, CommandGroup, GlobalOption, LazyCommands
from forebay.cluster.cli.group import SETTINGS, ForebayGroup
from forebay.cluster.cli.session import CONFIG_VARIABLE, DEADLINE_S, DEADLINE_S_MAX, Session
from forebay.cluster.cli.tree import TREE, Branch, Leaf

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

GARBAGE_THRESHOLD: Final = 100_000
"""Number of allocations before the first garbage collection, which most commands do not reach."""

COMPLETE_VARIABLE = "_FOREBAY_COMPLETE"
"""Environment variable by which a shell requests completions."""


def _commands(entries: Mapping[str, str | Leaf | Branch]) -> LazyCommands:
    """Return the commands and groups of one part of the command tree."""
    found: dict[str, str | click.Command] = {}
    for name, entry in entries.items():
        if isinstance(entry, Branch):
            found[name] = CommandGroup(name, help=entry.summary, commands=_commands(entry.children))
        else:
            found[name] = f"forebay.cluster.cli.{entry.target if isinstance(entry, Leaf) else entry}"
    return LazyCommands(found)


_OUTERMOST: Final = {name: entry for section in TREE.values() for name, entry in section.items()}


class _PathType(click.Path):
    """Path parameter that imports `pathlib` only when a path is given."""

    def coerce_path_result(self, value: Any) -> Path:
        """Return the path."""
        from pathlib import Path

        return Path(value)


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not context.resilient_parsing:
        click.echo(f"forebay, version {_version()}")
        context.exit()


def _version() -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version("forebay")
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"


@click.group(cls=ForebayGroup, commands=_commands(_OUTERMOST), context_settings=SETTINGS)
@click.option(
    "--config",
    "config_path",
    cls=GlobalOption,
    type=_PathType(),
    envvar=CONFIG_VARIABLE,
    metavar="FILE",
    help="Use this configuration file.",
)
@click.option(
    "--identity",
    "--user",
    "identity",
    cls=GlobalOption,
    envvar="FOREBAY_IDENTITY",
    metavar="NAME",
    help="Use this certificate, not your account's.",
)
@click.option("--stale", cls=GlobalOption, is_flag=True, help="Allow stale reads from any replica.")
@click.option(
    "--deadline",
    "deadline_s",
    cls=GlobalOption,
    type=click.FloatRange(0, DEADLINE_S_MAX, min_open=True),
    default=DEADLINE_S,
    metavar="SECONDS",
    help=f"Maximum wait, default {DEADLINE_S:g}.",
)
@JSON_ANYWHERE
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.pass_context
def cli(context: click.Context, config_path: Path | None, identity: str | None, stale: bool, deadline_s: float) -> None:
    """Forebay, a highly available burst-buffer controller."""
    if context.obj is None:
        context.obj = Session(config_path=config_path, identity=identity, stale=stale, deadline_s=deadline_s)


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script for a shell.

    For bash: eval "$(forebay support completion bash)"
    """
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    if found is None:
        raise bad_input(f"shell {shell!r} is not supported", "use bash, zsh or fish")
    # The class's own source() would run the shell to check its version; only the template is needed.
    source = found(cli, {}, "forebay", COMPLETE_VARIABLE)
    click.echo(source.source_template % source.source_vars())


def main() -> None:
    """Run the command line; never return."""
    # Most objects of a command live until it ends, so early collections would find nothing.
    gc.set_threshold(GARBAGE_THRESHOLD)
    try:
        cli(prog_name="forebay", complete_var=COMPLETE_VARIABLE)
    except SystemExit as end:
        if isinstance(end.code, int) and threading.active_count() == 1:
            _leave(end.code)
        raise


def _leave(code: int) -> NoReturn:
    """Run the exit handlers and end the process.

    Finalizing the interpreter would take a tenth of a short command's time.
    """
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
