"""What counts as a change of a recorded step, and what does not."""

import pytest

from tests.contract.golden import _is_kept

STEP = [
    "== 7 operator: POST /v1/x",
    "200",
    "  job_id: 3",
    '  + job 3 {"name":"a","cpus":1}',
    "  ~ job 4 state - -> 1; cpus 1 -> 2",
]


def changed(at: int, row: str) -> list[str]:
    return [*STEP[:at], row, *STEP[at + 1 :]]


@pytest.mark.parametrize(
    "now",
    [
        STEP,
        [*STEP[:2], '  added: {"x":1}', *STEP[2:]],
        [*STEP[:3], "  added: 1", *STEP[3:]],
        changed(3, '  + job 3 {"name":"a","added":[1],"cpus":1}'),
        changed(4, "  ~ job 4 state - -> 1; cpus 1 -> 2; added 1 -> 3"),
    ],
)
def test_an_added_field_is_no_difference(now: list[str]) -> None:
    assert _is_kept(STEP, now)


@pytest.mark.parametrize(
    "now",
    [
        changed(1, "409 wrong_state"),
        changed(2, "  job_id: 4"),
        changed(3, '  + job 3 {"name":"b","cpus":1}'),
        changed(3, '  + job 3 {"name":"a"}'),
        changed(4, "  ~ job 4 state - -> 1"),
        changed(4, "  ~ job 5 state - -> 1; cpus 1 -> 2"),
        STEP[:-1],
        [*STEP, '  + job 9 {"name":"c"}'],
        [*STEP[:2], *STEP[3:]],
    ],
)
def test_a_changed_lost_or_unexpected_row_is_a_difference(now: list[str]) -> None:
    assert not _is_kept(STEP, now)
