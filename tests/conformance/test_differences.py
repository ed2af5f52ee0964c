"""The file of deliberate differences: strict, each row with its reason, and none that knows a scenario."""

from pathlib import Path

import pytest

from tests.conformance.replayer.differences import DifferencesError, Kind, Situation, read_differences
from tests.conformance.replayer.transcript import read_transcript

HERE = Path(__file__).resolve().parent

ROW = '[[difference]]\nid = "a"\nkind = "shown"\nwhat = "b"\nwhy = "SEMANTICS, States"\n'


def read(tmp_path: Path, text: str):  # type: ignore[no-untyped-def]
    path = tmp_path / "differences.toml"
    path.write_text(text)
    return read_differences(path)


def test_the_rows_of_this_repository_can_be_read_and_none_names_a_scenario() -> None:
    path = HERE / "differences.toml"
    rows = read_differences(path).rows
    assert rows
    names = {one.name for file in (HERE / "site" / "transcripts").glob("*.txt") for one in read_transcript(file)}
    assert names and not [name for name in names if name in path.read_text()]


def test_a_row_is_used_where_it_applies_and_counted(tmp_path: Path) -> None:
    found = read(tmp_path, ROW + 'slurm = "A"\nforebay = "B"\nprovider = "lua"\nsituation = "act=cancel"\n')
    where = Situation("lua", "cancel", "scancel 1")
    row = found.find(Kind.SHOWN, where, "A", "B")
    assert row is not None and found.used["a"] == 0
    found.use(row)
    assert found.used["a"] == 1
    assert found.find(Kind.SHOWN, Situation("datawarp", "cancel"), "A", "B") is None
    assert found.find(Kind.SHOWN, Situation("lua", "submit"), "A", "B") is None
    assert found.find(Kind.SHOWN, where, "A B", "B") is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ROW + 'scenario = "x"\n', "unknown key 'scenario'"),
        (ROW.replace("shown", "other"), "kind 'other'"),
        (ROW.replace("SEMANTICS, States", "because"), "`why` must name the document"),
        (ROW + 'slurm = "("\n', "slurm is not a pattern"),
        (ROW.replace('what = "b"\n', ""), "what must be there"),
        (ROW + ROW, "2 rows are called 'a'"),
        ('[other]\na = "b"\n', "only [[difference]]"),
        ("]", "differences.toml"),
    ],
)
def test_a_wrong_row_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(DifferencesError) as caught:
        read(tmp_path, text)
    assert words in str(caught.value)


REJECTED = "Submitted batch job 7"
LAST = " / Burst Buffer request invalid"


@pytest.mark.parametrize(
    ("row", "provider", "act", "about", "slurm", "forebay"),
    [
        ("a-plus-is-no-size", "lua", "submit", "#BB_LUA pool=p capacity=+5", REJECTED,
         f"script line 2, column 25: the size '+5' has a sign /   what to do: write one without{LAST}"),
        ("an-exponent-is-no-size", "lua", "submit", "#BB_LUA pool=p capacity=1e3", REJECTED,
         f"script line 2, column 26: the size '1e3' has an unexpected character '3' / write one{LAST}"),
        ("a-comma-is-no-decimal-point", "lua", "submit", "#BB_LUA pool=p capacity=1,5K", REJECTED,
         f"script line 2, column 26: the size '1,5K' has an unexpected character ',' / write one{LAST}"),
        ("types-are-known", "datawarp", "submit", "#DW jobdw capacity=1GiB type=odd", REJECTED,
         f"script line 2, column 24: unknown type 'odd' /   what to do: write type=scratch{LAST}"),
        ("one-capacity-a-request", "datawarp", "submit", "#DW jobdw capacity=1GiB capacity=2GiB", REJECTED,
         f"script line 2, column 24: capacity= is written twice /   what to do: write it once{LAST}"),
        ("nothing-is-reserved-twice", "lua", "administer", "scontrol create reservation ReservationName=r",
         "Reservation created: r", "error: 120KiB of pool near would be reserved at once, and it has 96KiB"),
    ],
)  # fmt: skip
def test_what_slurm_takes_and_forebay_rejects_is_declared_for_that_alone(
    row: str, provider: str, act: str, about: str, slurm: str, forebay: str
) -> None:
    found = read_differences(HERE / "differences.toml")
    where = Situation(provider, act, about if act == "administer" else "sbatch", about if act == "submit" else "")
    declared = found.find(Kind.ANSWER, where, slurm, forebay)
    assert declared is not None and declared.id == row
    # The other way round, and for what is a fault of the request's own, nothing is declared.
    assert found.find(Kind.ANSWER, where, forebay, slurm) is None
    assert found.find(Kind.ANSWER, where, slurm, "the replica does not answer") is None
    plain = Situation(provider, act, "", "#BB_LUA pool=p capacity=5K" if provider == "lua" else "#DW jobdw capacity=5K")
    assert found.find(Kind.ANSWER, plain, slurm, forebay) is None
