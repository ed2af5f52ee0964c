"""The cluster's time: monotonic, between the bounds of a majority's clocks, and never moved by a single clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.consensus import ClockBounds
from forebay.cluster.server.agreed_time import SLEW, AgreedTime
from forebay.replica.values import NEVER, Instant

START = 1_800_000_000_000_000
HOUR_US = 3_600_000_000


class Clocks:
    """Clocks of a machine, set by the test."""

    def __init__(self) -> None:
        self.wall = START
        self.passed_us = 0

    def now(self) -> Instant:
        return Instant(self.wall)

    def monotonic_s(self) -> float:
        return self.passed_us / 1_000_000


APART = st.tuples(st.integers(-2 * HOUR_US, 2 * HOUR_US), st.integers(0, HOUR_US))
BOUNDS = st.one_of(st.none(), APART.map(lambda two: (two[0], sum(two))))
STEPS = st.lists(
    st.tuples(st.integers(0, 10_000_000), BOUNDS, st.integers(-HOUR_US, HOUR_US), st.booleans()), max_size=30
)


@given(STEPS)
def test_time_never_stops_or_goes_back_and_jumps_only_with_a_majority(
    steps: list[tuple[int, tuple[int, int] | None, int, bool]],
) -> None:
    clocks, said = Clocks(), ClockBounds(None, None)
    agreed = AgreedTime(clocks, bounds=lambda: said, at=Instant(START))
    last = START
    for passed_us, bounds, wall_off_us, is_mine in steps:
        clocks.passed_us += passed_us
        clocks.wall = START + clocks.passed_us + wall_off_us
        said = ClockBounds(None, None)
        if bounds is not None:
            base = START + clocks.passed_us
            said = ClockBounds(Instant(base + bounds[0]), Instant(base + bounds[1]))
        at = agreed.stamp(Instant(last))
        assert at >= last + int(SLEW * passed_us) - 1, "time stopped or went back"
        assert at <= last + passed_us + 1 or at == said.earliest, "a minority's clock moved time ahead"
        if said.latest is not None:
            assert at <= max(said.latest, last + SLEW * passed_us + 1), "time ran ahead of a majority's clocks"
        last = at
        if not is_mine:
            agreed.applied(at)


def test_new_leader_continues_from_the_last_applied_time() -> None:
    clocks = Clocks()
    agreed = AgreedTime(clocks, bounds=lambda: ClockBounds(None, None), at=NEVER)
    agreed.applied(Instant(START))
    clocks.passed_us, clocks.wall = 1_500_000, START + HOUR_US
    assert agreed.stamp(Instant(START)) == START + 1_500_000


def test_before_the_first_batch_only_a_majority_gives_the_time() -> None:
    clocks, said = Clocks(), ClockBounds(None, None)
    agreed = AgreedTime(clocks, bounds=lambda: said, at=NEVER)
    assert not agreed.begin()
    said = ClockBounds(Instant(START - 5), Instant(START + 5))
    assert agreed.begin()
    said = ClockBounds(None, None)
    clocks.wall += HOUR_US
    assert agreed.stamp(NEVER) == START - 5


def test_cluster_is_not_founded_by_one_wrong_clock_of_a_bare_majority(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = ClockBounds(Instant(START - HOUR_US), Instant(START), is_final=False)
    agreed = AgreedTime(Clocks(), bounds=lambda: said, at=NEVER)
    assert not agreed.begin() and not agreed.begin()
    assert [record.message for record in caplog.records if "differ by" in record.message] == caplog.messages[:1]
    said = ClockBounds(Instant(START), Instant(START))
    assert agreed.begin()
    assert agreed.stamp(NEVER) == START


def test_lead_over_a_majoritys_clocks_is_reported() -> None:
    clocks = Clocks()
    said = ClockBounds(Instant(START - HOUR_US), Instant(START - HOUR_US))
    agreed = AgreedTime(clocks, bounds=lambda: said, at=Instant(START))
    assert agreed.ahead_us == HOUR_US
    said = ClockBounds(None, None)
    assert agreed.ahead_us == 0
