"""How long a client waits, and whom it asks first."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.client.calls import (
    ENDPOINTS_MAX,
    FIRST_WAIT_S,
    LONGEST_WAIT_S,
    RETRY_AFTER_S_MAX,
    BackOff,
    Endpoints,
    parse_retry_after,
)
from forebay.cluster.system.address import Address

A, B, C = (Address("127.0.0.1", port) for port in (1, 2, 3))


@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=30))
def test_waits_grow_to_a_bound_and_at_least_half_is_certain(chances: list[float]) -> None:
    remaining = iter(chances)
    back_off = BackOff(lambda: next(remaining))
    for number, _ in enumerate(chances):
        full_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2**number)
        assert full_s / 2 <= back_off.wait_s() <= full_s


def test_a_retry_after_is_waited_for_up_to_a_bound() -> None:
    assert BackOff(lambda: 0.0).wait_s(3.0) == 3.0
    assert BackOff(lambda: 0.0).wait_s(1e9) == RETRY_AFTER_S_MAX


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("0.25", 0.25), (None, 0), ("", 0), ("soon", 0), ("-1", 0), ("inf", 0), ("nan", 0)],
)
def test_only_a_number_of_seconds_is_a_retry_after(text: str | None, seconds: float) -> None:
    assert parse_retry_after(text) == seconds


def test_who_led_is_asked_first_and_who_failed_last() -> None:
    endpoints = Endpoints([A, B, C, A])
    endpoints.prefer(C)
    assert endpoints.order == (C, A, B)
    endpoints.demote(C)
    assert endpoints.order == (A, B, C)
    assert endpoints.next_after({A}) == B
    assert endpoints.next_after({A, B, C}) is None


def test_a_leader_learned_from_a_redirect_is_kept_within_a_bound() -> None:
    endpoints = Endpoints([A])
    for port in range(100, 100 + 2 * ENDPOINTS_MAX):
        endpoints.prefer(Address("127.0.0.1", port))
    assert len(endpoints.order) == ENDPOINTS_MAX
    assert A in endpoints.order


def test_no_endpoint_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one replica"):
        Endpoints([])
