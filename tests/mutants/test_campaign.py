"""Random faults: every operator makes another valid program, and a campaign tells what the nearest tests notice."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mutants.campaign import (
    EQUIVALENT,
    TREE,
    Limits,
    Planted,
    _lines,
    draw,
    equivalents,
    row_of,
    run,
    summary,
)
from tests.mutants.nearest import nearest_tests
from tests.mutants.operators import OPERATORS, faults_of, is_applicable

EXAMPLES = {
    "comparison": ("return a < b", {"return a <= b"}),
    "bound": ("return a[1:]", {"return a[2:]", "return a[0:]"}),
    "statement order": ("a.append(1); a.clear()", set()),
    "argument order": ("return divmod(a, b)", {"return divmod(b, a)"}),
    "sync": ("os.fsync(a)", {"pass"}),
    "swallow": ("raise ValueError(a)", {"pass"}),
    "negate": ("return a if b else c", {"return a if not (b) else c"}),
    "not": ("return not a", {"return (a)"}),
    "boolean": ("return a and b or c", {"return a or b or c", "return a and b and c"}),
    "remove": ("a.append(b)", {"pass"}),
}


@pytest.mark.parametrize("operator", OPERATORS)
def test_an_operator_changes_what_it_says(operator: str) -> None:
    line, wanted = EXAMPLES[operator]
    source = f"def f(a, b, c):\n    {line}\n".encode()
    faults = [fault for fault in faults_of(source) if fault.operator == operator]
    found = {fault.applied_to(source).decode().splitlines()[1].strip() for fault in faults}
    assert found == wanted
    assert all(fault.line == 2 and is_applicable(fault, source) for fault in faults)


def test_neighbouring_statements_change_places_with_what_is_between_them() -> None:
    source = b"def f(a):\n    a.one()  # first\n    # then\n    a = 2\n"
    [fault] = [fault for fault in faults_of(source) if fault.operator == "statement order"]
    assert fault.applied_to(source) == b"def f(a):\n    a = 2  # first\n    # then\n    a.one()\n"


@pytest.mark.parametrize(
    ("statements", "count"),
    [
        ("x = a; y = len(b)", 0),
        ("x = a; y = x", 1),
        ("x = y; y = a", 1),
        ("x = a; x = b", 1),
        ("x = f(a); y = f(b)", 1),
        ("self.x = a; y = b", 1),
        ("return max(a, b)", 0),
        ("self.add_argument('-a'); self.add_argument('-b')", 0),
        ("self.add_argument('-a'); self.parse_args()", 1),
    ],
)
def test_an_order_that_cannot_matter_is_no_fault(statements: str, count: int) -> None:
    source = "def f(self, a, b, x, y):\n" + "".join(f"    {one}\n" for one in statements.split("; "))
    assert sum("order" in fault.operator for fault in faults_of(source.encode())) == count


def test_texts_annotations_assertions_and_logging_have_no_faults() -> None:
    source = b'''
BOUND = 7
def f(a: "x < y" = 1) -> list[1]:
    """Return 1 < 2."""
    assert a < 3
    logger.warning("%d", a)
    return f"{a < 4}"
'''
    assert faults_of(source) == []


def test_the_faults_that_are_drawn_are_the_same_for_a_seed_and_spread_over_packages() -> None:
    packages = ("wal", "snapshots")
    first, again, other = (draw(TREE, packages, 10, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert [sum(one.package == package for one in first) for package in packages] == [5, 5]


def test_the_nearest_tests_of_a_module_begin_with_its_own() -> None:
    module = Path("replica/scheduler/preemption.py")
    assert nearest_tests(TREE, module)[0] == Path("tests/replica/scheduler/test_preemption.py")
    redecide = Path("tests/cluster/audit/test_redecide.py")
    assert nearest_tests(TREE, Path("cluster/audit/redecide_text.py"))[0] == redecide
    assert Path("tests/replica/test_filesystems.py") in nearest_tests(TREE, Path("replica/operations/movers.py"))


FAR: dict[str, str] = {
    "toy/__init__.py": "from toy.sums import last\nfrom toy.alone import f\n",
    "toy/sums.py": "",
    "toy/alone.py": "",
    "toy/parts/deep.py": "",
    "other/__init__.py": "",
    "other/user.py": "from toy import last as final\n",
    "tests/helper.py": "from other.user import final\n",
    "tests/e2e/test_whole.py": "import toy.sums\n",
    "tests/other/test_by_helper.py": "from tests import helper\n",
    "tests/other/test_by_package.py": "from toy import last\n",
    "tests/other/test_by_user.py": "from other.user import final\n",
    "tests/other/test_stranger.py": "from toy import f\n",
    "tests/toy/test_alone.py": "from toy import f\n",
    "tests/toy/test_by_relative.py": "from ..toy import sums\n",
    "tests/toy/test_sums.py": "import subprocess\n",
}


def test_the_nearest_tests_are_those_with_the_fewest_imports_between_in_whatever_folder(tmp_path: Path) -> None:
    for name, text in FAR.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    own, by_package, by_user, by_helper, *rest = nearest_tests(tmp_path, Path("toy/sums.py"))
    assert own == Path("tests/toy/test_sums.py")  # by its name: it starts the module in another process
    assert by_package == Path("tests/other/test_by_package.py")
    assert by_user == Path("tests/other/test_by_user.py")
    assert by_helper == Path("tests/other/test_by_helper.py")
    assert rest == [Path("tests/toy/test_alone.py"), Path("tests/toy/test_by_relative.py")]
    assert Path("tests/other/test_stranger.py") not in rest
    below = nearest_tests(tmp_path, Path("toy/parts/deep.py"))
    assert below == [Path("tests/toy/test_alone.py"), Path("tests/toy/test_by_relative.py"), own]


def test_the_equivalent_faults_are_faults_that_the_tree_can_have() -> None:
    for file, old, new in equivalents(EQUIVALENT):
        source = (TREE / file).read_bytes()
        assert (old, new) in {_lines(source, fault) for fault in faults_of(source)}, f"{file}: {old}"


def test_an_entry_without_a_reason_is_refused(tmp_path: Path) -> None:
    listed = tmp_path / "equivalent.txt"
    listed.write_text("a.py\n- x < 1\n+ x <= 1\n")
    with pytest.raises(ValueError, match="entry 1 is malformed"):
        equivalents(listed)


TOY = {
    "toy/__init__.py": "",
    "toy/sums.py": "def last(a):\n    if len(a) > 0:\n        return a[-1]\n    raise ValueError\n\n\n"
    "def steps(n):\n    while n > 0:\n        n -= 1\n    return n\n",
    "toy/alone.py": "def f(a):\n    return not a\n",
    "tests/toy/test_sums.py": "from toy.sums import last, steps\n\n\n"
    "def test_last():\n    assert last([1, 2]) == 2\n    assert steps(3) == 0\n",
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """Give a tree with a package, a module that lacks tests, and a test that does not see everything."""
    for name, text in TOY.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    return tmp_path


def test_a_campaign_tells_faults_that_are_noticed_from_those_that_are_not_and_leaves_the_tree_alone(toy: Path) -> None:
    source = (toy / "toy/sums.py").read_bytes()
    faults = [Planted("toy", Path("toy/sums.py"), fault) for fault in faults_of(source)]
    planted = [one for one in faults if one.fault.operator in ("negate", "swallow")]
    told: list[object] = []
    listed = toy / "equivalent.txt"
    results = run(toy, planted, Limits(2, 300, 300), told.append, listed)
    assert {result.operator: result.outcome for result in results} == {"negate": "killed", "swallow": "survived"}
    assert [result.test for result in results if result.test] == ["tests/toy/test_sums.py::test_last"]
    assert len(told) == len(results)
    listed.write_text("toy/sums.py\n- raise ValueError\n+ pass\n# It returns None.\n")
    again = run(toy, planted, Limits(1, 300, 300), told.append, listed)
    assert {result.operator: result.outcome for result in again} == {"negate": "killed", "swallow": "equivalent"}
    assert summary(again).splitlines()[-1].split() == ["all", "1", "0", "0", "0", "0", "1", "100%"]
    assert {name: (toy / name).read_text() for name in TOY} == TOY
    assert "- raise ValueError" in row_of(results[-1]) + row_of(results[0])
