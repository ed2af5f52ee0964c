"""Style that a machine can check. What is found says what to do instead."""

from collections import Counter
from pathlib import Path

from tests.repo import rules
from tests.repo.lengths import BEHAVIOUR_LINES_MAX, CROWDED, MODULES_MAX
from tests.repo.tree import (
    NAME,
    OWN_FILES,
    PACKAGES,
    ROOT,
    code_of,
    is_standard,
    modules,
    python_files,
    repository_files,
    text_of,
)


def found_in(paths: list[Path], rule: object) -> list[str]:
    """Return what `rule` finds in these files, each with its place."""
    assert callable(rule)
    return [f"{path}: {found}" for path in paths for found in rule(code_of(path))]


def test_no_banned_name_is_used() -> None:
    assert found_in(modules(), rules.banned_names) == []


def test_a_listener_lets_in_who_shows_no_certificate_in_one_place_only() -> None:
    """For MUNGE: nobody else asks for it but `cluster.security.tls.server_context`."""
    said = {str(path): text.count("CERT_OPTIONAL") for path in modules() if "CERT_OPTIONAL" in (text := text_of(path))}
    assert said == {"cluster/security/tls.py": 1}


def test_nothing_in_a_replica_forks() -> None:
    # The guard runs in workers, which hold neither LMDB nor sockets: tests/cluster/providers shows that replicas do not
    # even load it.
    guard = Path("cluster/providers/guard.py")
    replicas = [path for path in modules() if path.parts[:2] != ("cluster", "agent") and path != guard]
    assert found_in(replicas, lambda code: rules.calls_of(code, rules.FORKING_CALLS)) == []


def test_imports_are_absolute() -> None:
    assert found_in(python_files(), rules.relative_imports) == []


def test_no_module_shadows_one_of_the_standard_library() -> None:
    names = [(path, path.parent.name if path.name == "__init__.py" else path.stem) for path in modules()]
    assert [str(path) for path, name in names if is_standard(name)] == []


def test_there_is_no_fifth_package() -> None:
    tops = {path.parts[0] for path in repository_files() if path.suffix == ".py" and len(path.parts) > 1}
    assert tops - {"tests", "docs", NAME} <= set(PACKAGES), "docs has the configuration of Sphinx"
    assert {path.name for path in (ROOT / NAME).iterdir()} - {"__pycache__"} == {*OWN_FILES, *PACKAGES}
    assert all((ROOT / NAME / package).readlink() == Path("..", package) for package in PACKAGES)
    assert [str(path) for path in repository_files() if path.suffix == ".py" and len(path.parts) == 1] == []


def test_every_module_starts_with_a_sentence() -> None:
    assert [str(path) for path in modules() if not code_of(path).is_documented] == []


def test_no_module_grows_past_its_bound() -> None:
    too_long = {str(path): code_of(path).behaviour_lines for path in modules()}
    too_long = {path: lines for path, lines in too_long.items() if lines > BEHAVIOUR_LINES_MAX}
    assert too_long == {}, f"past {BEHAVIOUR_LINES_MAX} lines ask which second question a module answers, and split it"


def folders() -> dict[str, int]:
    """Return how many modules each folder of the product holds, its face left out."""
    return Counter(str(path.parent) for path in modules() if path.name != "__init__.py")


def test_no_folder_grows_past_its_bound() -> None:
    crowded = {folder: count for folder, count in folders().items() if count > CROWDED.get(folder, MODULES_MAX)}
    assert crowded == {}, f"a folder of more than {MODULES_MAX} modules wants rooms"


def test_exceptions_from_the_bounds_only_tighten() -> None:
    loose = {folder: count for folder, count in CROWDED.items() if max(folders()[folder], MODULES_MAX) < count}
    assert loose == {}, "lower or remove these in tests/repo/lengths.py"


def test_no_test_proves_nothing() -> None:
    tests = {path: code_of(path) for path in python_files() if path.parts[0] == "tests"}
    helpers = rules.proving_helpers(tests.values())
    empty = [
        f"{path}: {found}" for path, code in tests.items() for found in rules.tests_that_prove_nothing(code, helpers)
    ]
    assert empty == []


def test_every_test_file_is_collected() -> None:
    strays = []
    for path in python_files():
        if path.parts[0] == "tests" and not path.name.startswith("test_"):
            strays += [f"{path}: {one.name}" for one in code_of(path).functions if one.name.startswith("test_")]
    assert strays == [], "pytest collects test_*.py only"
