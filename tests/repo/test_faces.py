"""A face that loads its room's modules late shows at run time what it shows to type checkers and contracts."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.repo.tree import ROOT, dotted, modules, text_of

LATE = [path for path in modules() if path.name == "__init__.py" and "forebay.replica.lazy_exports" in text_of(path)]


def declared(path: Path) -> dict[str, str]:
    """Return the names that a face imports for type checkers, each with its module."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.ImportFrom) and node.module not in ("typing", "forebay.replica.lazy_exports"):
            found |= {alias.asname or alias.name: str(node.module) for alias in node.names}
    return found


def test_there_are_faces_to_check() -> None:
    assert len(LATE) > 8


@pytest.mark.parametrize("path", LATE, ids=dotted)
def test_a_late_face_shows_what_it_declares(path: Path) -> None:
    room = importlib.import_module(dotted(path))
    for name, module in declared(path).items():
        assert getattr(room, name) is getattr(importlib.import_module(module), name), name


@pytest.mark.parametrize("path", LATE, ids=dotted)
def test_no_name_of_a_late_face_is_a_module_of_its_room(path: Path) -> None:
    """Importing that module would put it where the name is looked for."""
    room = ROOT / path.parent
    assert not {one.stem for one in room.iterdir()} & declared(path).keys()


@pytest.mark.parametrize("path", LATE, ids=dotted)
def test_a_late_face_refuses_names_that_it_does_not_show(path: Path) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nothing_of_the_kind'"):
        importlib.import_module(dotted(path)).nothing_of_the_kind  # noqa: B018


def test_a_late_face_imports_nothing_of_its_room() -> None:
    names = [dotted(path) for path in LATE]
    program = f"import sys\nfor name in {names!r}:\n    __import__(name)\nprint(*sorted(sys.modules))"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = {name for name in printed.stdout.split() if name.startswith("forebay.")}
    rooms = {".".join(name.split(".")[: end + 1]) for name in names for end in range(1, name.count(".") + 1)}
    # The command line's own face is its entry point.
    allowed = (
        rooms | {"forebay.replica.lazy_exports"} | {name for name in loaded if name.startswith("forebay.cluster.cli")}
    )
    assert loaded <= allowed
