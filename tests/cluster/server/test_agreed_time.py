"""The cluster's time: monotonic, between what a majority's clocks say, never pulled by one clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.consensus import ClockBounds
from forebay.cluster.server.agreed_time import SLEW, AgreedTime
from forebay.replica.values import NEVER, Instant

START = 1_800_000_000_000_000
HOUR_US = 3_600_000_000


class Clocks:
    """A machine's clocks, set by hand."""

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
def test_time_never_goes_back_nor_stands_still_and_runs_ahead_of_the_monotonic_clock_only_where_a_majority_is(
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
        assert at >= last + int(SLEW * passed_us) - 1, "it stood still, or went back"
        assert at <= last + passed_us + 1 or at == said.earliest, "a clock that is not a majority's pulled it ahead"
        if said.latest is not None:
            assert at <= max(said.latest, last + SLEW * passed_us + 1), "it ran on ahead of the truth"
        last = at
        if not is_mine:
            agreed.applied(at)


def test_a_new_leader_goes_on_from_what_it_applied_last() -> None:
    clocks = Clocks()
    agreed = AgreedTime(clocks, bounds=lambda: ClockBounds(None, None), at=NEVER)
    agreed.applied(Instant(START))
    clocks.passed_us, clocks.wall = 1_500_000, START + HOUR_US
    assert agreed.stamp(Instant(START)) == START + 1_500_000


def test_before_the_first_batch_only_a_majority_says_what_time_it_is() -> None:
    clocks, said = Clocks(), ClockBounds(None, None)
    agreed = AgreedTime(clocks, bounds=lambda: said, at=NEVER)
    assert not agreed.begin()
    said = ClockBounds(Instant(START - 5), Instant(START + 5))
    assert agreed.begin()
    said = ClockBounds(None, None)
    clocks.wall += HOUR_US
    assert agreed.stamp(NEVER) == START - 5


def test_no_cluster_is_founded_at_the_time_of_one_wrong_clock_of_a_bare_majority(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = ClockBounds(Instant(START - HOUR_US), Instant(START), is_final=False)
    agreed = AgreedTime(Clocks(), bounds=lambda: said, at=NEVER)
    assert not agreed.begin() and not agreed.begin()
    assert [record.message for record in caplog.records if "differ by" in record.message] == caplog.messages[:1]
    said = ClockBounds(Instant(START), Instant(START))
    assert agreed.begin()
    assert agreed.stamp(NEVER) == START


def test_how_far_it_is_ahead_of_the_truth_is_told() -> None:
    clocks = Clocks()
    said = ClockBounds(Instant(START - HOUR_US), Instant(START - HOUR_US))
    agreed = AgreedTime(clocks, bounds=lambda: said, at=Instant(START))
    assert agreed.ahead_us == HOUR_US
    said = ClockBounds(None, None)
    assert agreed.ahead_us == 0
