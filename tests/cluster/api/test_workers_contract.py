"""What the API answers, it answers behind a door as well: tests of its contract, once more.

Those in which the two processes differ: what passes between them, who may do what, streams, what outlives a session.
How a body is read is the same code in both modes.
"""

import pytest

from tests.cluster.api import test_bulk, test_events, test_permissions, test_sessions
from tests.cluster.harness import Harness

INSIDE = {
    # They change what the process that serves clients does, or look into it.
    "test_a_stream_that_ends_while_it_is_prepared_gives_its_place_back",
    "test_a_subscriber_that_does_not_read_is_cut_and_told_where_to_resume",
}
"""Tests of what happens inside of a door, by name."""

for module in (test_bulk, test_events, test_permissions, test_sessions):
    for name, story in vars(module).items():
        if name.startswith("test_") and name not in INSIDE:
            globals()[name] = story


@pytest.fixture(autouse=True)
def one_door(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Harness, "api_workers", 1)
