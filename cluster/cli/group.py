"""The outermost function of a command line: whatever happens below ends in a sentence and an exit code."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import click

from cluster.cli.exits import MEANINGS, ExitCode, Failure, bad_input
from cluster.cli.global_options import CommandGroup

if TYPE_CHECKING:
    from cluster.config import ConfigError

TRACEBACK_VARIABLE: Final = "FOREBAY_TRACEBACK"
"""Environment variable that shows the traceback of a fault, for whoever repairs it."""

HELP_WIDTH: Final = 100
"""Characters of a line of help, at most: longer ones are hard to read."""

SETTINGS: Final = {"help_option_names": ["-h", "--help"], "max_content_width": HELP_WIDTH}


class ForebayGroup(CommandGroup):
    """A group whose `main` never ends in a traceback, and whose help explains the exit codes."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command and exit with its code; with standalone_mode false, raise and return as click does."""
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, False, **extra)
        try:
            result = super().main(args, prog_name, complete_var, False, **extra)
            sys.stdout.flush()
        except (BrokenPipeError, _ReaderGone):
            _stop_writing()
            sys.exit(int(ExitCode.OK))
        except BaseException as error:
            sys.exit(int(report(error, as_json=_is_json(sys.argv[1:] if args is None else args))))
        sys.exit(result if isinstance(result, int) else int(ExitCode.OK))

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the words; --help and --version print here."""
        with _noticing_readers():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that the words named."""
        with _noticing_readers():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with what each is for, without importing those that say so where they are named."""
        if not isinstance(self.commands, LazyCommands):
            super().format_commands(ctx, formatter)
            return
        names = self.list_commands(ctx)
        # The widths are click's own (`Group.format_commands`).
        limit = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            formatter.write_dl([(name, self.commands.summary(name, limit)) for name in names])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Append the table of exit codes to the outermost help."""
        super().format_epilog(ctx, formatter)
        if ctx.parent is None:
            with formatter.section("Exit codes"):
                formatter.write_dl([(str(int(code)), meaning) for code, meaning in MEANINGS.items()])


class LazyCommands(MutableMapping[str, click.Command]):
    """The commands of a group by name, each imported when it is used first."""

    def __init__(self, places: Mapping[str, str], summaries: Mapping[str, str] = MappingProxyType({})) -> None:
        """`places`: name of a command -> `module:attribute`; `summaries`: what it is for, as its own help begins."""
        self._known: dict[str, str | click.Command] = dict(places)
        self._summaries = dict(summaries)

    def summary(self, name: str, characters_max: int) -> str:
        """Return what a command is for, in a line of the help."""
        said = self._summaries.get(name)
        command = self[name] if said is None else click.Command(name, help=said)
        return command.get_short_help_str(characters_max)

    def __getitem__(self, name: str) -> click.Command:
        known = self._known[name]
        if isinstance(known, str):
            module, _, attribute = known.partition(":")
            known = self._known[name] = getattr(importlib.import_module(module), attribute)
            assert isinstance(known, click.Command)
        return known

    def __setitem__(self, name: str, command: click.Command) -> None:
        self._known[name] = command

    def __delitem__(self, name: str) -> None:
        del self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)


class _ReaderGone(Exception):
    """Whoever read our output has gone away: no error, as with `| head`. Click would exit with 1, which is taken."""


@contextlib.contextmanager
def _noticing_readers() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError as error:
        raise _ReaderGone from error


def _is_json(words: Sequence[str]) -> bool:
    """Say whether errors are wanted as JSON, of words that perhaps cannot be read; what is behind -- is no option."""
    return "--json" in itertools.takewhile(lambda word: word != "--", words)


def report(error: BaseException, *, as_json: bool = False) -> ExitCode:
    """Print an error on stderr and return the code to exit with; SystemExit goes on as it is.

    As sentences; or, `as_json`, as the API says errors, in one line and the last one.
    """
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        error.show()
        return ExitCode.BAD_INPUT
    from cluster.cli.text import note

    failure = _failure_of(error)
    if as_json:
        _show_as_json(failure)
        return failure.code
    for line in failure.lines():
        note(line)
    return failure.code


def _failure_of(error: BaseException) -> Failure:
    from cluster.config import ConfigError

    if isinstance(error, Failure):
        return error
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

    from cluster.schemas import ErrorAnswer, ErrorView, OtherError

    said = ErrorView(
        code=failure.kind or failure.code.name.lower(),
        sentence=failure.sentence,
        remedy=failure.remedy,
        place=failure.place,
        outcome="unknown" if failure.code is ExitCode.OUTCOME_UNKNOWN else "refused",
        others=tuple(OtherError(sentence=one.sentence, remedy=one.remedy, place=one.place) for one in failure.others)
        or msgspec.UNSET,
    )
    from cluster.cli.text import json_line

    click.echo(json_line(ErrorAnswer(error=said)), err=True)


def _config_failure(error: ConfigError) -> Failure:
    """Return the failure for a configuration that cannot be used."""
    place = f"{error.place}, {error.key}" if error.key else error.place
    if isinstance(error.__cause__, PermissionError):
        return Failure(ExitCode.PERMISSION_DENIED, error.sentence, "ask its owner for a copy", place=place)
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
        f"this is a fault of Forebay itself: {type(error).__name__}: {error}",
        f"report it with what `{TRACEBACK_VARIABLE}=1` and the same command print",
    )


def _stop_writing() -> None:
    """Let the interpreter's own flush at exit go nowhere: who read our output has gone away."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)


def exit_with(code: ExitCode) -> NoReturn:
    """End the present command with a code, after whatever it has printed."""
    raise click.exceptions.Exit(int(code))
