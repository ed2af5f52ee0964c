"""Fixtures for tests of the command line."""

from collections.abc import Iterator

import pytest

from tests.cluster.cli.double import Double, serving


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Double]:
    with serving(tmp_path_factory.mktemp("cluster")) as double:
        yield double


@pytest.fixture
def double(served: Double) -> Double:
    """API double without requests or answers."""
    served.asked.clear()
    served.answers.clear()
    return served
