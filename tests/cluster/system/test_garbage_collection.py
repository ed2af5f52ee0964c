"""Full garbage collections run only when they delay no leader."""

import asyncio
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest

from forebay.cluster.system import garbage_collection
from forebay.cluster.system.garbage_collection import FULL_SHARE, YOUNG_OBJECTS, Collector, collect_for_a_reader
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock
from tests.cluster.harness import story


class Cycle:
    """Object that refers to itself; only a garbage collection frees it."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def old_cycle() -> weakref.ref[Cycle]:
    """Return a reference to an unreachable cycle of the oldest generation."""
    cycle = Cycle()
    gc.collect(1)
    return weakref.ref(cycle)


@story
async def test_start_collects_everything_and_disables_automatic_full_collections() -> None:
    collector = Collector(leads=lambda: True, election_min_s=0.3, clock=ManualClock(Instant(1)))
    lost = old_cycle()
    collector.start()
    assert lost() is None
    assert gc.get_threshold()[2] > 1_000_000
    collector.stop()


@story
async def test_running_replica_collects_only_the_youngest_generation_automatically() -> None:
    collector = Collector(leads=lambda: True, election_min_s=0.3, clock=ManualClock(Instant(1)))
    before, seen = gc.get_threshold(), list[int]()

    def note(phase: str, found: dict[str, int]) -> None:
        if phase == "start":
            seen.append(found["generation"])

    collector.start()
    lost = weakref.ref(Cycle())
    gc.callbacks.append(note)
    try:
        kept = [[] for _ in range(100 * YOUNG_OBJECTS)]
    finally:
        gc.callbacks.remove(note)
    assert lost() is None and kept
    assert set(seen) == {0} and len(seen) >= 99
    collector.stop()
    assert gc.get_threshold() == before


@story
async def test_leader_with_long_collections_waits_until_it_is_a_follower() -> None:
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
async def test_leader_with_short_collections_collects() -> None:
    collector = Collector(leads=lambda: True, election_min_s=0.3, clock=ManualClock(Instant(1)))
    collector.last_s = FULL_SHARE * 0.3 * 0.99
    lost = old_cycle()
    collector.due()
    assert lost() is None
    collector.stop()


@story
async def test_full_collections_run_periodically(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage_collection, "FULL_PERIOD_S", 0.001)
    collector = Collector(leads=lambda: False, election_min_s=0.3, clock=ManualClock(Instant(1)))
    collector.start()
    for _ in range(2):
        lost = old_cycle()
        async with asyncio.timeout(60):
            while lost() is not None:
                await asyncio.sleep(0.001)
    collector.stop()


FOLDING = ("forebay.cluster.audit", "forebay.cluster.audit.worker", "forebay.cluster.api.past_reads")
"""Programs that read a ledger beside a replica."""


def test_ledger_reader_collects_a_thirtieth_as_often_and_still_frees_cycles() -> None:
    gc.set_threshold(700, 10, 10)
    collect_for_a_reader()
    young, middle, old = gc.get_threshold()
    assert young * middle > 30 * 700 * 10 and old == 10
    lost = weakref.ref(Cycle())
    kept = [[] for _ in range(2 * young)]
    assert lost() is None and kept


def test_every_ledger_reader_sets_its_collection_thresholds() -> None:
    said = subprocess.run(
        [sys.executable, "-c", RUN_EACH, *FOLDING], capture_output=True, text=True, check=True, timeout=60
    )
    assert said.stdout.split() == [*FOLDING]


RUN_EACH = """
import os, runpy, socket, sys
from forebay.cluster.system import garbage_collection

def begun():
    raise InterruptedError

garbage_collection.collect_for_a_reader = begun
ours, theirs = socket.socketpair()
programs = sys.argv[1:]
for program in programs:
    sys.argv = [program, str(theirs.fileno()), str(os.getppid()), "nowhere"]
    try:
        runpy.run_module(program, run_name="__main__")
    except InterruptedError:
        print(program)
"""
