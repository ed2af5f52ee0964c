"""Exercises with a real Slurm: the scripts that they run, and what they say where a tool is missing."""

from collections import Counter
from pathlib import Path

import pytest

from tests.faults import faults
from tests.faults.kernel import Unable
from tests.slurm.exercises import EXERCISES
from tests.slurm.exercises.datawarp_scripts import Script, read_scripts
from tests.slurm.exercises.deaths import CALLS, STATES, WAYS, moment_and_way


def test_there_are_thirty_scripts_of_datawarp() -> None:
    assert len(read_scripts()) >= 30


@pytest.mark.parametrize("script", read_scripts(), ids=lambda script: script.name)
def test_a_script_of_datawarp_says_what_is_documented_and_how_it_ends(script: Script) -> None:
    ends = [key for key in ("ends", "rejected", "held") if key in script.head]
    assert len(ends) == 1
    assert script.value("documented")
    assert all(len(values) == 1 for key, values in script.head.items() if key not in ("result", "sbatch", "bbf"))


def test_a_script_that_follows_another_comes_behind_it() -> None:
    names = [script.name for script in read_scripts()]
    for script in read_scripts():
        assert not script.follows or names.index(script.follows) < names.index(script.name)


def test_as_many_rounds_as_pairs_end_slurmctld_in_each_way_in_each_moment() -> None:
    rounds = len((*CALLS, *STATES)) * len(WAYS)
    assert len({moment_and_way(number, WAYS, 1) for number in range(rounds)}) == rounds
    assert EXERCISES["slurmctld-kill"].size >= rounds


def test_each_way_ends_slurmctld_in_as_many_rounds() -> None:
    size = EXERCISES["slurmctld-kill"].size
    ways = Counter(moment_and_way(number, WAYS, 1)[1] for number in range(size))
    assert set(ways.values()) == {size // len(WAYS)}


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unable, match="needs gcc .*: gcc is not installed"):
        faults.build(tmp_path / "shim")
