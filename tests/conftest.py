"""What holds for all tests: no bound on speed, and what a worker reports reaches the terminal whatever it contains."""

from typing import Any

import hypothesis
import pytest

# Workers share the cores: how long an example takes, or to make one, says nothing.
hypothesis.settings.register_profile("workers", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("workers")


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
