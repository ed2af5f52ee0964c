"""Lines that a test finds in the log."""

import logging

import pytest


def lines_of(caplog: pytest.LogCaptureFixture, logger: str) -> list[str]:
    """Return the lines of a logger, as a process would write them, tracebacks included."""
    form = logging.Formatter()
    return [form.format(record) for record in caplog.records if record.name == logger]
