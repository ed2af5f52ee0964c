"""The table of day 2 in docs/operations.md: each of its commands is one that there is, in a section that there is."""

import re
import shlex

import click
import pytest

from cluster.cli.app import cli
from tests.repo.tree import ROOT

TEXT = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ROWS = re.findall(
    r"^\| ([^|]+) \| `(forebay [^`]+)` \| ([^|]+) \|$",
    TEXT.partition("## Day 2: what to type\n")[2].partition("\n## ")[0],
    flags=re.MULTILINE,
)


def test_the_table_has_a_row_for_every_line_of_it() -> None:
    part = TEXT.partition("## Day 2: what to type\n")[2].partition("\n## ")[0]
    assert len(ROWS) == sum(line.startswith("| ") for line in part.splitlines()) - 1 >= 18


@pytest.mark.parametrize(("task", "command", "section"), ROWS)
def test_a_row_is_a_command_that_is_understood(task: str, command: str, section: str) -> None:
    assert f"\n## {section}\n" in TEXT or section == "[cli.md](cli.md)"
    words = shlex.split(command)[1:]
    found: click.Command = cli
    context = click.Context(cli, info_name="forebay")
    while isinstance(found, click.Group) and words:
        following = found.get_command(context, words[0])
        assert following is not None, f"there is no {words[0]}"
        found, words = following, words[1:]
        context = click.Context(found, info_name=found.name, parent=context)
    assert not isinstance(found, click.Group), f"{command} names no command"
    found.parse_args(context, words)
