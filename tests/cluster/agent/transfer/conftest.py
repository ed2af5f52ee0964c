"""What tests of the mover share."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.agent.transfer.harness import Harness

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


@pytest.fixture
def harness(fast_path: Path) -> Iterator[Harness]:
    """Give a harness."""
    made = Harness(fast_path)
    yield made
    made.close()
