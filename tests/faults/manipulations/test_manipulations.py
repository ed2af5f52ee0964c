"""Every manipulation of a stopped replica is found by its documented detectors, or is harmless."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import uvloop

from forebay.cluster.server.recovery.new_incarnation import RecoveryNotPossible, plan_recovery
from forebay.cluster.system.clock import SystemClock
from tests.faults.manipulations.detectors import Finder, Then, look
from tests.faults.manipulations.expected import EXPECTED, FINDERS
from tests.faults.manipulations.live import live, live_under_a_leader, short_periods
from tests.faults.manipulations.site import VICTIM, Case, Site, found_site
from tests.faults.manipulations.table import KINDS, ROWS, Manipulation

COUNTS: Final = {"A": 16, "B": 11, "C": 20, "D": 7, "E": 8, "F": 3, "G": 17, "H": 5, "I": 4, "J": 3, "K": 4}
"""Of each kind there were so many when it was first looked at what an insider can do: 94, and 27 left no trace."""

NOT_FOUND_BY_REPLICAS: Final = {"E7", "E11", "I4", "I5", "I7", "I8", "I9", "I13", "K4"}
"""What replicas that were all stopped cannot find, as docs/audit/detected.md says, without what is no damage."""

LIVE: Final = ("A1", "B2", "C8", "D6", "E1", "E4", "E12", "F1", "G1", "H1", "I2", "I14", "J1", "J3", "K2")
"""What is shown to replicas that run: at least one of each kind. The others: `python -m tests.faults.manipulations`."""

_MEMORY: Final = Path("/dev/shm")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Make the stopped cluster once; in memory, where there is some: a hundred copies are looked at."""
    directory = Path(tempfile.mkdtemp(prefix="forebay-test-", dir=_MEMORY if os.access(_MEMORY, os.W_OK) else None))
    try:
        yield found_site(directory)
    finally:
        shutil.rmtree(directory)


@pytest.fixture
def case(site: Site, request: pytest.FixtureRequest) -> Iterator[Case]:
    """Copy the site for the manipulation that the test is given."""
    row: Manipulation = request.getfixturevalue("row")
    directory = site.directory / "case"
    try:
        yield Case(site, directory, row.on, row.notes)
    finally:
        shutil.rmtree(directory)


def named(row: Manipulation) -> str:
    """Return how a test is called: what pytest shows of it."""
    return f"{row.id} {row.what}"


@pytest.mark.campaign(3)
@pytest.mark.parametrize("row", [row for row in ROWS if not row.leads], ids=named)
def test_each_manipulation_is_found_by_its_documented_detectors(row: Manipulation, case: Case) -> None:
    row.do(case)
    outcome, expected = look(case), EXPECTED[row.id]
    then = Then.GOES_ON if expected.then is Then.HARMLESS else expected.then
    assert ({str(finder) for finder in outcome.found}, outcome.then) == (set(expected.finders), then), outcome.found


@pytest.mark.campaign(3)
@pytest.mark.parametrize("row", [row for row in ROWS if row.id in LIVE], ids=named)
def test_running_replicas_find_the_manipulation(row: Manipulation, case: Case) -> None:
    with short_periods():
        if row.leads:
            seen = uvloop.run(live_under_a_leader(case, row.do))
        else:
            row.do(case)
            seen = uvloop.run(live(case))
    assert seen is not None and seen.finder in EXPECTED[row.id].finders, seen
    assert seen.then is (Then.REFUSED if seen.finder is Finder.START else EXPECTED[row.id].then), seen


@pytest.mark.parametrize("row", [row for row in ROWS if row.id in ("K1", "K2", "K3")], ids=named)
def test_recovery_rejects_a_replica_with_an_appended_entry(row: Manipulation, case: Case) -> None:
    row.do(case)
    with pytest.raises(RecoveryNotPossible, match="it was inserted while the replica was stopped"):
        asyncio.run(plan_recovery(case.config, VICTIM, clock=SystemClock()))


def test_unaltered_data_causes_no_finding(site: Site) -> None:
    directory = site.directory / "case"
    try:
        assert look(Case(site, directory)) == ({}, Then.GOES_ON)
    finally:
        shutil.rmtree(directory)


def test_the_table_has_each_manipulation_with_its_consequences() -> None:
    assert [row.id for row in ROWS] == list(EXPECTED)
    counts = Counter(row.kind for row in ROWS)
    assert set(counts) == set(KINDS) == {row_id[0] for row_id in LIVE}
    assert all(counts[kind] >= count for kind, count in COUNTS.items())
    assert counts.total() >= sum(COUNTS.values()) == 98
    assert {len(row.on) for row in ROWS} == {1, 2, 3} and {row.notes for row in ROWS} == {0, 1, 2}


def test_manipulations_that_replicas_miss_are_harmless_or_documented() -> None:
    unseen = set()
    for row in ROWS:
        expected = EXPECTED[row.id]
        assert set(expected.found_by.split()) <= {str(finder) for finder in FINDERS}
        assert bool(expected.why) is not expected.is_seen, row.id
        if not expected.is_seen and expected.then is not Then.HARMLESS:
            unseen.add(row.id)
    assert unseen == NOT_FOUND_BY_REPLICAS
