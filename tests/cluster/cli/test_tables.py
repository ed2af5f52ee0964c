"""Table cells whose unit depends on the value."""

from __future__ import annotations

import pytest

from forebay.cluster.cli.text.tables import _offset


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(None, None), (0.0, "+0 ms"), (0.998, "+998 ms"), (-0.25, "-250 ms"), (1.0, "+1.0 s"), (-1.0, "-1.0 s")],
)
def test_clock_offsets_above_a_second_are_shown_in_seconds(seconds: float | None, shown: str | None) -> None:
    assert _offset(seconds) == shown
