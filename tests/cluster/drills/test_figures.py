"""Figures of probes, compared with a direct count."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.drills.figures import Probe, find_lost, gap_at_us, latency_us, longest_gap_us
from forebay.replica.values.units import MICROSECONDS_PER_SECOND

MOMENTS = st.lists(st.one_of(st.none(), st.integers(0, 1000)), max_size=40)


@given(MOMENTS, st.integers(0, 1000), st.integers(0, 1000))
def test_the_longest_gap_is_the_longest_time_without_an_answer(
    answered: list[int | None], one: int, other: int
) -> None:
    from_s, until_s = sorted((one, other))
    probes = [Probe(0.0, None if at is None else float(at)) for at in answered]
    moments = {at for at in answered if at is not None}
    first = max((at for at in moments if at <= from_s), default=from_s)
    last = min((at for at in moments if at >= until_s), default=until_s)
    longest = begun = 0
    for at in range(first, last + 1):
        longest = max(longest, at - (first + begun))
        if at in moments:
            begun = at - first
    assert longest_gap_us(probes, from_s, until_s) == longest * MICROSECONDS_PER_SECOND
    at_s = from_s + gap_at_us(probes, from_s, until_s) // MICROSECONDS_PER_SECOND
    inside = [at for at in moments if at_s < at < at_s + longest]
    assert inside == [] and (at_s in moments or at_s == from_s), "that is where it is"


def test_a_gap_without_an_answer_ends_with_the_period() -> None:
    probes = [Probe(0.0, 1.0), Probe(1.5), Probe(2.0)]
    assert longest_gap_us(probes, 1.2, 9.0) == 8 * MICROSECONDS_PER_SECOND


@given(MOMENTS, st.floats(0, 1))
def test_a_quantile_is_an_observed_latency(answered: list[int | None], share: float) -> None:
    probes = [Probe(0.0, None if at is None else float(at)) for at in answered]
    taken = [at * MICROSECONDS_PER_SECOND for at in answered if at is not None]
    found = latency_us(probes, 0.0, 1.0, share)
    assert found in taken if taken else found == 0
    assert latency_us(probes, 0.5, 1.0, share) == 0, "none was sent then"


def test_a_write_with_another_or_no_answer_is_lost() -> None:
    probes = [Probe(0, 1.0, "a", 7), Probe(0, 1.0, "b", 8), Probe(0, 1.0, "c", 9), Probe(0, None, "d"), Probe(0, 1.0)]
    assert find_lost(probes, {"a": 7, "b": 8, "c": 9}) == []
    assert find_lost(probes, {"a": 7, "b": 80}) == ["b", "c"]
    assert find_lost(probes, {"a": 7, "b": 80}, {"c": "it does not answer"}) == ["b"], "silence is no loss"
