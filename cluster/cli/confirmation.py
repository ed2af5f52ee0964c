"""Confirmation of destructive commands: a question on a terminal, --yes elsewhere."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from forebay.cluster.cli.exits import ExitCode, Failure, bad_input

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

YES_OPTION = click.option("--yes", is_flag=True, help="Skip the confirmation.")


def can_ask() -> bool:
    """Return whether standard input is a terminal."""
    return sys.stdin.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask on the terminal, unless `yes`.

    Raises:
        Failure: if the answer is no, or if there is no terminal.
    """
    if yes:
        return
    if not can_ask():
        raise bad_input(f"refusing without confirmation: {question}", "add --yes")
    if not click.confirm(question, err=True):
        raise Failure(ExitCode.INTERRUPTED, "not confirmed; nothing was changed")


def confirm_first(question: str) -> Callable[[Decorated], Decorated]:
    """Return a decorator that adds --yes to a command and asks the question first.

    `{name}` in the question stands for the command's argument NAME.
    """

    def decorate(function: Decorated) -> Decorated:
        @YES_OPTION
        @functools.wraps(function)
        def asking(yes: bool, **given: Any) -> Any:
            confirm(question.format(**given), yes=yes)
            return function(**given)

        return asking  # type: ignore[return-value]

    return decorate
