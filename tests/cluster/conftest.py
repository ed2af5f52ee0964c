"""Fixtures of the controller's and the API's tests: one cluster's certificates for all, storage and ports for each."""

from pathlib import Path

import pytest

from forebay.cluster.config.config import Config
from tests.cluster.harness import make_cluster, placed


@pytest.fixture(scope="session")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A founded cluster of one replica, two agents and two users."""
    return make_cluster(tmp_path_factory.mktemp("cluster"))


@pytest.fixture
def config(founded: Config, tmp_path: Path) -> Config:
    """The cluster's configuration with storage and ports of this test's own."""
    return placed(founded, tmp_path)


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No pass counts as dear: on a busy machine one may take long, and what a test sees must not depend on that."""
    monkeypatch.setattr("forebay.cluster.server.pass_timer.PASS_CHEAP_S", 60.0)
