"""Directory for buffers of adapters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay.cluster.system import closing, open_directory


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[int]:
    """An open directory for buffers."""
    (tmp_path / "fs").mkdir(mode=0o711)
    with closing(open_directory(tmp_path / "fs")) as directory:
        yield directory
