"""Command ids: UUIDv7, new for every command, and telling when they were made."""

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.cluster.schemas.command_ids import instant_of, new_command_id
from forebay.cluster.system.clock import SystemClock
from forebay.replica.values.units import Instant
from tests.clocks import ManualClock


@given(st.integers(0, (2**48 - 1) * 1000), st.binary(min_size=10, max_size=10))
def test_an_id_is_a_uuid_of_version_7_and_tells_its_time(now: int, random: bytes) -> None:
    text = new_command_id(ManualClock(Instant(now)), lambda count: random[:count])
    parsed = uuid.UUID(text)
    assert (parsed.version, parsed.variant, parsed.hex) == (7, uuid.RFC_4122, text)
    assert instant_of(text) == now // 1000 * 1000


def test_the_example_of_rfc_9562_is_read_to_the_millisecond() -> None:
    # RFC 9562, appendix A.6: made on 22 February 2022 19:22:22 GMT, 0x017F22E279B0 ms.
    assert instant_of("017f22e279b07cc398c4dc0c0c07398f") == 0x017F22E279B0 * 1000


def test_ids_of_one_moment_differ() -> None:
    clock = ManualClock(SystemClock().now())
    assert len({new_command_id(clock) for _ in range(1000)}) == 1000


def test_all_random_bits_come_from_the_entropy() -> None:
    clock = ManualClock(Instant(0))
    ones = int(new_command_id(clock, lambda count: b"\xff" * count), 16)
    zeros = int(new_command_id(clock, lambda count: b"\x00" * count), 16)
    assert (ones ^ zeros).bit_count() == 74


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x" * 32,
        "0" * 32,
        "0" * 31,
        "017F22E279B07CC398C4DC0C0C07398F",
        "017f22e279b04cc398c4dc0c0c07398f",
        "017f22e279b07cc398c4dc0c0c0739 8f",
        "01 7f22e279b07cc398c4dc0c0c07398f",
    ],
)
def test_what_is_no_uuid_of_version_7_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="UUIDv7"):
        instant_of(text)


def test_a_clock_that_no_id_can_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="set this machine's clock"):
        new_command_id(ManualClock(Instant(-1_000)))
