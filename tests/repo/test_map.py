"""What the documents say of where things stand: every module that they name is there."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.tree import ROOT

PACKAGES = ("replica", "wal", "snapshots", "cluster")
DESIGNS = sorted(path.relative_to(ROOT) for package in PACKAGES for path in (ROOT / package).rglob("DESIGN.md"))
ROW = re.compile(r"^\| (?P<rooms>`[^|]+`[^|]*) \|(?P<rest>.*)\|$", re.MULTILINE)
TABLE = re.compile(r"^\| package of (?P<packages>[^|]+)\|", re.MULTILINE)
WORD = re.compile(r"`([a-z_][a-z_/]*)`")
PATH = re.compile(r"(?<![\w/.-])((?:[a-z_]+/)+[a-z_]+)(?![\w/.*-])")


def is_there(name: str, within: Path) -> bool:
    """Whether a module or a room of this name is anywhere below a directory."""
    return any(
        found.name in (name.rsplit("/")[-1], name.rsplit("/")[-1] + ".py") and str(found.with_suffix("")).endswith(name)
        for found in within.rglob("*")
    )


def named_in_the_map() -> Iterator[tuple[str, str]]:
    """Yield (package, name) for what ARCHITECTURE.md names in the tables of rooms."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for head in TABLE.finditer(text):
        table = text[head.start() :].split("\n\n")[0]
        packages = WORD.findall(head["packages"])
        for row in ROW.finditer(table):
            for name in WORD.findall(row.group()):
                yield packages[0] if len(packages) == 1 else "", name


def test_the_map_names_modules_that_are_there() -> None:
    rows = [*named_in_the_map()]
    assert len(rows) > 20
    missing = [
        f"{package}: {name}"
        for package, name in rows
        if not any(is_there(name, ROOT / one) for one in ([package] if package else PACKAGES))
    ]
    assert missing == []


@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_a_design_names_modules_that_are_there(design: Path) -> None:
    rooms = tuple(path.name for path in (ROOT / "cluster").iterdir() if path.is_dir()) + PACKAGES
    inside = tuple(path.name for path in (ROOT / design).parent.iterdir() if path.is_dir())
    named = {
        name
        for name in PATH.findall((ROOT / design).read_text(encoding="utf-8"))
        if name.split("/")[0] in rooms + inside
    }
    assert sorted(name for name in named if not any(is_there(name, ROOT / one) for one in (*PACKAGES, "tests"))) == []
