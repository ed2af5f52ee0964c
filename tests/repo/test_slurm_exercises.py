"""Exercises with a real Slurm: the scripts that they run, and what they say where a tool is missing."""

from pathlib import Path

import pytest

from tests.faults import faults
from tests.faults.kernel import Unable
from tests.slurm.exercises import EXERCISES
from tests.slurm.exercises.datawarp_scripts import Script, read_scripts
from tests.slurm.exercises.deaths import CALLS, STATES, WAYS


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
    moments = (*CALLS, *STATES)
    rounds = range(len(moments) * len(WAYS))
    assert len({(number % len(moments), number % len(WAYS)) for number in rounds}) == len(rounds)
    assert EXERCISES["slurmctld-kill"].size >= len(rounds)


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unable, match="needs gcc .*: gcc is not installed"):
        faults.build(tmp_path / "shim")
