"""Outermost group: run a command line and turn every error into a message and an exit code."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from forebay.cluster.cli.exits import ExitCode, Failure, bad_input
from forebay.cluster.cli.global_options import CommandGroup
from forebay.cluster.cli.tree import TREE

if TYPE_CHECKING:
    from forebay.cluster.config import ConfigError

TRACEBACK_VARIABLE: Final = "FOREBAY_TRACEBACK"
"""Environment variable that shows the traceback of an internal error, for bug reports."""

HELP_WIDTH: Final = 100
"""Longest line of help, characters: longer lines are hard to read."""

SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH}


class ForebayGroup(CommandGroup):
    """Group whose `main` never ends in a traceback, and whose help lists the commands by section."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and exit with its code; without `standalone_mode`, return or raise as click does."""
        main = super().main
        if not standalone_mode:
            return main(args, prog_name, complete_var, False, **extra)
        return run_to_exit(
            lambda: main(args, prog_name, complete_var, False, **extra),
            as_json=_is_json(sys.argv[1:] if args is None else args),
        )

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the words; --help and --version print here."""
        with _detect_closed_output():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _detect_closed_output():
            return super().invoke(ctx)

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the description without a blank line above, so that the help fits on a screen of 40 lines."""
        with formatter.indentation():
            formatter.write_text(self.help or "")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the options except --help, which was just used, and then the commands."""
        help_option = self.get_help_option(ctx)
        options = (one for one in self.get_params(ctx) if one is not help_option)
        with formatter.section("Options"):
            formatter.write_dl([record for one in options if (record := one.get_help_record(ctx)) is not None])
        self.format_commands(ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by section, without importing them."""
        width = max(len(name) for section in TREE.values() for name in section)
        for section, entries in TREE.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), entry.summary) for name, entry in entries.items()])


def run_to_exit(call: Callable[[], object], *, as_json: bool) -> NoReturn:
    """Run a command and exit with its code; an error becomes a message on stderr."""
    try:
        result = call()
        sys.stdout.flush()
    except (BrokenPipeError, _OutputClosed):
        _stop_writing()
        sys.exit(int(ExitCode.OK))
    except click.exceptions.Exit as end:
        sys.exit(end.exit_code)
    except BaseException as error:
        sys.exit(int(report(error, as_json=as_json)))
    sys.exit(result if isinstance(result, int) else int(ExitCode.OK))


class _OutputClosed(Exception):
    """The reader of the output has exited, as with `| head`. This is no error, but click would exit with 1."""


@contextlib.contextmanager
def _detect_closed_output() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _OutputClosed from error


def _is_json(words: Sequence[str]) -> bool:
    """Return whether --json occurs before `--`, in words that may be invalid."""
    return "--json" in itertools.takewhile(lambda word: word != "--", words)


def report(error: BaseException, *, as_json: bool = False) -> ExitCode:
    """Print an error on stderr and return the exit code; raise SystemExit again.

    With `as_json` the error is one line of JSON in the API's form, the last line on stderr.
    """
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.BAD_INPUT
    from forebay.cluster.cli.text import note

    failure = _failure_of(error)
    if as_json:
        _show_as_json(failure)
        return failure.code
    for line in failure.lines():
        note(line)
    return failure.code


def _failure_of(error: BaseException) -> Failure:
    from forebay.cluster.config import ConfigError

    if isinstance(error, Failure):
        return error
    if isinstance(error, ModuleNotFoundError):
        from forebay.cluster.cli.extras import missing_extra

        if (lacking := missing_extra(error)) is not None:
            return lacking
    if isinstance(error, ConfigError):
        return _config_failure(error)
    if isinstance(error, click.ClickException):
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx is not None else "forebay"
        return bad_input(_sentence(error), f"see {command} --help")
    if isinstance(error, click.Abort | KeyboardInterrupt):
        return Failure(ExitCode.INTERRUPTED, "interrupted")
    return _fault(error)


def _show_as_json(failure: Failure) -> None:
    import msgspec

    from forebay.cluster.schemas import ErrorAnswer, ErrorView, OtherError

    said = ErrorView(
        code=failure.kind or failure.code.name.lower(),
        sentence=failure.sentence,
        remedy=failure.remedy,
        place=failure.place,
        outcome="unknown" if failure.code is ExitCode.OUTCOME_UNKNOWN else "rejected",
        others=tuple(OtherError(sentence=one.sentence, remedy=one.remedy, place=one.place) for one in failure.others)
        or msgspec.UNSET,
    )
    from forebay.cluster.cli.text import json_line

    click.echo(json_line(ErrorAnswer(error=said)), err=True)


def _config_failure(error: ConfigError) -> Failure:
    """Return the failure for an invalid configuration."""
    place = f"{error.place}, {error.key}" if error.key else error.place
    if isinstance(error.__cause__, PermissionError):
        return Failure(ExitCode.PERMISSION_DENIED, error.sentence, "ask the file's owner for access", place=place)
    return bad_input(error.sentence, error.remedy, place=place)


def _sentence(error: click.ClickException) -> str:
    message = error.format_message().strip().rstrip(".")
    return message[:1].lower() + message[1:] if message[1:2].islower() else message


def _fault(error: BaseException) -> Failure:
    if os.environ.get(TRACEBACK_VARIABLE):
        import traceback

        traceback.print_exception(error)
    return Failure(
        ExitCode.FAULT,
        f"internal error of Forebay: {type(error).__name__}: {error}",
        f"report it with the output of the same command with {TRACEBACK_VARIABLE}=1",
    )


def _stop_writing() -> None:
    """Redirect stdout to /dev/null, so that the interpreter's flush at exit does not fail."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def exit_with(code: ExitCode) -> NoReturn:
    """End the current command with this exit code, without a message."""
    raise click.exceptions.Exit(int(code))
