"""What tests of the mover share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.agent.transfer.harness import Harness


@pytest.fixture
def harness(fast_path: Path) -> Iterator[Harness]:
    """Give a harness."""
    made = Harness(fast_path)
    yield made
    made.close()
