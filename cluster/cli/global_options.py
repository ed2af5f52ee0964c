"""Global options, which are accepted at any position of the command line, and groups that accept them."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator, Mapping, MutableMapping, Set
from typing import Any, Final

import click

from forebay.cluster.cli.exits import bad_input
from forebay.cluster.cli.session import Session
from forebay.cluster.cli.tree import GUESSES, SYNONYMS, paths

_AS_JSON: Final = "forebay.cluster.cli.as_json"
"""Key in the shared click context: whether --json was given anywhere."""


class GlobalOption(click.Option):
    """Option of the outermost command that every command accepts, unless the command defines an option of that name."""

    def for_command(self, own: Set[str]) -> list[click.Option]:
        """Return the option without the names in `own`, the command's own options; empty if no name is left."""
        words = [word for word in self.opts if word not in own]
        if not words:
            return []
        # Hidden, because the help of the outermost command describes it.
        return [
            click.Option(
                [*words, self.name or ""], type=self.type, is_flag=self.is_flag, hidden=True, expose_value=False,
                callback=note_json if self.name == "as_json" else _note_in_session,
            )
        ]  # fmt: skip


def note_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Return whether --json was given here or before, and record it for subcommands."""
    context.meta[_AS_JSON] = value or is_json(context)
    return is_json(context)


def is_json(context: click.Context) -> bool:
    """Return whether --json was given, for a command without that option."""
    return bool(context.meta.get(_AS_JSON))


def _note_in_session(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    current = context.find_object(Session)
    if current is not None and parameter.name and value not in (None, False):
        setattr(current, parameter.name, value)


JSON_ANYWHERE = click.option(
    "--json", "as_json", cls=GlobalOption, is_flag=True, expose_value=False, callback=note_json,
    help="Print one JSON object; errors as JSON on stderr.",
)  # fmt: skip
"""Option --json of the outermost command."""

JSON_OPTION = click.option("--json", "as_json", is_flag=True, callback=note_json, help="Print one JSON object.")
"""Option --json of a command that can print its answer as JSON."""


class LazyCommands(MutableMapping[str, click.Command]):
    """Commands of a group by name, each imported on its first use."""

    def __init__(self, entries: Mapping[str, str | click.Command]) -> None:
        """Map each name to a command or its `module:attribute`."""
        self._known: dict[str, str | click.Command] = dict(entries)

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


class CommandGroup(click.Group):
    """Group whose commands accept the global options, listed in the order of the command tree."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names in the order of the command tree."""
        return list(self.commands)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command with the global options added, unless it accepts unknown options."""
        command = super().get_command(ctx, cmd_name)
        if command is None or command.context_settings.get("ignore_unknown_options"):
            return command
        own = {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
        given = ctx.find_root().command.params
        more = [new for one in given if isinstance(one, GlobalOption) for new in one.for_command(own)]
        taking = copy.copy(command)
        taking.params = [*command.params, *more]
        return taking

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command for the words, which may be one of GUESSES.

        Raises:
            Failure: bad input, with a suggestion, if there is no such command.
        """
        name = args[0]
        if name in self.commands or name.startswith("-"):
            return super().resolve_command(ctx, args)
        words = (*_words(ctx), name)
        meant = GUESSES.get(words)
        if meant is None:
            where = " ".join(("forebay", *words[:-1]))
            near = suggest_commands(words)
            remedy = f"did you mean {', '.join(f'`forebay {one}`' for one in near)}?" if near else f"see {where} --help"
            raise bad_input(f"{where} has no command {name!r}", remedy)
        found, context = ctx.find_root().command, ctx.find_root()
        for word in meant:
            assert isinstance(found, click.Group)
            command = found.get_command(context, word)
            assert command is not None
            found = command
        return meant[-1], found, args[1:]


CommandGroup.group_class = CommandGroup


def _words(context: click.Context) -> list[str]:
    """Return the names typed so far, without `forebay`."""
    words: list[str] = []
    while context.parent is not None:
        words.insert(0, context.info_name or "")
        context = context.parent
    return words


SUGGESTED_MAX: Final = 3


def suggest_commands(words: tuple[str, ...]) -> list[str]:
    """Return the commands that unknown words may stand for, the likeliest first."""
    import difflib

    *before, last = words
    last = SYNONYMS.get(last, last)
    known = {path: " ".join(path) for path in paths()}
    beside = {path[-1]: text for path, text in known.items() if path[:-1] == tuple(before)}
    found = [beside[name] for name in difflib.get_close_matches(last, beside, n=SUGGESTED_MAX)]
    found += [text for path, text in known.items() if path[-1] == last]
    return list(dict.fromkeys(found))[:SUGGESTED_MAX]
