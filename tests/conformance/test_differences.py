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
