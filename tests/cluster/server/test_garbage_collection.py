"""Collections of everything come when they harm nobody."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from cluster.server.garbage_collection import FULL_SHARE, Collector
from replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import story


class Cycle:
    """Refers to itself: only a collection ends it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def old_cycle() -> weakref.ref[Cycle]:
    """Return a reference to a cycle that has grown old and was let go."""
    cycle = Cycle()
    gc.collect(1)
    return weakref.ref(cycle)


@story
async def test_python_no_longer_chooses_the_moment_and_everything_is_collected_at_the_start() -> None:
    collector = Collector(leads=lambda: True, election_min_s=0.3, clock=ManualClock(Instant(1)))
    lost = old_cycle()
    collector.start()
    assert lost() is None
    assert gc.get_threshold()[2] > 1_000_000
    collector.stop()


@story
async def test_a_leader_for_whom_it_took_too_long_waits_until_it_follows() -> None:
    leads = True
    collector = Collector(leads=lambda: leads, election_min_s=0.3, clock=ManualClock(Instant(1)))
    collector.last_s = FULL_SHARE * 0.3 * 1.01
    lost = old_cycle()
    collector.due()
    assert lost() is not None and collector.passed_over == 1
    leads = False
    collector.due()
    assert lost() is None and collector.passed_over == 0
    collector.stop()


@story
async def test_a_leader_for_whom_it_was_short_collects() -> None:
    collector = Collector(leads=lambda: True, election_min_s=0.3, clock=ManualClock(Instant(1)))
    collector.last_s = FULL_SHARE * 0.3 * 0.99
    lost = old_cycle()
    collector.due()
    assert lost() is None
    collector.stop()
