"""Start-up of what an agent starts for each operation and each script: what is loaded decides how long it takes."""

import subprocess
import sys

import pytest

from forebay.cluster.system import TREE

HEAVY = (
    "asyncio",
    "aiohttp",
    "ssl",
    "forebay.replica.state",
    "forebay.replica.scheduler",
    "forebay.replica.decide",
    "forebay.replica.views",
)
STARTED = {
    "forebay.cluster.agent.worker.worker": HEAVY,
    "forebay.cluster.agent.scripts.supervisor": (
        *HEAVY,
        "forebay.cluster.agent.transfer",
        "forebay.cluster.agent.worker",
        "forebay.cluster.providers",
    ),
    "forebay.cluster.providers.worker": HEAVY,
}
"""What each must not load: an event loop, the state and what decides are nobody's business there."""


@pytest.mark.parametrize("module", STARTED)
def test_a_process_for_one_operation_loads_neither_an_event_loop_nor_the_state(module: str) -> None:
    told = f"import sys, {module}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", told], check=True, capture_output=True, text=True).stdout.split()
    heavy = [name for name in loaded if any(name == root or name.startswith(f"{root}.") for root in STARTED[module])]
    assert heavy == []


@pytest.mark.parametrize("module", STARTED)
def test_a_process_is_loaded_once_and_says_nothing_of_its_own(module: str) -> None:
    """runpy warns where the face of a room has imported what is to be run: it would be loaded twice."""
    room = module.rpartition(".")[0]
    told = f"import sys, {room}; print({module!r} in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], check=True, capture_output=True).stdout == b"False\n"


def test_processes_are_started_from_the_tree_that_the_agent_was_imported_from() -> None:
    assert (TREE / "forebay" / "cluster" / "agent" / "__init__.py").is_file()
