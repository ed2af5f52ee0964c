"""burst_buffer.lua parses requests as the grammar does, and rejects nothing that Forebay accepts."""

import itertools
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests.fuzzing.external_jobs import (
    ACCEPTED,
    ELSEWHERE,
    INTERPRETERS,
    LAXER,
    REFUSED,
    STRICTER,
    ExternalJobCase,
    asked_of_forebay,
    asked_of_lua,
    compare,
    interpreters,
    kind_of,
    make_external_job_case,
)

CASES = 4_000

lua = pytest.mark.parametrize(
    "interpreter",
    [
        pytest.param(name, marks=pytest.mark.skipif(name not in interpreters(), reason=f"{name} is not installed"))
        for name in INTERPRETERS
    ],
)


@lua
def test_lua_accepts_everything_that_forebay_accepts(interpreter: str, tmp_path: Path) -> None:
    cases = [make_external_job_case(Random(f"{interpreter}:{number}")) for number in range(CASES)]
    found = compare(interpreter, cases, tmp_path)
    assert [one for one in found if kind_of(one) == STRICTER] == []
    count = Counter(kind_of(one) for one in found)
    assert count[ACCEPTED] > CASES // 5 and count[REFUSED] > CASES // 5
    # Lua may accept more, which `setup` then rejects; this is rare.
    assert count[LAXER] + count[ELSEWHERE] < CASES // 50, count


SPACE = "#BB_LUA pool=fast capacity=1GiB "
HOSTILE = {
    "words": (SPACE + "# ", "a "),
    "options": (SPACE, "a=b "),
    "tabs": (SPACE, "pool=\t"),
    "blanks": ("#BB_LUA ", " "),
    "backslashes": ("#BB_LUA ", "\\"),
    "continued": ("", "#BB_LUA a \\\n"),
    "comments": ("", "#\n"),
    "empty lines": ("", "\n"),
    "slashes": (SPACE + "\n#BB_LUA stage_in type=file destination=$DW_JOB_STRIPED/x source=/", "a/"),
    "directives": (SPACE + "\n", "#BB_LUA stage_out type=file source=$DW_JOB_STRIPED/a destination=/b\n"),
}
"""Start of a script, and the text repeated after it to make the check expensive."""


@lua
@pytest.mark.parametrize("size_bytes", [60_000, 250_000])
def test_no_script_keeps_slurmctld_busy(interpreter: str, size_bytes: int, tmp_path: Path) -> None:
    """The limit is far above the time of all scripts, and below that of a check with quadratic time."""
    scripts = [
        "#!/bin/sh\n" + begins + again * ((size_bytes - len(begins)) // len(again)) + end
        for begins, again in HOSTILE.values()
        for end in ("", "x")
    ]
    cases = [ExternalJobCase(script, "BB_LUA") for script in scripts]
    for case, said in zip(cases, asked_of_lua(interpreter, cases, tmp_path, cpu_s=4), strict=True):
        forebay = asked_of_forebay(case)
        assert bool(said) == bool(forebay), (case.script[:80], said, forebay)
        if "words" in forebay:
            assert said == forebay


@lua
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("#BB_LUA jobdw pool=fsat capacity=1GiB", "column 15: pool 'fsat' does not exist; use one of: fast, gone"),
        ("#BB_LUA pool=gone capacity=1GiB", "column 9: pool gone is out of service; use another pool, or submit"),
        (
            "#BB_LUA pool=fast capacity=1.5GiB",
            "column 29: Slurm reads '1.5GiB' as the integer before its decimal point",
        ),
        ("#BB_LUA pool=fast capacity=4097PiB", "column 19: '4097PiB' exceeds the capacity of pool fast, 4PiB"),
        ("#BB_LUA pool=fast capacity=1GiB é x", "column 33: 'é' is not an option"),
    ],
)
def test_a_rejection_at_submission_has_line_column_and_remedy(
    interpreter: str, line: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzzing.external_jobs.POOLS", {"fast": 2**52, "gone": 0})
    found = asked_of_lua(interpreter, [ExternalJobCase(f"#!/bin/sh\n{line}\n", "BB_LUA")], tmp_path)
    assert found[0].startswith(f"script line 2, {says}")


SPACE = "#!/bin/sh\n#BB_LUA jobdw pool=fast capacity=1GiB access_mode=striped,ldbalance\n"
INSIDES = ("$DW_JOB_STRIPED", "${DW_JOB_STRIPED}/a", "$DW_JOB_LDBALANCE/a/x", "$FOREBAY_JOB_DIR/striped/b")
OUTSIDES = ("/o/r", "/o/r/", "/o//r/./x", "/o/%j", "/o/r-s")


@lua
def test_lua_and_forebay_reject_the_same_overlapping_destinations(
    interpreter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.fuzzing.external_jobs.POOLS", {"fast": 2**52})
    kinds = ("file", "directory")
    lines = [
        f"stage_out type={kind} source={inside} destination={outside}"
        for kind, inside, outside in itertools.product(kinds, INSIDES, OUTSIDES)
    ]
    lines += [f"stage_out type=list source=/in/{name} destination={outside}" for name in "lm" for outside in OUTSIDES]
    lines += [
        f"stage_in type={kind} source=/in/{name} destination={inside}"
        for kind, name, inside in itertools.product(kinds, "xy", INSIDES)
    ]
    cases = [
        ExternalJobCase(f"{SPACE}#BB_LUA {one}\n#BB_LUA {other}\n", "BB_LUA")
        for one, other in itertools.product(lines, repeat=2)
    ]
    found = compare(interpreter, cases, tmp_path)
    assert [one for one in found if kind_of(one) not in (ACCEPTED, REFUSED)] == []
    overlaps = [one for one in found if "overlaps" in one.lua]
    assert len(overlaps) > len(lines)
    assert all("overlaps" in one.forebay for one in overlaps)
