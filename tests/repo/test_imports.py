"""Who may import whom (DESIGN.md, Rooms), where import-linter cannot look: allow-lists, attributes and builtins.

The directions themselves are contracts in pyproject.toml; here they are run once more inside pytest, so that nobody
needs to remember the other command.
"""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.repo import rules
from tests.repo.tree import NAME, PACKAGES, ROOT, code_of, dotted, is_standard, modules, text_of

_CLIENT_SIDE = {
    "forebay.cluster.client",
    "forebay.cluster.config",
    "forebay.cluster.system.eventloop",
    "forebay.cluster.schemas",
    "forebay.cluster.security",
    "forebay.cluster.system",
}
REMOTE_MAY_IMPORT = {
    "forebay.cluster.agent": _CLIENT_SIDE | {"forebay.cluster.agent", "forebay.cluster.providers"},
    "forebay.cluster.cli": _CLIENT_SIDE
    | {
        "forebay.cluster.cli",
        "forebay.cluster.agent",
        "forebay.cluster.slurm",
        "forebay.cluster.drills",
        "forebay.cluster.drills.helper",
        "forebay.cluster.security.proofs",
        "forebay.cluster.witness",
    },
    "forebay.cluster.sdk": _CLIENT_SIDE | {"forebay.cluster.sdk", "forebay.cluster.cli"},
    "forebay.cluster.slurm": _CLIENT_SIDE | {"forebay.cluster.slurm"},
    "forebay.cluster.drills": _CLIENT_SIDE
    | {"forebay.cluster.drills", "forebay.cluster.drills.copies", "forebay.cluster.drills.helper"},
    "forebay.cluster.drills.helper": _CLIENT_SIDE | {"forebay.cluster.drills.helper"},
    "forebay.cluster.gateway": _CLIENT_SIDE | {"forebay.cluster.gateway"},
    "forebay.cluster.witness": frozenset(
        {
            "forebay.cluster.witness",
            "forebay.cluster.security.proofs",
            "forebay.cluster.security",
            "forebay.cluster.system",
            "forebay.cluster.system.eventloop",
        }
    ),
}
"""Packages that run on other machines, and the packages of cluster that they may import."""


def test_the_import_contracts_hold() -> None:
    command = [Path(sys.executable).parent / "lint-imports", "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_there_is_something_to_check(package: str) -> None:
    assert any(path.name == "__init__.py" for path in modules(package)), f"{package}/ has no __init__.py"


def violations(paths: list[Path], rule: object) -> list[str]:
    """Return what `rule` finds in these modules, each with its place."""
    assert callable(rule)
    return [f"{path}: {found}" for path in paths for found in rule(code_of(path))]


def test_replica_imports_only_pure_modules() -> None:
    # What an import statement does, a face does later: by importlib, and nobody else.
    others = [path for path in modules("replica") if path != Path("replica/lazy_exports.py")]
    assert violations(others, rules.impure_imports) == []
    assert violations([Path("replica/lazy_exports.py")], rules.impure_imports) == [
        f"replica/lazy_exports.py: {found}"
        for found in rules.impure_imports(rules.parse("\n" * 9 + "import importlib"))
    ]


def test_replica_calls_nothing_that_differs_between_two_processes() -> None:
    assert violations(modules("replica"), lambda code: rules.calls_of(code, rules.PURE_BANNED_CALLS)) == []


def test_wal_and_snapshots_print_nothing() -> None:
    assert violations(modules("wal", "snapshots"), lambda code: rules.calls_of(code, rules.QUIET_BANNED_CALLS)) == []


def test_only_cluster_clock_reads_the_clock() -> None:
    others = [path for path in modules() if path != Path("cluster/system/clock.py")]
    assert violations(others, rules.clock_reads) == []
    assert rules.clock_reads(code_of(Path("cluster/system/clock.py"))), (
        "cluster/system/clock.py reads no clock: is the rule blind?"
    )


WITH_EXTRA = Path("cluster/api/traces/exporter.py")
"""The one module that imports what `forebay[otel]` brings."""


@pytest.mark.parametrize("package", REMOTE_MAY_IMPORT)
def test_what_runs_on_other_machines_imports_only_the_client_side(package: str) -> None:
    mine = [path for path in modules("cluster") if (dotted(path) + ".").startswith(package + ".")]
    allowed = frozenset(REMOTE_MAY_IMPORT[package])
    # `import forebay.cluster` alone loads nothing but an empty face; what counts are the rooms in it.
    forbidden = frozenset({".".join(dotted(path).split(".")[:3]) for path in modules("cluster")} - {"forebay.cluster"})
    forbidden |= {"forebay.wal", "forebay.snapshots"}
    assert violations(mine, lambda code: rules.forbidden_imports(code, forbidden, allowed)) == []


def test_nothing_is_imported_that_is_not_declared() -> None:
    project = tomllib.loads(text_of(Path("pyproject.toml")))["project"]
    entries = [*project["dependencies"]]
    for extra, brought in project["optional-dependencies"].items():
        entries += [] if extra == "otel" else brought
    names = {entry.split("==")[0].replace("-", "_") for entry in entries} | {NAME}
    # Modules of these names are loaded by a process of its own, where the extra is installed.
    extras = {WITH_EXTRA: {entry.split("-")[0] for entry in project["optional-dependencies"]["otel"]}}
    unknown = [
        f"{path}: line {line}: {name}"
        for path in modules()
        for name, line in code_of(path).imports
        if not is_standard(name) and name.split(".")[0] not in names | extras.get(path, set())
    ]
    assert unknown == []
