"""The table of docs/operate/tasks.md: each of its commands exists, its page and heading exist,
and it has an exercise in scripts/day2."""

import re
import shlex

import click
import pytest

from forebay.cluster.cli.app import cli
from tests.faults.day2.exercises import EXERCISES
from tests.faults.day2.table import PART, ROWS, TABLE
from tests.packages.day2_rows import EXERCISES as UNDER_SYSTEMD


def test_the_task_table_is_parsed_completely() -> None:
    assert len(ROWS) == sum(line.startswith("| ") for line in PART.splitlines()) - 1 >= 18


@pytest.mark.parametrize(("task", "command", "section"), ROWS)
def test_every_task_row_is_a_valid_command(task: str, command: str, section: str) -> None:
    link = re.fullmatch(r"\[[\w ]+\]\(([\w./-]+\.md)(?:#([\w-]+))?\)", section)
    assert link is not None
    page = (TABLE.parent / link[1]).read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    assert link[2] is None or link[2] in {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in headings}
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


def test_rows_and_exercises_correspond() -> None:
    assert sorted(one.task for one in EXERCISES.values()) == sorted(row.task for row in ROWS)


def test_every_row_is_also_exercised_under_systemd() -> None:
    assert {*UNDER_SYSTEMD} == {*EXERCISES}
