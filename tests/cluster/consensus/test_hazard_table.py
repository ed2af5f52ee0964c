"""The hazard table in cluster/consensus/DESIGN.md is complete, and its tests exist.

Each module with Raft rules names the sections of the paper that they come from.
"""

import ast
import functools
import importlib.util
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import forebay.cluster.consensus.stock as stock
from tests.repo.tree import ROOT
from tests.simulation.bugs import PLANTS

DESIGN = ROOT / "cluster" / "consensus" / "DESIGN.md"
HERE = Path(__file__).parent
HAZARDS = [f"H{number}" for number in range(1, 27)]

RULES = {
    "state": r"figure 2",
    "raft_log": r"figure 2.*thesis 10\.2\.1.*thesis 4\.1",
    "leader_election": r"sections 5\.1, 5\.2 and 5\.4\.1.*thesis 9\.6",
    "log_replication": r"5\.3\).*5\.4\.2.*thesis 6\.2",
    "log_compaction": r"section 7",
    "membership_change": r"thesis 4\)",
    "leadership_transfer": r"thesis 3\.10",
    "configurations": r"thesis 4\.1",
    "read_index": r"thesis 6\.4",
    "snapshots": r"section 7",
}
"""Modules with Raft's rules, and the sections that each must name."""


class Row:
    """Row of the table."""

    def __init__(self, line: str) -> None:
        hazards, self.hazard, self.guard, self.tests = (cell.strip() for cell in line.strip().strip("|").split("|"))
        self.numbers = re.findall(r"H\d+", hazards)
        self.patterns = re.findall(r"`(test_\w+\*?)`", self.tests)
        self.paths = re.findall(r"`(tests/[\w/]+\.py)`", self.tests)
        self.bugs = re.findall(r"bug `(\w+)`", self.tests)
        self.stock = bool(re.search(r"\bstock\b", self.tests))


def rows() -> list[Row]:
    lines = DESIGN.read_text().splitlines()
    return [Row(line) for line in lines if re.match(r"\| H\d", line)]


@functools.cache
def known_tests() -> dict[str, str]:
    """Return the source of each test function under tests/ by name; functions with one name are joined."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, source in sources_in(path).items():
            found[name] = found.get(name, "") + source
    return found


def sources_in(path: Path) -> dict[str, str]:
    """Return the source of each test function of one module, by name."""
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    return {
        node.name: "".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_every_hazard_has_a_row() -> None:
    assert [number for row in rows() for number in row.numbers] == HAZARDS
    assert all(row.hazard and row.guard for row in rows())


@pytest.mark.parametrize("row", rows(), ids=lambda row: "-".join(row.numbers))
def test_tests_named_by_a_row_exist_and_concern_its_hazard(row: Row) -> None:
    known = known_tests()
    assert row.patterns, f"{row.numbers} names no test"
    for pattern in row.patterns:
        module = HERE / f"{pattern}.py"  # a module of scenarios may be named without its path
        assert any(fnmatch(name, pattern) for name in known) or (module.exists() and sources_in(module)), (
            f"there is no test {pattern}"
        )
    for path in row.paths:
        assert (ROOT / path).exists() and sources_in(ROOT / path), f"there is no module {path} with tests"
    assert set(row.bugs) <= set(PLANTS), f"bugs without a plant: {sorted(set(row.bugs) - set(PLANTS))}"
    first = int(row.numbers[0][1:])
    assert any(fnmatch(name, f"test_h{first:02d}_*") for name in known), f"no test is named after {row.numbers[0]}"


@pytest.mark.parametrize("row", [row for row in rows() if row.stock], ids=lambda row: row.numbers[0])
def test_row_marked_stock_has_a_test_of_the_stock_engine(row: Row) -> None:
    shows = [
        name
        for name, source in known_tests().items()
        if any(fnmatch(name, pattern) for pattern in row.patterns) and re.search(r"StockHarness|SyncObj", source)
    ]
    assert shows, f"{row.numbers[0]}: no test runs PySyncObj itself"


def test_journal_guards_are_tested_on_the_real_journal() -> None:
    """wal guards H1 and H9 to H11: a test over the journal in memory would pass without these guards."""
    doubles = [
        name
        for name, source in known_tests().items()
        if re.match(r"test_h(01|09|10|11)_", name) and not re.search(r"\bLife\b", source)
    ]
    assert doubles == []


def test_test_named_after_a_hazard_is_named_by_its_row() -> None:
    patterns = [pattern for row in rows() for pattern in row.patterns]
    orphans = [
        name
        for name in known_tests()
        if re.match(r"test_h\d\d_", name) and not any(fnmatch(name, pattern) for pattern in patterns)
    ]
    assert orphans == []


@pytest.mark.parametrize(("module", "sections"), RULES.items(), ids=RULES)
def test_module_of_rules_names_its_sections_of_paper_and_thesis(module: str, sections: str) -> None:
    assert re.search(sections, (ROOT / "cluster" / "consensus" / f"{module}.py").read_text(), re.DOTALL)


def test_every_module_of_consensus_is_in_the_table_of_modules() -> None:
    named = set(re.findall(r"`(\w+)`", "\n".join(re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", DESIGN.read_text(), re.M))))
    present = {path.stem for path in DESIGN.parent.glob("*.py")} - {"__init__"}
    assert named >= present, f"not in the table: {sorted(present - named)}"


def test_every_module_of_consensus_imports_only_modules_below_it() -> None:
    order = re.findall(r"^\| `(\w+)` \|", DESIGN.read_text(), re.M)
    for at, module in enumerate(order):
        tree = ast.parse((DESIGN.parent / f"{module}.py").read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module is not None]
        names = {f"{node.module}.{alias.name}" for node in imports for alias in node.names}
        used = {
            name.removeprefix("forebay.cluster.consensus.").split(".")[0]
            for name in names
            if "forebay.cluster.consensus." in name
        }
        assert used <= set(order[at + 1 :]), f"{module} imports {sorted(used - set(order[at + 1 :]))}"


@pytest.mark.parametrize("version", ["0.3.16", "0.3.18", "0.4.0", "0.3.17.1", ""])
def test_adapter_rejects_any_other_version_of_the_engine(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pysyncobj.version.VERSION", version)
    spec = importlib.util.spec_from_file_location("stock_of_another_release", stock.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(ImportError, match=r"overrides private methods of exactly 0\.3\.17"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_private_names_of_the_engine_are_used_nowhere_else() -> None:
    packages = ("cluster", "replica", "snapshots", "wal", "scripts")
    offenders = [
        str(path.relative_to(ROOT))
        for package in packages
        for path in (ROOT / package).rglob("*.py")
        if path != Path(stock.__file__).resolve()
        and re.search(r"_SyncObj__|\bpysyncobj\b.*import|import pysyncobj", path.read_text())
    ]
    assert offenders == []
