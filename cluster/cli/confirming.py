"""What is asked before something is destroyed: on a terminal; --yes answers, and nobody is asked elsewhere."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from cluster.cli.exits import ExitCode, Failure, bad_input

Decorated = TypeVar("Decorated", bound=Callable[..., Any])

YES_OPTION = click.option("--yes", is_flag=True, help="Skip the confirmation.")


def can_ask() -> bool:
    """Say whether somebody sits at a terminal who can be asked."""
    return sys.stdin.isatty()


def confirm(question: str, *, yes: bool) -> None:
    """Ask on the terminal and return if it is to be done; Failure if not, or if nobody can be asked without `yes`."""
    if yes:
        return
    if not can_ask():
        raise bad_input(f"there is no terminal to ask at: {question}", "answer with --yes")
    if not click.confirm(question, err=True):
        raise Failure(ExitCode.INTERRUPTED, "it was not confirmed", "nothing was changed")


def destroys(question: str) -> Callable[[Decorated], Decorated]:
    """Return what has a command ask first, and gives it --yes; `{name}` in the question is what was typed for NAME."""

    def decorate(function: Decorated) -> Decorated:
        @YES_OPTION
        @functools.wraps(function)
        def asking(yes: bool, **given: Any) -> Any:
            confirm(question.format(**given), yes=yes)
            return function(**given)

        return asking  # type: ignore[return-value]

    return decorate
