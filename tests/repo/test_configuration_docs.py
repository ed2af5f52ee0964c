"""docs/reference/configuration.md and the example files say what the code does."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.replica.decide.configuration import file_text, target_configuration
from forebay.replica.grammar.burst_buffer_conf import parse_text
from forebay.replica.grammar.settings import KEYS
from forebay.replica.messages import commands as c
from forebay.replica.values.errors import Rejection
from tests.replica.world import World
from tests.repo.configuration_reference import row
from tests.repo.tree import ROOT

EXAMPLES = sorted((ROOT / "docs" / "examples").glob("burst_buffer*.conf"))


def test_the_page_has_the_row_of_every_key_once() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    known = set(map(row, KEYS))
    assert sorted(line for line in page.splitlines() if line in known) == sorted(known)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_example_is_accepted_and_applied(path: Path) -> None:
    parsed = parse_text(path.read_text(encoding="utf-8"), path.name)
    assert parsed.faults == () and parsed.settings
    world = World()
    assert world.settle(c.ConfigureSite(parsed.settings)) == 0
    again = parse_text(file_text(world.state))
    assert not isinstance(target_configuration(world.state, again.settings), Rejection)


def test_the_page_links_to_every_example() -> None:
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    assert EXAMPLES and all(f"(../examples/{path.name})" in page for path in EXAMPLES)
