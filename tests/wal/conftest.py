"""Fixture for the tests of wal: a smaller sync log, because some tests read the log a hundred times."""

import pytest

from forebay.wal import sync_log

LOG_BYTES = 128 << 10


@pytest.fixture(autouse=True)
def _small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_log, "LOG_BYTES", LOG_BYTES)
