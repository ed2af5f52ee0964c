"""Rates: never exceeded by all processes of a transfer together, changed and ended while it runs."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.transfer.errors import TransferPaused
from forebay.cluster.agent.transfer.progress import Counters, SharedCounters
from forebay.cluster.agent.transfer.rate_limit import (
    BURST_S,
    POLL_S,
    STEP_BYTES_MIN,
    UNLIMITED,
    Pace,
    TransferControl,
    TransferStopped,
)
from forebay.cluster.system.clock import SystemClock
from tests.clocks import ManualClock


class Harness:
    """A transfer's pace by a clock that only its waits move."""

    def __init__(self) -> None:
        self.control = TransferControl()
        self.descriptor = SharedCounters.create()
        self.shared = SharedCounters(self.descriptor)
        self.clock = ManualClock()
        self.pace = self.another()

    def another(self) -> Pace:
        """Return what a helper process makes of the same descriptors."""
        pace = Pace(self.control.descriptor, self.shared, self.clock)
        pace._never.wait = self.clock.advance  # type: ignore[method-assign,assignment]
        return pace

    def close(self) -> None:
        self.shared.close()
        self.control.close()
        os.close(self.descriptor)


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    made.close()


@settings(max_examples=60, deadline=None)
@given(
    rate=st.integers(1, 10**9),
    takes=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 10**8), st.floats(0, 0.5)), min_size=3, max_size=12),
)
def test_whatever_helpers_take_no_more_moves_than_the_rate_a_burst_and_a_step(
    rate: int, takes: list[tuple[int, int, float]]
) -> None:
    harness = Harness()
    try:
        helpers = [harness.pace, harness.another(), harness.another()]
        harness.control.rate_bytes_s = rate
        begun_s, moved, largest = harness.clock.monotonic_s(), 0, 0
        for helper, most, idle_s in takes:
            harness.clock.advance(idle_s)
            step = helpers[helper].step_bytes(most)
            assert 1 <= step <= most and step <= max(STEP_BYTES_MIN, rate // 10)
            # Long pauses would only be waited out.
            if step / rate > 100:
                break
            helpers[helper].take(step)
            moved, largest = moved + step, max(largest, step)
            passed_s = harness.clock.monotonic_s() - begun_s
            assert moved <= rate * (passed_s + BURST_S) + largest + 1
    finally:
        harness.close()


@pytest.mark.parametrize("rate", [7, 30, 1000, 123_456_789])
def test_over_time_all_of_the_rate_is_had(harness: Harness, rate: int) -> None:
    harness.control.rate_bytes_s = rate
    begun_s, moved, step = harness.clock.monotonic_s(), 0, max(1, rate // 20)
    while moved < rate * 20:
        harness.pace.take(step)
        moved += step
    assert harness.clock.monotonic_s() - begun_s == pytest.approx(20, rel=0.05)


def test_a_rate_that_rises_counts_at_the_next_look_however_much_was_owed(harness: Harness) -> None:
    harness.control.rate_bytes_s = 1
    harness.pace.take(STEP_BYTES_MIN)
    waits: list[float] = []

    def wait(wait_s: float) -> None:
        waits.append(wait_s)
        harness.clock.advance(wait_s)
        harness.control.rate_bytes_s = 10**9

    harness.pace._never.wait = wait  # type: ignore[method-assign,assignment]
    harness.pace.take(STEP_BYTES_MIN)
    assert waits[0] == POLL_S and len(waits) <= 2 and harness.shared.waits == len(waits)


def test_a_rate_of_0_pauses_until_it_is_another_and_the_pause_is_a_sign_of_life(harness: Harness) -> None:
    harness.control.rate_bytes_s = 0
    seen: list[int] = []

    def wait(wait_s: float) -> None:
        harness.clock.advance(wait_s)
        seen.append(harness.shared.waits)
        if len(seen) == 1000:
            harness.control.rate_bytes_s = UNLIMITED

    harness.pace._never.wait = wait  # type: ignore[method-assign,assignment]
    harness.pace.take(1)
    assert seen == list(range(1, 1001))


@pytest.mark.parametrize(("resuming", "kind"), [(False, TransferStopped), (True, TransferPaused)])
@pytest.mark.parametrize("rate", [UNLIMITED, 0, 1])
def test_who_is_told_to_stop_stops_at_once_at_any_rate(
    harness: Harness, resuming: bool, kind: type[BaseException], rate: int
) -> None:
    harness.control.rate_bytes_s = 10**9
    harness.pace.take(10**6)
    harness.control.rate_bytes_s = rate
    harness.pace.check()
    harness.control.stop(resuming=resuming)
    for ask in (harness.pace.check, lambda: harness.pace.take(1)):
        with pytest.raises(kind):
            ask()


def test_who_waits_for_a_rate_is_stopped_within_a_look() -> None:
    control, descriptor = TransferControl(), SharedCounters.create()
    shared = SharedCounters(descriptor)
    pace = Pace(control.descriptor, shared, SystemClock())
    control.rate_bytes_s = 0
    ended: list[BaseException] = []

    def move() -> None:
        try:
            pace.take(1)
        except TransferStopped as error:
            ended.append(error)

    thread = threading.Thread(target=move)
    thread.start()
    while not shared.waits:
        os.sched_yield()
    control.stop()
    thread.join(10)
    assert len(ended) == 1
    shared.close()
    control.close()
    os.close(descriptor)


def test_without_a_limit_nothing_is_waited_for_or_cut(harness: Harness) -> None:
    for pace in (harness.pace, Pace(-1, harness.shared, harness.clock)):
        before_s = harness.clock.monotonic_s()
        assert pace.step_bytes(10**12) == 10**12
        pace.take(10**12)
        assert harness.clock.monotonic_s() == before_s
    assert harness.shared.waits == 0


def test_a_transfer_cannot_change_its_own_rate() -> None:
    control = TransferControl()
    with pytest.raises(PermissionError):
        mmap.mmap(control.descriptor, mmap.PAGESIZE)
    with pytest.raises(PermissionError):
        os.write(control.descriptor, b"x")
    reopened = os.open(f"/proc/self/fd/{control.descriptor}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.write(reopened, b"x")
    control.rate_bytes_s = 5
    assert control.rate_bytes_s == 5
    os.close(reopened)
    control.close()


def test_counters_and_the_file_are_seen_as_they_were_written(harness: Harness) -> None:
    told = Counters(1, 2, 3, 4, 5, 6, 7, 8, 9, 3, 10, 11)
    harness.shared.write(told)
    harness.shared.at("d/" + "x" * 5000 + "/end")
    other = SharedCounters(harness.descriptor)
    assert other.read() == told and other.file.endswith("x/end") and len(other.file) == 1000
    harness.shared.at(b"\xff\n")
    assert other.file == "\ufffd\n"
    other.close()
