"""A cluster whose three replicas were stopped by the previous release: the golden directories, and a configuration."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from forebay.cluster.config import new_site
from forebay.cluster.config.config import Config
from tests.cluster.test_serve import make
from tests.golden.archive import GOLDEN, unpack
from tests.golden.make_ledger import CLUSTER, REPLICAS

EXPECTED: dict[str, Any] = json.loads((GOLDEN / "format-1.json").read_text(encoding="utf-8"))


def previous_cluster(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """Unpack the directories of the three replicas into `directory`; return the configuration that they run with."""
    monkeypatch.setattr(new_site.secrets, "token_hex", lambda size: CLUSTER)
    config = make(directory, len(REPLICAS))
    monkeypatch.undo()
    for name in REPLICAS:
        shutil.rmtree(directory / name)  # with the mark that would let it start without data
    unpack(directory)
    return config
