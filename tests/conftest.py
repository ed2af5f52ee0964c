"""What holds for all tests: no bound on speed, and what a worker reports reaches the terminal whatever it contains."""

import gc
import os
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.campaigns import is_due_on

# Workers share the cores, so the duration of an example means nothing.
_UNTIMED: dict[str, Any] = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("daily", max_examples=40, **_UNTIMED)
hypothesis.settings.register_profile("every", max_examples=100, **_UNTIMED)


# Most tests ask as the operator, whoever runs them: those about who one is take it out.
os.environ["FOREBAY_IDENTITY"] = "operator"

_MEMORY = Path("/dev/shm")

_WAITING = Path(__file__).parent / "e2e"
"""Where tests mostly wait for processes of theirs, and leave the processor to others."""


_DAY = "FOREBAY_TEST_DAY"
"""Environment variable with the number of the day that chooses the campaigns, or `every` for all of them."""

# Workers inherit it: they must agree also if midnight passes while they collect.
os.environ.setdefault(_DAY, str(datetime.now(UTC).toordinal()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every", action="store_true", help="run the tests of all days, not only those of today")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "campaign(days, together=False): expensive, runs once in so many days, always with --every or named by its ID; "
        "parameters of a test take turns unless they run together",
    )
    hypothesis.settings.load_profile("every" if _runs_every(config) else "daily")


def _runs_every(config: pytest.Config) -> bool:
    return bool(config.getoption("--every")) or os.environ[_DAY] == "every"


def pytest_report_header() -> str:
    return f"campaigns of day {os.environ[_DAY]}; --every runs those of all days"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _choose_campaigns(config, items)
    _spread_waiting_files(items)


def _choose_campaigns(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _runs_every(config) or any("::" in path for path in config.args):
        return
    day, counts = int(os.environ[_DAY]), Counter[str]()
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        marker = item.get_closest_marker("campaign")
        if marker is None:
            kept.append(item)
            continue
        together = marker.kwargs.get("together", False)
        group = item.nodeid.partition("::" if together else "[")[0]
        is_due = is_due_on(day, marker.args[0], group, 0 if together else counts[group])
        counts[group] += 1
        (kept if is_due else left_out).append(item)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _spread_waiting_files(items: list[pytest.Item]) -> None:
    """Spread files that wait among those that compute: workers take files in this order, and three that wait at once
    leave both cores idle, while three that compute wait for each other.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting = [file for file in files if file.is_relative_to(_WAITING)]
    computing = [file for file in files if not file.is_relative_to(_WAITING)]
    places = {file: place for place, file in enumerate(computing)}
    # The last fifth is free of them: a long file that begins late is waited for.
    places |= {file: number * len(computing) * 0.8 / len(waiting) - 0.5 for number, file in enumerate(waiting)}
    items[:] = [item for file in sorted(files, key=places.__getitem__) for item in files[file]]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Any:
    """Collect without garbage collection, and have it leave alone ten thousand tests and their modules ever after.

    They stay to the end. Looking through them again and again was a third of what tests that compute take.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """Give a directory in memory, where there is one: for tests that sync so often that a disk's time would count."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="forebay-test-", dir=_MEMORY))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let processes that a test starts receive SIGINT.

    A shell without job control starts background commands with SIGINT ignored, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Any:
    """Escape lone surrogates in captured output and messages: workers send reports as UTF-8, which has none."""
    return _escaped((yield))


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {key: _escaped(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_escaped, value))
    return value
