"""Options of the outermost command that are taken anywhere: before the name of a command, between names, and after."""

from __future__ import annotations

import copy
from collections.abc import Set
from typing import Any, Final

import click

from cluster.cli.session import Session

_AS_JSON: Final = "cluster.cli.as_json"
"""Key of what all contexts of one command line share: whether --json was given anywhere."""


class GlobalOption(click.Option):
    """An option of the outermost command that each command takes too, unless one of its own has that name."""

    def inherited(self, own: Set[str]) -> list[click.Option]:
        """Return the option for a command that has these options of its own: none where nothing of it is left."""
        words = [word for word in self.opts if word not in own]
        if not words:
            return []
        # Hidden: the help of the outermost command says what it is for.
        return [
            click.Option(
                [*words, self.name or ""], type=self.type, is_flag=self.is_flag, hidden=True, expose_value=False,
                callback=note_json if self.name == "as_json" else _note_in_session,
            )
        ]  # fmt: skip


def note_json(context: click.Context, parameter: click.Parameter, value: bool) -> bool:
    """Return whether --json was given, here or before, and note it for the commands below."""
    context.meta[_AS_JSON] = value or is_json(context)
    return is_json(context)


def is_json(context: click.Context) -> bool:
    """Say whether --json was given, for a command that has no such option of its own."""
    return bool(context.meta.get(_AS_JSON))


def _note_in_session(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    current = context.find_object(Session)
    if current is not None and parameter.name and value not in (None, False):
        setattr(current, parameter.name, value)


JSON_ANYWHERE = click.option(
    "--json", "as_json", cls=GlobalOption, is_flag=True, expose_value=False, callback=note_json,
    help="Print one JSON object on stdout and nothing else, and what goes wrong as one on stderr.",
)  # fmt: skip
"""For the outermost command."""

JSON_OPTION = click.option(
    "--json", "as_json", is_flag=True, callback=note_json, help="Print one JSON object on stdout and nothing else."
)
"""For a command that has an answer as JSON, which it prints wherever --json is given."""


class CommandGroup(click.Group):
    """A group whose commands take the options of the outermost one."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command as it is with those options; what follows one that passes words on is not ours."""
        command = super().get_command(ctx, cmd_name)
        if command is None or command.context_settings.get("ignore_unknown_options"):
            return command
        own = {word for one in command.params for word in (*one.opts, *one.secondary_opts)}
        given = ctx.find_root().command.params
        more = [new for one in given if isinstance(one, GlobalOption) for new in one.inherited(own)]
        taking = copy.copy(command)
        taking.params = [*command.params, *more]
        return taking


CommandGroup.group_class = CommandGroup
