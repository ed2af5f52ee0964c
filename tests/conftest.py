"""What holds for all tests: no bound on speed, and what a worker reports reaches the terminal whatever it contains."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Workers share the cores: how long an example takes, or to make one, says nothing.
hypothesis.settings.register_profile("workers", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("workers")


# Most tests ask as the operator, whoever runs them: those about who one is take it out.
os.environ["FOREBAY_IDENTITY"] = "operator"

_MEMORY = Path("/dev/shm")


@pytest.fixture
def fast_path(tmp_path: Path) -> Iterator[Path]:
    """Give a directory in memory, where there is one: for tests that sync so often that a disk's time would count."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    directory = Path(tempfile.mkdtemp(prefix="forebay-test-", dir=_MEMORY))
    yield directory
    shutil.rmtree(directory)


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
