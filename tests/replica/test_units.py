"""Sizes are exact."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.replica.values.units import SIZE_BYTES_MAX, SizeError, format_size, parse_size, round_up

SUFFIXES = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
for power, letter in enumerate("KMGTP", start=1):
    SUFFIXES[letter] = SUFFIXES[letter + "iB"] = 1024**power


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("case", [str, str.lower, str.upper])
def test_every_suffix_has_its_power_in_any_case(suffix: str, case: type[str]) -> None:
    assert parse_size("3" + case(suffix)) == 3 * SUFFIXES[suffix]


@given(st.integers(0, 10**6), st.text("0123456789", min_size=1, max_size=20), st.sampled_from(sorted(SUFFIXES)))
def test_decimals_are_exact_and_rounded_up_to_a_byte(whole: int, decimals: str, suffix: str) -> None:
    exact = Fraction(f"{whole}.{decimals}") * SUFFIXES[suffix]
    if 0 < exact <= SIZE_BYTES_MAX:
        size = parse_size(f"{whole}.{decimals}{suffix}")
        assert size - 1 < exact <= size
    else:
        with pytest.raises(SizeError):
            parse_size(f"{whole}.{decimals}{suffix}")


@given(st.integers(1, SIZE_BYTES_MAX))
def test_what_is_printed_reads_back_as_the_same_size(size: int) -> None:
    assert parse_size(format_size(size)) == size


@pytest.mark.parametrize(
    ("text", "offset", "says"),
    [
        ("", 0, "empty"),
        ("-5", 0, "sign"),
        ("+5GiB", 0, "sign"),
        ("0", 0, "zero"),
        ("0.0PiB", 0, "zero"),
        ("abc", 0, "does not start with a number"),
        ("GiB", 0, "does not start with a number"),
        ("1KX", 1, "unknown suffix 'KX'"),
        ("10QB", 2, "unknown suffix"),
        ("2N", 1, "unknown suffix"),
        ("1.5.2G", 3, "unexpected character"),
        ("1 G", 1, "unexpected character"),
        ("9223372036854775808", 0, "overflows"),
        ("8192PiB", 0, "overflows"),
        ("9" * 60, 0, "more than 40 digits"),
        ("١٢", 0, "does not start with a number"),
    ],
)
def test_a_size_that_cannot_be_read_names_the_place(text: str, offset: int, says: str) -> None:
    with pytest.raises(SizeError, match=says) as caught:
        parse_size(text)
    assert caught.value.offset == offset
    assert caught.value.remedy


@given(st.integers(0, 2**70), st.integers(1, 2**40))
def test_rounding_up_gives_the_least_multiple_that_is_enough(size: int, granularity: int) -> None:
    rounded = round_up(size, granularity)
    assert rounded % granularity == 0
    assert rounded - granularity < size <= rounded
