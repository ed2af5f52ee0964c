"""What a node may move is shared out whole, fairly, and never more than that."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.cluster.agent.rate_governor import DEMAND_BYTES_S_MIN, RateClaim, RateGovernor, fill, share_out
from forebay.cluster.agent.transfer.progress import Counters, SharedCounters
from forebay.cluster.agent.transfer.rate_limit import UNLIMITED, TransferControl
from forebay.replica.model.transfers import RateShares

# Bytes per second: what is smaller than any normal number has no tenth digit to be compared.
amounts = st.one_of(st.floats(0, 1e12, allow_subnormal=False), st.just(math.inf))


@given(amount=amounts, wanted=st.lists(amounts, max_size=8))
def test_filling_gives_everybody_what_he_wants_or_the_same_and_keeps_nothing_back(
    amount: float, wanted: list[float]
) -> None:
    shares = fill(amount, wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    total = sum(shares)
    assert total <= amount * (1 + 1e-9) or math.isinf(amount)
    short = [share for share, want in zip(shares, wanted, strict=True) if share < want * (1 - 1e-9)]
    if short:
        # Who gets less than he wants gets as much as anybody, and then nothing is left over.
        assert min(short) >= max(shares) * (1 - 1e-9)
        assert total == pytest.approx(amount)


limits = st.one_of(st.just(math.inf), st.integers(0, 10**10).map(float))
claims = st.builds(
    RateClaim,
    user=st.sampled_from(["alice", "bob", "carol"]),
    transfer=limits,
    of_user=limits,
    of_node=limits,
    wanted=st.one_of(st.just(math.inf), st.floats(DEMAND_BYTES_S_MIN, 1e10)),
)


@settings(max_examples=300)
@given(wanted=st.lists(claims, max_size=7), data=st.data())
def test_no_limit_is_exceeded_whoever_shares_it_and_a_pause_is_only_where_a_limit_is_0(
    wanted: list[RateClaim], data: st.DataObject
) -> None:
    of_node = data.draw(limits)
    of_user = {user: data.draw(limits) for user in ("alice", "bob", "carol")}
    by_job = {job: claim._replace(of_node=of_node, of_user=of_user[claim.user]) for job, claim in enumerate(wanted)}
    rates = share_out(by_job)
    assert rates.keys() == by_job.keys()
    for job, claim in by_job.items():
        assert (rates[job] == 0) == (min(claim.transfer, claim.of_user, of_node) == 0)
        assert rates[job] == UNLIMITED or rates[job] <= max(1, claim.transfer)
        assert rates[job] != UNLIMITED or math.isinf(min(claim.transfer, claim.of_user, of_node))
    for jobs, limit in [
        (list(by_job), of_node),
        *(([job for job, claim in by_job.items() if claim.user == user], most) for user, most in of_user.items()),
    ]:
        if math.isfinite(limit):
            # At least a byte per second goes to each that is not paused.
            assert sum(rates[job] for job in jobs) <= limit * (1 + 1e-9) + len(jobs)


class Transfer:
    """One that the governor holds."""

    def __init__(self) -> None:
        self.control = TransferControl()
        self.descriptor = SharedCounters.create()
        self.counters = SharedCounters(self.descriptor)

    @property
    def rate(self) -> int:
        return self.control.rate_bytes_s

    def moved(self, size_bytes: int, *, held: bool) -> None:
        """Let it have moved so much since the last time."""
        self.counters.write(Counters(bytes_done=self.counters.read().bytes_done + size_bytes))
        if held:
            self.counters.count_wait()

    def close(self) -> None:
        self.counters.close()
        self.control.close()
        os.close(self.descriptor)


@pytest.fixture
def transfers() -> Iterator[list[Transfer]]:
    made = [Transfer() for _ in range(3)]
    yield made
    for transfer in made:
        transfer.close()


NODE = RateShares(node_bytes_s=90_000_000)


def test_transfers_of_a_node_share_its_rate_between_users_first(transfers: list[Transfer]) -> None:
    governor = RateGovernor()
    one, two, three = transfers
    governor.begin(1, "alice", 0, NODE, one.control, one.counters)
    assert one.rate == 90_000_000
    governor.begin(2, "alice", 0, NODE, two.control, two.counters)
    governor.begin(3, "bob", 0, NODE, three.control, three.counters)
    assert [transfer.rate for transfer in transfers] == [22_500_000, 22_500_000, 45_000_000]
    governor.end(3)
    assert [one.rate, two.rate] == [45_000_000, 45_000_000]
    assert governor.governs


def test_what_one_does_not_need_another_one_has_and_gets_back_when_it_does(transfers: list[Transfer]) -> None:
    governor = RateGovernor()
    one, two, _ = transfers
    for job, transfer in ((1, one), (2, two)):
        governor.begin(job, "alice", 0, NODE, transfer.control, transfer.counters)
    now_s = 100.0
    governor.poll(now_s)
    for _ in range(3):
        now_s += 0.1
        one.moved(1_000_000, held=False)
        two.moved(4_500_000, held=True)
        governor.poll(now_s)
    # 10 MB/s and room to double it; the other one has all the rest.
    assert one.rate == pytest.approx(20_000_000, rel=0.01) and one.rate + two.rate == pytest.approx(
        90_000_000, rel=0.01
    )
    one.moved(2_000_000, held=True)
    two.moved(7_000_000, held=True)
    governor.poll(now_s + 0.1)
    assert one.rate == two.rate == 45_000_000


def test_a_limit_that_changes_takes_effect_at_once_and_0_pauses(transfers: list[Transfer]) -> None:
    governor = RateGovernor()
    one, two, _ = transfers
    governor.begin(1, "alice", 5_000, None, one.control, one.counters)
    governor.begin(2, "bob", 0, None, two.control, two.counters)
    assert [one.rate, two.rate] == [5_000, UNLIMITED] and not governor.governs
    governor.change(2, RateShares(user_bytes_s=0))
    assert [one.rate, two.rate] == [5_000, 0]
    governor.change(2, RateShares(transfer_bytes_s=70_000, user_bytes_s=1_000_000))
    assert [one.rate, two.rate] == [5_000, 70_000]
    governor.change(2, None)
    governor.change(77, NODE)
    assert [one.rate, two.rate] == [5_000, UNLIMITED]
